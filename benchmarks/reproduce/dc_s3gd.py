"""DC-S3GD beside synchronous SGD and DC-ASGD, and without its delay compensation.

    python benchmarks/reproduce/dc_s3gd.py [--seeds 0,1,2] [--rounds 180]

Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD for large-scale decentralized neural network training", DLS
2019, section IV: ResNet-50 on ImageNet with up to 128 nodes and 128 k images a step. Validation accuracies are above
the reference up to 32 k images (77.5 % and 75.3 % at 16 k), and below at 128 k (69.7 and 75.0). The paper has no wall
time of synchronous SGD; its model is t_C + t_AR for that, max(t_C, t_AR) for DC-S3GD, and t_C + t_W2PS for DC-ASGD.

Emulated: 4 processes, digits, 50 ms a step, momentum 0.9; the paper states none. Communication takes a millisecond, so
that nothing but the delays differs in time; `dc_s3gd_overlap.py` measures the overlap.
"""

from __future__ import annotations

from study import Study, main

STUDY = Study(
    "delay compensation",
    ranks=4,
    common=["--workload", "digits", "--compute", "50ms", "--momentum", "0.9", "--learning-rate", "0.2"],
    methods={
        "SSGD": ["allreduce_sgd"],
        "DC-S3GD": ["dc_s3gd"],
        "DC-S3GD, lambda = 0": ["dc_s3gd", "--lambda0", "0"],
        "parameter server": ["parameter_server", "--learning-rate", "0.05"],
        "DC-ASGD, constant": ["dc_asgd", "--learning-rate", "0.05"],
        "DC-ASGD, adaptive": ["dc_asgd", "--adaptive", "--learning-rate", "0.05"],
    },
    paper={
        "SSGD": "reference, 75.3 % (16 k)",
        "DC-S3GD": "77.5 % (16 k), 69.7 % (128 k, reference 75.0)",
    },
    remarks=[
        "A parameter server takes a whole step with the gradient of each rank, not with their mean: its learning rate "
        "is that of the others divided by the number of ranks.",
        "The paper gains 0.5 points by the scaled lambda over a constant one. It has no run with lambda = 0.",
    ],
    rounds=180,
)

if __name__ == "__main__":
    main(__doc__, "dc_s3gd", [STUDY])
