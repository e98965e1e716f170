"""The rows that a run learns from: documents packed into sequences, of one source or of several.

    cut      windows of a circle of all tokens (sample.py); a document may begin in one row and end in another
    whole    documents whole in a row (best_fit.py); the end of a row may be padding
    joined   windows as in `cut`, but each row is one document: tokens see all before them in the row
    auto     `whole` for data with a loss mask (conversations, prompts), else `cut`; `cut` also for synthetic documents,
             whose loss mask needs no prompt: any part of one is a shorter one

Row n depends on (seed, n) alone. Each source goes around by itself. Under `whole` a conversation is never cut
from its prompt: one that is longer than a row loses its end, or is dropped (data.too_long). Text that is longer than a
row is cut into pieces.

Padding stands at the end of a row, in documents of its own of at most 1024 tokens: no other document sees it, it
predicts nothing, and its attention costs next to nothing. So loss and gradients are those of the documents one by one.

Under `whole` a row costs a block of 65,536 tokens, read and hashed in about 0.15 ms, for each of its documents, and a
plan of each epoch (best_fit.py). A plan of many documents is made in a thread, from the last quarter of the epoch
before on.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ithaca.base.errors import RunError
from ithaca.base.sizes import format_count, format_tokens
from ithaca.data.best_fit import PADDING, EpochPlan, count_rows, packing_of, pieces_of, plan_epoch
from ithaca.data.mixture import Data, Interleave, Source, sources_of
from ithaca.data.reader import TokenFile
from ithaca.data.sample import Cut, draw
from ithaca.data.tokenfile import quoted
from ithaca.parallel.batch import IGNORED

_AHEAD = 20_000  # pieces from which on a plan is made ahead of its epoch; it takes about 10 ms


class Packed(Protocol):
    """The rows of one source."""

    per_epoch: int
    left_out: int  # tokens that no row of an epoch has, because their documents are too long

    def fill(self, number: int, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> None: ...
    def filled(self, rows: int) -> int: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Tally:
    """Counts of one source in the first rows of a run."""

    name: str
    tokens: int  # without padding
    padding: int
    left_out: int  # tokens of documents that are too long
    epochs: float


class Rows:
    """The rows of a run, from all of its sources."""

    def __init__(self, data: Data, length: int, seed: int, packing: str, too_long: str = "truncate"):
        """`too_long`: what becomes of a conversation that is longer than a row, `drop` or `truncate`."""
        self.length, self._sources, self._packing = length, sources_of(data), packing
        self._packed = [pack(source.data, length, seed, packing, too_long) for source in self._sources]
        # Shares are of tokens without padding, so a source whose rows have more padding gets more rows
        filled = [packed.filled(packed.per_epoch) / packed.per_epoch for packed in self._packed]
        weights = [source.share / mean for source, mean in zip(self._sources, filled, strict=True)]
        self._interleave = Interleave(weights)
        self.plain = len(self._sources) == 1 and packing != "joined" and isinstance(self._packed[0], Cut)

    @property
    def per_epoch(self) -> int:
        """The rows in which all sources together could be seen once: the sum of their epochs."""
        return sum(packed.per_epoch for packed in self._packed)

    def draw(self, batch: int, step: int, only: Sequence[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, labels and document ids of a step's rows, int64 [batch, length]; of those in `only`."""
        rows = range(batch) if only is None else only
        return draw(self._fill, self.length, [step * batch + row for row in rows])

    def _fill(self, number: int, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> None:
        source, earlier = self._interleave.locate(number)
        self._packed[source].fill(earlier, tokens, labels, documents)

    def tally(self, rows: int) -> list[Tally]:
        """Return the counts of each source in the first `rows` rows."""
        found = []
        for source, packed, count in zip(self._sources, self._packed, self._interleave.counts(rows), strict=True):
            tokens, left_out = packed.filled(count), packed.left_out * count // packed.per_epoch
            padding, epochs = count * self.length - tokens, count / packed.per_epoch
            found.append(Tally(source.name, tokens, padding, left_out, epochs))
        return found

    def describe(self) -> list[str]:
        """Return a line about the packing of each source; none for a single source that is cut, the usual way."""
        if self.plain and not self._cut_by_auto(self._sources[0]):
            return []
        lines = []
        for source, packed in zip(self._sources, self._packed, strict=True):
            share = f"{source.share:.1%} of tokens, " if len(self._sources) > 1 else ""
            why = " (data.packing=auto: any part of such a document is a shorter one)"
            lines.append(f"Data: {source.name}: {share}{packed.describe()}{why if self._cut_by_auto(source) else ''}")
        return lines

    def _cut_by_auto(self, source: Source) -> bool:
        """Return whether `auto` cuts documents with a loss mask, which is not the usual way."""
        return self._packing == "auto" and source.data.header.masked and source.data.divisible

    def metrics(self, rows: int) -> dict[str, float]:
        """Return a run's metrics after `rows` rows: tokens and epochs of each source, padding, tokens left out."""
        if self.plain:
            return {}
        tally, found = self.tally(rows), dict[str, float]()
        for each in tally if len(tally) > 1 else ():
            found |= {f"tokens/{each.name}": each.tokens, f"epochs/{each.name}": round(each.epochs, 4)}
        found |= {name: sum(getattr(each, name) for each in tally) for name in ("padding", "left_out")}
        return found

    def conclude(self, rows: int) -> list[str]:
        """Return a line with the share and epochs of each source in the first `rows` rows."""
        if self.plain or not rows:
            return []
        tally = self.tally(rows)
        total = sum(each.tokens for each in tally)
        shares = [f"{each.tokens / total:.1%} " if len(tally) > 1 else "" for each in tally]
        parts = [f"{share}{each.name} ({each.epochs:.2f} epochs)" for share, each in zip(shares, tally, strict=True)]
        padding = sum(each.padding for each in tally) / (rows * self.length)
        left_out = sum(each.left_out for each in tally)
        rest = f"; {left_out} tokens left out (data.too_long)" if left_out else ""
        return [f"Data seen: {', '.join(parts)}; {total} tokens and {padding:.1%} padding{rest}"]

    def close(self) -> None:
        for packed in self._packed:
            packed.close()


def pack(data: TokenFile, length: int, seed: int, packing: str, too_long: str) -> Packed:
    """Return the rows of one source."""
    packing = packing_of(data, packing)
    if packing == "whole":
        return Whole(data, length, seed, too_long)
    return Cut(data, length, seed, joined=packing == "joined")


def rows_per_epoch(data: Data, length: int, packing: str, too_long: str) -> int:
    """Return how many rows one pass over the data has; over several sources, the sum of theirs."""
    return sum(pack(source.data, length, 0, packing, too_long).per_epoch for source in sources_of(data))


class Whole:
    """Rows of whole documents."""

    def __init__(self, data: TokenFile, length: int, seed: int, too_long: str):
        """`too_long`: what becomes of a conversation that is longer than a row, `drop` or `truncate`."""
        self._data, self._length, self._seed = data, length, seed
        self._too_long = too_long if data.header.masked else "cut"
        self._pieces = pieces_of(data.bounds(), length, self._too_long, quoted(data.path))
        self._tokens, self.left_out = self._pieces.tokens, self._pieces.left_out
        self.per_epoch = count_rows(self._pieces.lengths, length)
        self._plans: dict[int, EpochPlan] = {}
        self._ahead: tuple[int, Future[EpochPlan]] | None = None
        self._thread = ThreadPoolExecutor(1, "packing")

    def fill(self, number: int, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> None:
        """Fill in the row with this number."""
        epoch, index = divmod(number, self.per_epoch)
        done, pieces = 0, self._plan(epoch).row(index)
        for document, piece in enumerate(pieces.tolist()):
            part = slice(done, done + int(self._pieces.lengths[piece]))
            self._read(int(self._pieces.starts[piece]), tokens[part], labels[part])
            documents[part] = document
            done = part.stop
        tokens[done:], labels[done:] = 0, IGNORED
        documents[done:] = len(pieces) + np.arange(self._length - done) // PADDING
        if index >= self.per_epoch * 3 // 4 and len(self._pieces.starts) >= _AHEAD:
            self._plan_ahead(epoch + 1)

    def _read(self, start: int, tokens: np.ndarray, labels: np.ndarray) -> None:
        window = self._data.read(start, start + len(tokens))
        if window.documents[0] != window.documents[-1]:
            raise RunError(
                f"{quoted(self._data.path)} has changed since the run began: a document that had {len(tokens)} tokens "
                f"from token {start} on is shorter now; copy the file again"
            )
        tokens[:] = labels[:] = window.tokens
        if window.learned is not None:
            labels[~window.learned] = IGNORED

    def filled(self, rows: int) -> int:
        """Return the tokens of the first `rows` rows, without padding."""
        epochs, index = divmod(rows, self.per_epoch)
        return epochs * self._tokens + (int(self._plan(epochs).filled[index]) if index else 0)

    def _plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch. The last two are kept: rows are drawn a step ahead of the metrics."""
        plans = self._plans
        if epoch not in plans:
            ahead = self._ahead
            plan = ahead[1].result() if ahead and ahead[0] == epoch else self._make(epoch)
            self._plans = {number: plans[number] for number in plans if number >= epoch - 1} | {epoch: plan}
            return plan
        return plans[epoch]

    def _plan_ahead(self, epoch: int) -> None:
        if epoch not in self._plans and (self._ahead is None or self._ahead[0] != epoch):
            self._ahead = epoch, self._thread.submit(self._make, epoch)

    def _make(self, epoch: int) -> EpochPlan:
        return plan_epoch(self._pieces.lengths, self._length, self.per_epoch, self._seed, epoch)

    def describe(self) -> str:
        padding = 1 - self._tokens / (self.per_epoch * self._length)
        documents = format_count(self._data.documents, "document")
        text = f"{documents} in {format_count(self.per_epoch, 'sequence')} an epoch, {padding:.1%} padding"
        if not self._pieces.too_long:
            return text
        kept = "are" if self._pieces.too_long > 1 else "is"
        longer = f"; {self._pieces.too_long} of them longer than {format_tokens(self._length)} tokens {kept}"
        if self._too_long == "cut":
            return f"{text}{longer} cut into pieces"
        how = {"drop": "dropped", "truncate": "truncated"}[self._too_long]
        share = self._pieces.left_out / self._data.tokens
        return f"{text}{longer} {how}, without {self._pieces.left_out} tokens, {share:.1%} (data.too_long)"

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
