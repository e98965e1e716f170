"""Replays a memory log: bytes by owner over a step, its peak, and the tensors that are alive there."""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ithaca.base.owners import HOST
from ithaca.profile.memory_log import Change, MemoryLog

POINTS = 2000  # of a timeline, at most


@dataclass(frozen=True)
class Timeline:
    """Bytes by owner at some moments of a step. The peak is one of them."""

    seconds: list[float]
    owners: dict[str, list[int]]  # those that change least first: at the bottom of a stack they leave the others level
    peak: int  # the index of the moment with most bytes


def make_timeline(log: MemoryLog, points: int = POINTS) -> Timeline:
    """Return a log's moments, thinned out: both ends, and the moment with most bytes in each interval."""
    changes = _on_device(log)
    end = changes[-1].seconds if changes else 0.0
    totals = _totals(log, changes)
    chosen = {0, len(totals) - 1, _most(totals)}
    best: dict[int, int] = {}
    for index, change in enumerate(changes, start=1):
        stretch = int(change.seconds / end * (points - len(chosen))) if end else 0
        if stretch not in best or totals[index] > totals[best[stretch]]:
            best[stretch] = index
    moments = sorted(chosen | {*best.values()})
    held = [Counter(snapshot) for snapshot in _snapshots(log, changes, moments)]
    peak = moments.index(_most(totals))
    owners = {owner for each in held for owner, size in each.items() if size}
    sizes = {owner: [each[owner] for each in held] for owner in owners}
    order = sorted(owners, key=lambda owner: (max(sizes[owner]) - min(sizes[owner]), -sizes[owner][peak], owner))
    seconds = [changes[moment - 1].seconds if moment else 0.0 for moment in moments]
    return Timeline(seconds, {owner: sizes[owner] for owner in order}, peak)


def peak_bytes(log: MemoryLog) -> dict[str, int]:
    """Return the bytes by owner at the moment with most on the device, the largest first."""
    changes = _on_device(log)
    (found,) = _snapshots(log, changes, [_most(_totals(log, changes))])
    return {owner: size for owner, size in Counter(found).most_common() if size}


def largest_at_peak(log: MemoryLog, most: int = 20) -> list[dict[str, Any]]:
    """Return the largest tensors that are alive at the peak. Tensors alike, from one line, are one row with a count."""
    changes = _on_device(log)
    alive: dict[int, Counter[str]] = {
        number: Counter({owner: size}) for number, (owner, size) in log.held.items() if owner != HOST
    }
    for change in changes[: _most(_totals(log, changes))]:
        alive.setdefault(change.number, Counter())[change.owner] += change.size
    rows: Counter[tuple[Any, ...]] = Counter()
    for number, owners in alive.items():
        made = log.allocations[number]
        for owner, size in owners.items():
            if size > 0:
                rows[size, owner, made.shape, made.dtype, made.places, made.operation] += 1
    ranked = sorted(rows.items(), key=lambda item: -item[0][0] * item[1])[:most]
    return [
        {
            "bytes": size * count,
            "count": count,
            "owner": owner,
            "shape": list(shape),
            "dtype": dtype,
            "places": list(places),
            "operation": operation,
        }
        for (size, owner, shape, dtype, places, operation), count in ranked
    ]


def _on_device(log: MemoryLog) -> list[Change]:
    """The changes without those of host memory, which a meter of a CPU sees as well."""
    return [change for change in log.changes if change.owner != HOST]


def _totals(log: MemoryLog, changes: list[Change]) -> list[int]:
    """Bytes on the device before the first change and after each."""
    before = sum(size for owner, size in log.held.values() if owner != HOST)
    return list(accumulate((change.size for change in changes), initial=before))


def _most(totals: list[int]) -> int:
    """The first moment with most bytes. Between the two changes of a storage that changes hands there is no moment."""
    return max(range(len(totals)), key=totals.__getitem__)


def _snapshots(log: MemoryLog, changes: list[Change], moments: list[int]) -> list[dict[str, int]]:
    """Bytes by owner at these moments, which are in order."""
    now: Counter[str] = Counter()
    for owner, size in log.held.values():
        if owner != HOST:
            now[owner] += size
    found, done = [], 0
    for moment in moments:
        for change in changes[done:moment]:
            now[change.owner] += change.size
        done = moment
        found.append(dict(now))
    return found
