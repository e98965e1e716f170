"""This rank's sequences of each step, drawn in a thread while the step before computes.

A rank reads only the rows that it needs. What a step gets depends on (seed, step) alone, never on the thread's timing.
Memory: the tokens, labels and positions of one step beside those of the step under way.
"""

import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ithaca.assemble import Model
from ithaca.config import TrainSection
from ithaca.data.packing import Rows
from ithaca.parallel.batch import Batch, RankBatch, batch_rows, join_batches
from ithaca.train.ranks.stop import SIGNALS


class Loader:
    """Draws the batches of the steps in order, one step ahead."""

    def __init__(self, rows: Rows, options: TrainSection, model: Model):
        """`options` must have `tokens` and `batch`."""
        self._rows, self._options, self._model = rows, options, model
        self._thread = ThreadPoolExecutor(1, "loader", initializer=self._prepare_thread)
        self._next: tuple[int, Future[Sequence[RankBatch]]] | None = None

    def batches(self, step: int) -> list[Batch]:
        """Return this rank's part of each pass of a step, and begin to draw the next step. Collective.

        An error in the thread, such as an unreadable file, is raised here, in the step that needs the data.
        """
        if self._next is None or self._next[0] != step:
            self._next = step, self._thread.submit(self._draw, step)
        drawn = self._next[1]
        batches = join_batches(self._model.mesh, drawn.result)
        self._next = None
        if step + 1 < (self._options.steps or 0):
            self._next = step + 1, self._thread.submit(self._draw, step + 1)
        return batches

    def close(self) -> None:
        """Stop the thread. It finishes the rows that it is drawing."""
        self._thread.shutdown(cancel_futures=True)
        self._rows.close()

    def _draw(self, step: int) -> list[RankBatch]:
        options = self._options
        assert options.batch
        size = options.micro_batch or options.batch
        own = batch_rows(self._model.mesh, size)
        passes = []
        for first in range(0, options.batch, size):
            rows = range(first + own.start, first + own.stop)
            drawn = self._rows.draw(options.batch, step, rows)
            passes.append(self._model.rank_batch(*drawn, rows=size))
        return passes

    def _prepare_thread(self) -> None:
        # Signals are for the main thread: it must wake up for them while it waits
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if self._model.mesh.device.type == "cuda":
            torch.cuda.set_device(self._model.mesh.device)  # where host memory is pinned; each thread has its own
