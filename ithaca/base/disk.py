"""The reason why a file could not be written, free space, and what kind of thing lies at a path."""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from ithaca.base.errors import first_line
from ithaca.base.sizes import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, or the largest file


def system_error(problem: BaseException) -> OSError | None:
    """Return the system's error that an error is or was caused by; None if there is none.

    PyTorch and safetensors raise errors of their own for a write that the system refuses.
    """
    seen: BaseException | None = problem
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    number = re.search(r"\(os error (\d+)\)", str(problem))  # Rust's words
    if seen is None and number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return seen


def is_full(problem: BaseException) -> bool:
    found = system_error(problem)
    return found is not None and found.errno in FULL


def reason(problem: BaseException, place: Path, needed: int | None = None) -> str:
    """Return in one line why a file could not be written at `place`; if the disk is full, with its free bytes.

    Call it before anything is deleted: the free bytes are those of now.
    """
    found = system_error(problem)
    if found is None:
        return first_line(problem)
    text = found.strerror or str(found)
    if found.errno not in FULL:
        return f"{text}: '{found.filename}'" if found.filename else text
    needs = f"it takes {format_bytes(needed)}, and " if needed is not None else ""
    return f"{text}; {needs}{format_bytes(free_bytes(place))} are free on its disk"


def free_bytes(place: Path) -> int:
    """Return the free bytes of the disk of a path, which need not exist yet."""
    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def not_a_file(path: Path) -> str | None:
    """Return what a path is if something other than a file is there: a folder, a link …; None otherwise."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "a device or a pipe"


def same_file(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one that its path names, or that a link there leads to."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as problem:  # a network file system that does not answer now says nothing about the file
        return problem.errno != errno.ELOOP


def missing_folders(path: Path) -> list[Path]:
    """Return the folders of a path that do not exist yet, the innermost first."""
    return [folder for folder in (path, *path.absolute().parents) if not os.path.lexists(folder)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Delete folders, the innermost first, up to one that is not empty or cannot be deleted."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
