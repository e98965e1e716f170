"""One live line: step, loss, speed, memory, time left. Where no terminal watches, a line now and then instead."""

import time
from types import TracebackType

import psutil
import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ithaca.assemble import Model
from ithaca.config import TrainSection
from ithaca.parallel.batch import Batch
from ithaca.sizes import format_bytes, format_tokens

PEAK_FLOPS = 989e12  # Hopper's dense bf16, the base of causal MFU


class Progress:
    """Shows progress on rank 0 and stays silent on the others."""

    def __init__(self, model: Model, options: TrainSection):
        self._model, self._options = model, options
        self._console = Console(quiet=model.mesh.rank != 0)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._every = max(options.steps // 10, 1)

    def __enter__(self) -> "Progress":
        model, options = self._model, self._options
        self._console.print(
            f"{model.spec.family} of {model.spec.parameters() / 1e6:.1f}M parameters, "
            f"{model.mesh.size} {model.mesh.device.type} ranks, "
            f"{str(model.dtype).removeprefix('torch.')}, attention by {model.kernel.name}\n"
            f"{options.batch} sequences × {format_tokens(options.tokens)} tokens a step, {options.steps} steps",
            highlight=False,
        )
        self._began = self._last = time.perf_counter()
        if self._live:
            self._live.start()
        return self

    def step(self, step: int, loss: float, batch: Batch) -> None:
        now = time.perf_counter()
        line = self._line(step, loss, batch, now - self._last, now - self._began)
        self._last = now
        if self._live:
            self._live.update(Text(line), refresh=True)
        elif step % self._every == 0 or step == self._options.steps - 1:
            self._console.print(line, highlight=False)

    def _line(self, step: int, loss: float, batch: Batch, seconds: float, elapsed: float) -> str:
        ranks, done = self._model.mesh.size, step + 1
        parts = [
            f"step {done}/{self._options.steps}",
            f"loss {loss:.3f}",
            f"{batch.total_tokens / seconds / ranks:.0f} tokens/s/rank",
        ]
        if self._model.mesh.device.type == "cuda":
            flops = self._model.spec.flops_per_token(batch.attended) * batch.total_tokens / ranks
            parts.append(f"{100 * flops / seconds / PEAK_FLOPS:.1f} % MFU")
            parts.append(f"GPU {format_bytes(torch.cuda.max_memory_reserved())}")
        parts.append(f"host {format_bytes(psutil.Process().memory_info().rss)}")
        left = elapsed / done * (self._options.steps - done)
        parts.append(f"{left // 60:.0f}:{left % 60:02.0f} left")
        return "  ".join(parts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
