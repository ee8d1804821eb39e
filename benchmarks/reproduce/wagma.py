"""WAGMA-SGD beside the methods that its paper compares with, and without each of its parts.

    python benchmarks/reproduce/wagma.py [--seeds 0,1,2] [--rounds 120]

Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in parallel stochastic
optimization with wait-avoiding group averaging", IEEE TPDS 2021, section V: ResNet-50 on ImageNet, 64 ranks of which
two random ones are 320 ms late in each step. Throughput at that scale is in `throughput.py`, in virtual time.

Emulated: 8 processes, digits, 100 ms a step, and two random ranks 100 ms late. The paper's accuracies are of its own
workload, and only their order can be compared.
"""

from __future__ import annotations

from study import Study, main

MACHINE = ["--workload", "digits", "--compute", "100ms", "--imbalance", "k-random:2:100ms"]
COMPARED = Study(
    "WAGMA, the six methods it is compared with, and a parameter server",
    ranks=8,
    common=MACHINE,
    methods={
        "Allreduce-SGD": ["allreduce_sgd"],
        "local SGD": ["local_sgd", "--every", "1"],
        "D-PSGD": ["dpsgd"],
        "AD-PSGD": ["adpsgd"],
        "SGP, 2 peers": ["sgp", "--peers", "2"],
        "eager-SGD": ["eager_sgd", "--partial", "solo"],
        "parameter server": ["parameter_server", "--learning-rate", "0.125"],
        "WAGMA": ["wagma_sgd"],
    },
    paper={
        "Allreduce-SGD": "1.00, 75.8 %",
        "local SGD": "1.01, 75.3 %",
        "D-PSGD": "1.02, much lower",
        "AD-PSGD": "faster than WAGMA, much lower",
        "SGP, 2 peers": "1.01, between",
        "eager-SGD": "1.12, -",
        "WAGMA": "1.26, 75.0 %",
    },
    remarks=[
        "The parameter server takes a whole step with the gradient of each rank: its learning rate is an eighth.",
        "Ratios of the paper are over Allreduce-SGD at 64 ranks, of which 2 are late; here 2 of 8 are late.",
        "The paper compares seven methods, WAGMA-SGD among them (section V-A). The slides of eager-SGD have a "
        "parameter server.",
    ],
    rounds=120,
)
ABLATIONS = Study(
    "WAGMA without its parts",
    ranks=8,
    common=MACHINE,
    methods={
        "WAGMA, S = 3": ["wagma_sgd"],
        "no group averages (local SGD, 10 steps)": ["local_sgd", "--every", "10"],
        "fixed groups": ["wagma_sgd", "--fixed"],
        "S = P": ["wagma_sgd", "--group-size", "8"],
        "S = 2": ["wagma_sgd", "--group-size", "2"],
    },
    paper={
        "WAGMA, S = 3": "1.00, 75.0 %",
        "no group averages (local SGD, 10 steps)": "-, 66.9 %",
        "fixed groups": "-, 73.5 %",
        "S = P": "0.93, 75.0 %",
        "S = 2": "-, 72.8 % (S = 4 of 64)",
    },
    remarks=["S is the square root of P in the paper: 8 of 64; here 3 of 8."],
    rounds=120,
)

if __name__ == "__main__":
    main(__doc__, "wagma", [COMPARED, ABLATIONS])
