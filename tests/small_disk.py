"""A small disk for a forked job: a tmpfs that this process alone sees, and that goes with it."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

from tests.nursery import Ended

NO_MOUNT = 77  # the exit code of a job that may not mount
_NEW_MOUNTS, _NEW_USER, _PRIVATE = 0x00020000, 0x10000000, (1 << 18) | (1 << 14)


def mount_small_disk(folder: Path, size: int) -> None:
    """Mount a disk of `size` bytes; end the process where that is not allowed."""
    libc, kinds = ctypes.CDLL(None, use_errno=True), _NEW_MOUNTS if os.geteuid() == 0 else _NEW_MOUNTS | _NEW_USER
    folder.mkdir()
    if (
        libc.unshare(kinds)
        or libc.mount(b"none", b"/", None, _PRIVATE, None)
        or libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % size)
    ):
        print(os.strerror(ctypes.get_errno()), file=sys.stderr)
        sys.exit(NO_MOUNT)


def skip_without_mount(end: Ended) -> None:
    if end.code == NO_MOUNT:
        pytest.skip(f"no small disk can be mounted here: {end.err.strip()}")


def fill(folder: Path) -> Path:
    """Fill the disk of a folder to the last byte. Return the file that does."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while filler.write(bytes(size)):
                    pass
            except OSError:
                continue
    return file
