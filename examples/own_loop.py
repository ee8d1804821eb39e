"""A training loop of your own: a solo allreduce reduces the gradients, and no rank waits for a late one.

Run `asyncoll launch -n 4 examples/own_loop.py`.
"""

import time

import torch

import asyncoll

ROUNDS = 200


async def main(comm: asyncoll.Communicator) -> None:
    """Fit a line."""
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = asyncoll.flatten(model)
    await comm.broadcast(flat.parameters)
    done = 0
    while done < ROUNDS:  # count rounds, not steps: a late rank skips rounds
        x = torch.randn(16, 8)
        flat.zero_gradients()
        torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        # Sleeping blocks the loop, as computing does. In one step of ten a rank is late.
        time.sleep(0.02 if torch.rand(()) < 0.1 else 0.002)  # noqa: ASYNC251
        reduction = await comm.solo_allreduce(flat.gradients, op=asyncoll.AVG, history=ROUNDS)
        for gradients in reduction.results():  # each round's result once, so weights stay equal
            flat.gradients.copy_(gradients)
            optimizer.step()
        done = reduction.round
    print(f"rank {comm.rank}: weights {[round(w, 3) for w in flat.parameters.tolist()]}")


if __name__ == "__main__":
    asyncoll.run(main)
