"""Spans of time, (start, end) pairs: their union, how long they cover, how long they lie under others."""

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same times as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of some spans."""
    return sum(end - start for start, end in union(spans))


def overlap(spans: Iterable[Span], others: Sequence[Span]) -> float:
    """Return how long the spans lie under the others. Both are in order; the others do not overlap each other."""
    found, first = 0.0, 0
    for start, end in spans:
        while first < len(others) and others[first][1] <= start:
            first += 1
        for begin, stop in others[first:]:
            if begin >= end:
                break
            found += min(end, stop) - max(start, begin)
    return found


def clipped(spans: Iterable[Span], within: Span) -> list[Span]:
    """Return the parts of spans that lie within another."""
    low, high = within
    return [(max(start, low), min(end, high)) for start, end in spans if end > low and start < high]


def thinned(spans: Sequence[Span], most: int) -> list[Span]:
    """Return spans in order as at most `most`, by closing the shortest gaps between them: for pictures alone."""
    if len(spans) <= most:
        return list(spans)
    gaps = sorted(range(1, len(spans)), key=lambda index: spans[index][0] - spans[index - 1][1])
    closed = {*gaps[: len(spans) - most]}
    found: list[Span] = []
    for index, (start, end) in enumerate(spans):
        if index in closed:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found
