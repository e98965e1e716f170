"""The loss on data that a run does not train on: measured under its Plan and mesh, and noted in checkpoints.

A validation is forward only. Its passes have the size of training passes, so they use the same tapes and kernels, and
no pass holds more memory than a training pass does. Losses are added up in float64, label by label, so the sum does not
depend on how tokens were spread over ranks and tiles, but for the rounding of each loss.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.assemble import Model
from ithaca.base.errors import DataError
from ithaca.base.shell import quoted
from ithaca.base.sizes import format_count
from ithaca.config import Config
from ithaca.data.mixture import Data, sources_of
from ithaca.data.reader import TokenFile
from ithaca.data.windows import Windows
from ithaca.parallel.agree import together
from ithaca.parallel.batch import IGNORED, Batch, RankBatch, batch_rows, join_batches
from ithaca.parallel.mesh import Mesh
from ithaca.train.folder.run_folder import VALIDATION, RunFolder
from ithaca.train.setup.start import check_data, open_file

Point = tuple[int, float]  # a step and the validation loss after it

FIRST = 1024  # where the first bucket of positions ends; each of the others ends at twice its start


@dataclass(frozen=True)
class Losses:
    """Sums of losses and numbers of labels, by the position of the label in its document."""

    edges: tuple[int, ...]  # where buckets of positions begin, and where the last one ends
    sums: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def labels(self) -> int:
        return sum(self.counts)

    @property
    def loss(self) -> float:
        """The mean over all labels."""
        return sum(self.sums) / self.labels


def measure(
    model: Model,
    windows: Windows,
    rows: int,
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    stopped: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda _: None,
) -> Losses | None:
    """Return the losses of all labels over all ranks, in passes of `rows` rows. Collective.

    `watch` is entered for each pass. `stopped` is called before each; if it is True, on all ranks, return None. `tell`
        is called with the progress.
    """
    edges = bucket_edges(windows.length)
    found = torch.zeros(2, len(edges) - 1, dtype=torch.float64)
    for first in range(0, len(windows), rows):
        if stopped():
            return None
        tell(f"Validating: sequence {first + 1} of {len(windows)}")
        with watch():
            (batch,) = join_batches(model.mesh, partial(_draw, model, windows, first, rows))
            if batch.valid_tokens:
                found += bucket_sums(batch, model.token_losses(batch), edges).cpu()
    dist.all_reduce(found, group=model.mesh.group)
    assert int(found[1].sum()) == windows.labels, "every label counts once"
    return Losses(edges, tuple(found[0].tolist()), tuple(map(int, found[1].tolist())))


def _draw(model: Model, windows: Windows, first: int, rows: int) -> list[RankBatch]:
    """Return this rank's part of a pass over the rows from `first` on."""
    own = batch_rows(model.mesh, rows)
    return [model.rank_batch(*windows.rows(range(first + own.start, first + own.stop)), rows=rows)]


def bucket_edges(length: int) -> tuple[int, ...]:
    """Return 0, 1K, 2K, 4K … up to the context length, which ends the last bucket."""
    edges, edge = [0], FIRST
    while edge < length:
        edges.append(edge)
        edge *= 2
    return (*edges, length)


def bucket_sums(batch: Batch, losses: Tensor, edges: tuple[int, ...]) -> Tensor:
    """Return the sums of losses and the numbers of labels in each bucket, [2, buckets] in float64."""
    # A token's label is the next token
    buckets = torch.bucketize(batch.positions + 1, torch.tensor(edges[1:-1], device=losses.device), right=True)
    labeled = (batch.labels != IGNORED).to(losses.dtype)
    inside = [buckets == bucket for bucket in range(len(edges) - 1)]
    return torch.stack(
        [
            torch.stack([torch.where(bucket, values, 0).sum(dtype=torch.float64) for bucket in inside])
            for values in (losses, labeled)
        ]
    )


