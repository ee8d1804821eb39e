"""The training of README.md, of whose two ranks one stands still, with its event loop, for more rounds than `history`.

It goes on when the other rank is far ahead, which makes further steps then, or has made its last one.
"""

import hashlib
import sys
from pathlib import Path

import torch

import asyncoll
from asyncoll.training import EagerSGD

HISTORY = 64


async def main(comm: asyncoll.Communicator) -> None:
    folder, ends = Path(sys.argv[1]), sys.argv[2] == "ends"
    goes_on, recovered = folder / "go on", folder / "recovered"
    torch.manual_seed(comm.rank)  # each rank has data of its own
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sgd = EagerSGD(comm, model, optimizer, history=HISTORY)
    await sgd.start()  # all ranks get rank 0's model
    recoveries, stands = 0, comm.rank == 1
    while sgd.round < 10 * HISTORY or not (ends or recovered.exists()):
        x = torch.randn(16, 8)
        torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        if comm.rank == 0 and stands is False and sgd.round >= (10 if ends else 4) * HISTORY - 1:
            goes_on.write_text("")  # returns when the other rank reads
            stands = True
        if comm.rank == 1 and stands:
            goes_on.read_text()
            stands = False
        recoveries += (await sgd.step()).recovered  # waits for no late rank
        if recoveries:
            recovered.touch()
    await sgd.finish()  # all ranks have one model
    (momentum,) = (optimizer.state[model.weight]["momentum_buffer"],)
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), momentum))
    print(f"{hashlib.sha256(bits).hexdigest()} after round {sgd.round}, {recoveries} recovered")


if __name__ == "__main__":
    asyncoll.run(main)
