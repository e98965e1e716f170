"""The devices of the folders of disk tapes: which folders share a file system or a device, and which are memory."""

import os
from pathlib import Path

MEMORY = ("tmpfs", "ramfs")  # file systems whose files are host memory


def by_file_system(folders: tuple[str, ...]) -> list[list[int]]:
    """The folders' numbers, grouped by file system. The folders of a group share its free space."""
    found: dict[object, list[int]] = {}
    for number, folder in enumerate(folders):
        found.setdefault(_file_system(folder) or folder, []).append(number)
    return list(found.values())


def count_devices(folders: tuple[str, ...], system: Path = Path("/")) -> int:
    """How many different devices the folders are on. Partitions of one disk count once. `system` holds /sys.

    A folder that is not on this machine counts as a device of its own.
    """
    return len({_device(folder, system) for folder in folders})


def is_memory(folder: str, system: Path = Path("/")) -> bool:
    """Whether files in a folder take host memory. `system` holds /proc."""
    wanted = _file_system(folder)
    try:
        mounts = (system / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    # 36 35 98:0 /root /mount options - type source …
    kinds = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == wanted)
    return next(kinds, "") in MEMORY


def _device(folder: str, system: Path) -> object:
    number = _file_system(folder)
    if number is None:
        return folder
    block = system / "sys/dev/block" / number
    return block.resolve().parent if (block / "partition").exists() else number


def _file_system(folder: str) -> str | None:
    """The device number of a folder's file system, as '259:1'; None if there is no such folder here."""
    try:
        number = os.stat(folder).st_dev
    except (OSError, ValueError):
        return None
    return f"{os.major(number)}:{os.minor(number)}"
