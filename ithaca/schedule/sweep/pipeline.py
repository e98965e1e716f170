"""Chunks in a pipeline: while one chunk's message is on its way, its neighbours compute.

The work of a chunk is a generator that yields wherever it has sent something and must wait. In order, one chunk is done
before the next begins. Staggered, each chunk begins one step before its predecessor goes on:

    chunk 0   project and send   attend and send   finish
    chunk 1                      (before it:) project and send   attend and send   finish

So a chunk's exchanges hide behind the attention of its neighbours. Both ways run each step's chunks in the same order,
so all sums are the same.
"""

from collections.abc import Iterable, Iterator

ChunkSteps = Iterator[None]


def run_chunks(chunks: Iterable[ChunkSteps], staggered: bool) -> None:
    """Run all chunks to their end."""
    running: list[ChunkSteps] = []
    for chunk in chunks:
        running = _advance([chunk, *running])
        while running and not staggered:
            running = _advance(running)
    while running:
        running = _advance(running)


def _advance(running: list[ChunkSteps]) -> list[ChunkSteps]:
    """Run each chunk to its next yield; the chunks that are not done."""
    ended = object()
    return [chunk for chunk in running if next(chunk, ended) is not ended]
