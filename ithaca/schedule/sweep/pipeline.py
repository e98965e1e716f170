"""Chunks that follow each other in stages, so that what one has sent travels while another computes.

A chunk's work is a generator that yields wherever it has sent something and must wait for it. One after the other, a
chunk is done before the next begins. Staggered, each begins one stage before its forerunner goes on:

    chunk 0   project and send   attend and send   finish
    chunk 1                      (before it:) project and send   attend and send   finish

so that a chunk's exchanges have the attention of its neighbours to hide behind. The order of chunks within each stage
is the same in both, and so are all sums.
"""

from collections.abc import Iterable, Iterator

Stages = Iterator[None]


def run_chunks(chunks: Iterable[Stages], staggered: bool) -> None:
    running: list[Stages] = []
    for chunk in chunks:
        running = _one_stage([chunk, *running])
        while running and not staggered:
            running = _one_stage(running)
    while running:
        running = _one_stage(running)


def _one_stage(running: list[Stages]) -> list[Stages]:
    """Take each one stage further; those that are still under way."""
    ended = object()
    return [chunk for chunk in running if next(chunk, ended) is not ended]
