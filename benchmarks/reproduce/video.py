"""Videos of different lengths: a step is as long as its video.

    python benchmarks/reproduce/video.py [--seeds 0,1,2] [--rounds 100]

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 6.3: an LSTM over UCF101, 8 ranks. Against Horovod solo was 1.64 times as
fast, with 60.6 % instead of 69.6 % accuracy, and majority 1.27 times as fast, with 69.7 %.

Emulated: the lengths and the step times have the paper's moments, and times are a tenth of the paper's; features are
synthetic, and the network is a small one.
"""

from __future__ import annotations

from study import Study, main

STUDY = Study(
    "videos",
    ranks=8,
    common=["--workload", "video", "--imbalance", "trace-video:0.1"],
    methods={
        "synchronous": ["allreduce_sgd"],
        "majority": ["eager_sgd", "--partial", "majority"],
        "quorum 5": ["eager_sgd", "--partial", "quorum", "--quorum", "5"],
        "solo": ["eager_sgd", "--partial", "solo"],
    },
    paper={"majority": "1.27, 69.7 % (69.6)", "solo": "1.64, 60.6 % (69.6)"},
    remarks=[
        "The paper times 50 epochs, in which every rank computes all its batches. Here a late rank skips "
        "rounds, and steps/s counts rounds: solo makes more rounds in a second, with fewer gradients in each.",
    ],
    rounds=100,
    row="videos of many lengths",
)

if __name__ == "__main__":
    main(__doc__, "video", [STUDY])
