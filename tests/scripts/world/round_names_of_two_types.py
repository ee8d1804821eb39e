"""Rounds of one name that rank 0 gives as a string of numpy and the others as a plain one."""

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    name = "w" if comm.rank else np.str_("w")
    with asyncoll.deadline(60):  # by message, ranks that take it for two names wait for ever
        reduction = await comm.quorum_allreduce(np.ones(1), quorum=comm.size, name=name)
    print(reduction.active)


asyncoll.run(main)