def open_validation(config: Config, run: RunFolder, grid: Mesh, data: Data, held: TokenFile | None) -> Windows | None:
    """Return the rows to validate on; None if the run does not validate. Collective.

    `data`: what it trains on. `held`: documents that are held out of these.
    """
    options = config.data
    if not options.validation:
        return None
    if held:
        name = f"what data.validation={options.share:g} holds out"
    else:
        name = f"the validation file '{options.validation}'"
        held = open_file(Path(options.validation), run.path, grid)
        check_data(held, grid, "data.validation")
        _check_apart(data, held, bool(options.mix))
    tokens, limit = config.train.tokens or 0, config.run.validation_tokens
    return together(grid.group, lambda: Windows(held, tokens, limit, name))


def _check_apart(data: Data, held: TokenFile, mixed: bool) -> None:
    """Raise an error if the run trains on its validation data. Every rank compares the same headers."""
    for source in sources_of(data):
        if source.data.header.blocks_sha256 == held.header.blocks_sha256:
            name = f"{source.title} of data.mix" if mixed else "data.source"
            raise DataError(
                f"data.validation and {name} hold the same documents: data.validation=2% holds some out, or name a "
                "token file of others"
            )


class Validation:
    """The validations of a run: when one is due, what they found, and what checkpoints note of it."""

    def __init__(self, windows: Windows, every: int, manifest: dict[str, Any], staged: bool = False):
        """`manifest`: of the checkpoint that the run continues from; empty if there is none.

        `staged`: the run has stages, and losses of sequences of different lengths are not compared.
        """
        self.windows, self._every = windows, every
        self.data = {**windows.data.identity(), "counted": windows.tokens}
        if staged:
            self.data["context"] = windows.length
        noted = manifest.get("validation")
        self.changed = bool(noted) and noted["data"] != self.data
        same = noted if noted and not self.changed else None
        # (step, loss) of the first validation, the last one, and the best checkpoint
        self.start: Point | None = tuple(same["start"]) if same else None
        self.last: Point | None = tuple(same["last"]) if same else None
        self.best: Point | None = None

    def due(self, step: int, steps: int) -> bool:
        """Return whether to validate after this step: at the end, every few steps, and where no loss is known yet."""
        if self.last is None:
            return True
        return self.last[0] != step and (step == steps or (self._every > 0 and step % self._every == 0))

    def add(self, step: int, loss: float) -> bool:
        """Add the loss after a step. Return whether it is the lowest so far, not counting the one at the start."""
        self.last = step, loss
        if self.start is None:
            self.start = self.last
            return False
        if self.best is not None and self.best[1] <= loss:
            return False
        self.best = self.last
        return True

    def note(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's manifest."""
        if self.start is None or self.last is None:
            return {}
        return {"validation": {"data": self.data, "start": list(self.start), "last": list(self.last)}}

    def describe(self) -> str:
        """Return what is validated on, and what is left out."""
        windows = self.windows
        left = f"; run.validation_tokens leaves out the other {windows.left_out:,} tokens" if windows.left_out else ""
        return (
            f"Validation: {windows.labels:,} labels in {windows.tokens:,} tokens of {windows.name}, "
            f"{format_count(windows.documents, 'document')} in {format_count(len(windows), 'sequence')}{left}"
        )

    def conclude(self, path: Path) -> list[str]:
        """Return a line about what training has changed, for the end of a run."""
        if self.start is None or self.last is None or self.start == self.last:
            return []
        (first, before), (step, now) = self.start, self.last
        text = f"Validation loss: {before:.3f} at step {first} -> {now:.3f} at step {step}"
        if self.best and self.best[1] < before:
            return [
                f"{text}; lowest {self.best[1]:.3f} at step {self.best[0]}: ithaca export {quoted(path)} DIR --best"
            ]
        return [f"{text}; no step is better than the start"]


def metrics_of(step: int, losses: Losses, seconds: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl about a validation."""
    return {
        "step": step,
        VALIDATION: losses.loss,
        "validation_labels": losses.labels,
        "validation_seconds": round(seconds, 4),
    }
