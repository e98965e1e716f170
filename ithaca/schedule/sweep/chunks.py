"""Arithmetic on the chunks of a sweep: how many wait for messages at a time, and which visit which. No torch."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ithaca.parallel.head_split import HeadSplit

if TYPE_CHECKING:
    from ithaca.schedule.job import Job

# Chunks from which on the last block's backward pass waits until the head's gradient is reduced: tens of milliseconds,
# beside a second or more of attention, for the memory of that gradient
LONG = 8


def hops(ulysses: int, ring: int) -> int:
    """Exchanges between a chunk's projections and its attention. As many follow its attention."""
    return (ulysses > 1) + (ring > 1)


def chunks_under_way(ulysses: int, ring: int, recomputed: bool = False) -> int:
    """Neighbouring chunks that wait for messages while one computes: one for each exchange, there and back.

    A chunk whose attention is recomputed goes there and back twice.
    """
    return (4 if recomputed else 2) * hops(ulysses, ring)


def chunks_sending_keys(ulysses: int, ring: int) -> int:
    """Chunks that send K and V with their own queries in backward: all that begin before the first one attends."""
    return 1 + hops(ulysses, ring)


def chunks_asked_early(job: "Job") -> int:
    """Chunks whose K and V a later chunk reads in backward before they could go with their own queries.

    K and V of such a chunk take a message, and its x is read for them alone.
    """
    sending = chunks_sending_keys(job.axes.ulysses, job.axes.ring)
    return _asked_early(job.document_lengths, job.layout.chunks.size, sending)


@lru_cache(maxsize=64)  # as below
def _asked_early(lengths: tuple[int, ...], size: int, sending: int) -> int:
    start = count = 0
    for length in lengths:
        last = (start + length - 1) // size  # the chunk that reads K and V of all others of this document
        count += max(last + 1 - start // size - sending, 0)
        start += length
    return count


def is_long(chunks: int) -> bool:
    """Whether a pass over this many chunks frees the head's gradient before the last block goes backward."""
    return chunks >= LONG


def head_passes(job: "Job") -> list[HeadSplit]:
    """The heads of each pass over the chunks: of all head rounds, the largest first."""
    return [split for (split,) in job.rounds]


@dataclass(frozen=True)
class Visits:
    """Visits of chunks to earlier ones, in one layer."""

    count: int
    rows: int  # tokens that attend, summed over visits


def visits_of(job: "Job") -> Visits:
    """A chunk visits an earlier one if a document reaches from there, with the tokens of that document alone."""
    return _visits(job.document_lengths, job.layout.chunks.size)


@lru_cache(maxsize=64)  # the planner's search asks for the same values many times
def _visits(lengths: tuple[int, ...], size: int) -> Visits:
    start = count = rows = 0
    for length in lengths:
        stop = start + length
        reached = (stop - 1) // size - start // size  # chunks after the one in which the document begins
        count += reached * (reached + 1) // 2
        rows += reached * (reached - 1) // 2 * size + reached * (stop - (stop - 1) // size * size)
        start = stop
    return Visits(count, rows)
