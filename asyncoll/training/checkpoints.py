"""Files with the state of a training, of which a job that was killed at any moment finds the newest complete set."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

import asyncoll

_NAME = re.compile(r"round-(\d+)-rank-(\d+)-of-(\d+)\.pt")


class Checkpoints:
    """One rank's files in `folder`: one for each saved round, of which the newest `keep` stay.

        checkpoints = Checkpoints(comm, "runs/mine")
        if saved := await checkpoints.newest():
            model.load_state_dict(saved["model"])
            ...
        checkpoints.save(sgd.round, model=model.state_dict(), optimizer=optimizer.state_dict(), sgd=sgd.state_dict())

    Every rank saves the same rounds. The ranks may use one folder, or each a folder of its own host. Files hold tensors
    and plain values only; they are read without unpickling other objects. Tensors are read to the CPU, because the GPU
    that they were saved on may be another one now; `load_state_dict` takes them to the device of the model.
    """

    def __init__(self, comm: asyncoll.Communicator, folder: Path | str, *, keep: int = 3) -> None:
        """Raises UsageError if `keep` is below 2: while one rank saves a round, others may have only the one before.

        If every round of `DCS3GD` is saved, others may have only the second before, because its averages end a step
        later. So three are kept by default.

        Ranks are further apart where they do not wait for all others in each round. A job that saves every n-th round
        then needs a `keep` above d / n, where d is P // 2 for `DPSGD`, `every` for `LocalSGD`, and for `SGP` the
        smallest number with (peers + 1)^d of at least P, twice as much with overlap.
        """
        if keep < 2:
            raise asyncoll.UsageError(f"keep is a number of rounds, at least 2, not {keep}")
        self._comm = comm
        self._folder = Path(folder)
        self._keep = keep

    def save(self, round_: int, **state: Any) -> Path:
        """Write `state` as this rank's file of the round. Local. A kill at any moment leaves the older files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(round_)
        unfinished = path.with_suffix(".new")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            # The new name must not be on the disk before the content is.
            os.fsync(file.fileno())
        unfinished.replace(path)
        for old in self._rounds()[: -self._keep]:
            self._path(old).unlink()
        return path

    def newest_of_any(self) -> dict[str, Any] | None:
        """The state of the newest round that any rank of any job has saved in `folder`; None if there is none. Local.

        For a trainer that is `elastic` and has no local state: the file of one rank serves all, whatever their number.
        The ranks may find different rounds, and `start()` gives all of them the newest. Deletes nothing. Raises
        UsageError if the file cannot be read.
        """
        found = sorted(self._found(), key=lambda each: int(each[1]))
        return self._read(self._folder / found[-1].string) if found else None

    async def newest(self, *, common: bool = True) -> dict[str, Any] | None:
        """This rank's state of the newest round that all ranks have saved; None if no rank has saved any. Collective.

        The training goes on from there, so this deletes the files of this rank that are of later rounds. Some ranks
        have saved those before the job was killed, and with files of the resumed job they would mix two trainings.

        With `common` False it is the state of the newest round that this rank has saved: for `ADPSGD`, whose ranks
        count rounds of their own.

        Raises UsageError, and deletes nothing, if ranks have saved rounds, but none that all have: the folder of a rank
        is lost, or the job was killed while it saved its first round. Raises it also if no rank has a file of this job,
        and the folder holds checkpoints of another number of ranks; and at a rank whose file cannot be read.
        """
        gathered = await self._comm.allgatherv(torch.tensor(self._rounds(), dtype=torch.int64))
        rounds = [each.tolist() for each in gathered]
        if not common and all(rounds):
            return self._load(max(rounds[self._comm.rank]))
        shared = set(rounds[0]).intersection(*rounds[1:])
        if shared:
            state = self._load(max(shared))
            self._delete_after(max(shared))
            return state
        if any(rounds):
            raise asyncoll.UsageError(_no_common_round(self._folder, rounds))
        others = {found[3] for found in self._found() if int(found[3]) != self._comm.size}
        if others:
            raise asyncoll.UsageError(
                f"{self._folder} has checkpoints of {' and '.join(sorted(others))} ranks, and this job has "
                f"{self._comm.size}: start as many ranks, or use another folder; an elastic trainer takes that of "
                "`newest_of_any`"
            )
        return None

    def _load(self, round_: int) -> dict[str, Any]:
        return self._read(self._path(round_))

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        # Torch raises many types, whose texts do not name the file.
        except Exception as error:
            raise asyncoll.UsageError(
                f"{path} cannot be read ({error}): if it is damaged, delete the files of its round at all ranks, and "
                "go on from the round before"
            ) from error
        return state

    def _delete_after(self, round_: int) -> None:
        for later in self._rounds():
            if later > round_:
                self._path(later).unlink()

    def _path(self, round_: int) -> Path:
        return self._folder / f"round-{round_}-rank-{self._comm.rank}-of-{self._comm.size}.pt"

    def _rounds(self) -> list[int]:
        """The rounds that this rank has saved, ascending."""
        own = str(self._comm.rank), str(self._comm.size)
        return sorted(int(found[1]) for found in self._found() if found.groups()[1:] == own)

    def _found(self) -> list[re.Match[str]]:
        return [found for path in self._folder.glob("*.pt") if (found := _NAME.fullmatch(path.name))]


def _no_common_round(folder: Path, rounds: list[list[int]]) -> str:
    shown = "; ".join(f"rank {rank}: {', '.join(map(str, each)) or 'none'}" for rank, each in enumerate(rounds))
    without = ", ".join(str(rank) for rank, each in enumerate(rounds) if not each)
    remedy = (
        f"rank {without} has none: bring its files back; or delete those of all ranks, or use another folder, to begin "
        "a new training"
        if without
        else "use a larger `keep`, and another folder for a new training"
    )
    return f"there is no round of which all ranks have a checkpoint in {folder} ({shown}): {remedy}"
