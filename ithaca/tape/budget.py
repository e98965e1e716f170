"""How much host memory this process may still use: the free memory, or less if its control group allows less.

A container may have a lower limit than the machine. A process that looks only at free memory is killed at that limit
without a message. File pages that the kernel can drop count as free in both.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
KEPT_BACK = 0.05  # share of all memory that is left for the programs themselves


def host_budget(system: Path = Path("/")) -> tuple[int, str]:
    """Bytes of host memory that can still be used on this node, and the reason. `system` holds /proc and /sys."""
    memory = psutil.virtual_memory()
    limits = [(memory.available - int(KEPT_BACK * memory.total), "free memory")]
    limits += [(free - int(KEPT_BACK * limit), "the control group's limit") for limit, free in _groups(system)]
    budget, reason = min(limits)
    return max(budget, 0), reason


def _groups(system: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes left) of each control group of this process, version 1 or 2, and of the parent groups."""
    try:
        entries = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = system / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = _VERSION_1 if controllers else _VERSION_2
        folder = top / path.lstrip("/")
        # In a container the path may be that of the host, of which only the top exists
        for place in (folder, *folder.parents):
            if not place.is_relative_to(top):
                break
            found = _group(place, *names)
            if found:
                yield found


def _group(folder: Path, limit_name: str, used_name: str, cache_name: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / used_name).read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
    return limit, limit - used + _droppable(folder, cache_name)


def _droppable(folder: Path, name: str) -> int:
    """Bytes of file pages that the kernel drops when memory is short; 0 if that cannot be read."""
    try:
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(counts.get(name, 0))
    except (OSError, ValueError):
        return 0
