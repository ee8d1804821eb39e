"""Severe imbalance on images: every rank is late, by 50 to 400 ms, shifted by one rank in each step.

    python benchmarks/reproduce/cifar_severe.py [--seeds 0,1,2] [--rounds 100]

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 6.2.3: ResNet-32 on CIFAR-10, 8 ranks. Majority made 1.29 times the steps of
synchronous SGD (Horovod) at equal accuracy; solo was faster and less accurate.

Emulated: the delays are the paper's; the network and its images are small ones, and each step is stretched to 100 ms.
"""

from __future__ import annotations

from study import Study, main

STUDY = Study(
    "severe imbalance",
    ranks=8,
    common=["--workload", "cifar", "--compute", "100ms", "--imbalance", "all-skewed:50ms-400ms"],
    methods={
        "synchronous": ["allreduce_sgd"],
        "majority": ["eager_sgd", "--partial", "majority"],
        "quorum 5": ["eager_sgd", "--partial", "quorum", "--quorum", "5"],
        "solo": ["eager_sgd", "--partial", "solo"],
    },
    paper={"majority": "1.29, equal accuracy", "solo": "faster, less accurate"},
    remarks=[
        "The paper does not state the time of a step without delays. The ratio depends on it; here it is 100 ms.",
        "A late rank skips rounds here, and keeps its gradient for a later one: the paper's code drops it.",
    ],
    rounds=100,
    row="images, all ranks late",
)

if __name__ == "__main__":
    main(__doc__, "cifar_severe", [STUDY])
