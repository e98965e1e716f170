"""Leases on checkpoints: a run does not delete a checkpoint that another process reads.

A lease is a shared flock on a checkpoint's manifest.json. It needs no permission to write, and the system ends it with
its process. Deleting takes the exclusive lock, without waiting, and renames the folder first: a reader finds a whole
checkpoint or none. A checkpoint that is leased stays, and is deleted at a later save or start.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ithaca.base.disk import same_file

MANIFEST, DELETED = "manifest.json", ".deleted"


class GoneError(Exception):
    """A checkpoint was deleted or replaced before it was read: look for the newest one again."""


class Lease:
    """A lease on the checkpoint in `folder` while the body runs. `note`: the error of a disk without locks, or None."""

    def __init__(self, folder: Path):
        self._folder, self._file = folder, -1
        self.note: str | None = None

    def __enter__(self) -> "Lease":
        with suppress(OSError):  # without a manifest the checkpoint is damaged, and its reader will say so
            self._file = os.open(self._folder / MANIFEST, os.O_RDONLY)
        try:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_SH)  # a deletion holds the lock for no longer than a rename takes
        except OSError as problem:  # this disk has no locks
            self.note = problem.strerror
        try:
            self.check()
        except GoneError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def check(self) -> None:
        """Raise GoneError if the checkpoint is not the one that was leased any more."""
        here = same_file(self._folder / MANIFEST, self._file) if self._file >= 0 else self._folder.exists()
        if not here:
            raise GoneError(self._folder.name)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, unless someone reads it."""
    manifest = _open(checkpoint / MANIFEST)
    try:
        if manifest is not None and _is_leased(manifest):
            return
        aside = checkpoint.with_name(f"{checkpoint.name}{DELETED}")
        if aside.exists():
            shutil.rmtree(aside)
        checkpoint.rename(aside)
    finally:
        if manifest is not None:
            os.close(manifest)
    shutil.rmtree(aside)


def _open(manifest: Path) -> int | None:
    """Open a manifest for an exclusive lock; None if there is none, and so no lease either."""
    for flags in (os.O_RDWR, os.O_RDONLY):  # NFS wants a file that is open for writing
        with suppress(OSError):
            return os.open(manifest, flags)
    return None


def _is_leased(manifest: int) -> bool:
    """Take the exclusive lock on an open manifest. Return True if someone has a shared one."""
    try:
        fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # this disk has no locks, so nobody has one
        return False
    return False
