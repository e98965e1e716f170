"""Read the newest sound checkpoint of a run on all ranks, for an evaluation or another run. It may be training.

The first rank holds a lease for all of them, so the checkpoint stays while it is read. Nothing of the other run is
renamed or written. Ranks share the checking of the files, as when a run continues.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ithaca.base.errors import RunError
from ithaca.checkpoint.files import CheckpointFolder, describe, none_is_sound
from ithaca.checkpoint.lease import GoneError, Lease
from ithaca.checkpoint.reader import PlainReader, fill
from ithaca.checkpoint.shard import Shard, for_dcp
from ithaca.parallel.agree import from_first, together, together_with


class SharedLease:
    """A lease that the first rank holds while the body runs on all. `here`: the checkpoint is there. Collective."""

    def __init__(self, lease: Lease, group: dist.ProcessGroup):
        self._lease, self._group, self._held = lease, group, False

    def __enter__(self) -> "SharedLease":
        self.here, self.note = from_first(self._group, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._lease.__exit__()

    def still_here(self) -> bool:
        """Return on all ranks whether the checkpoint is still the one that was leased. Collective."""
        return from_first(self._group, self._check)

    def _take(self) -> tuple[bool, str | None]:
        try:
            self._lease.__enter__()
        except GoneError:
            return False, None
        self._held = True
        return True, self._lease.note

    def _check(self) -> bool:
        try:
            self._lease.check()
        except GoneError:
            return False
        return True


def read_newest(
    files: CheckpointFolder,
    state: dict[str, Shard],
    group: dist.ProcessGroup,
    steps: Callable[[], list[int]] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Read the newest sound checkpoint into `state`. Return its manifest, and warnings. Collective.

    `steps`: the checkpoints to choose from, called again if one vanishes; all of them if it is not given.
    """
    warnings, damaged = list[str](), dict[int, str]()
    while left := [step for step in from_first(group, steps or files.steps) if step not in damaged]:
        step = left[-1]
        with SharedLease(files.lease(step), group) as lease:
            if not lease.here:
                continue
            if lease.note:
                warnings.append(
                    f"the disk of '{files.folder}' has no locks ({lease.note}): the run there must not train"
                )
            damage = _damage(files, step, state, group)
            manifest = None if damage else _read(files, step, state, group, lease)
            if not lease.still_here():
                continue
            if manifest:
                return manifest, warnings
        assert damage
        warnings.append(
            f"the checkpoint of step {step} in '{files.folder}' is damaged ({damage}): trying the previous one"
        )
        damaged[step] = damage
    raise none_is_sound(files.folder, damaged) if damaged else RunError(f"'{files.folder}' has no checkpoint any more")


def _damage(files: CheckpointFolder, step: int, state: dict[str, Shard], group: dist.ProcessGroup) -> str | None:
    """Return what is wrong with a checkpoint, the same on all ranks. Each checks a part of its files."""
    rank, ranks, wanted = dist.get_rank(group), dist.get_world_size(group), describe(state)
    _, found = together_with(group, lambda: files.damage(step, wanted, rank, ranks), lambda damage: damage)
    return next((damage for damage in found if damage), None)


def _read(
    files: CheckpointFolder, step: int, state: dict[str, Shard], group: dist.ProcessGroup, lease: SharedLease
) -> dict[str, Any] | None:
    """Read a checkpoint and return its manifest; None if it was deleted meanwhile, on a disk without locks."""
    try:
        reader = together(group, lambda: PlainReader(files.path(step)))
        fill(for_dcp(state), reader, group)
        return from_first(group, lambda: files.manifest(step))
    except RunError:
        if lease.still_here():
            raise
        return None
