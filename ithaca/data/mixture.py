"""Several sources with shares of the tokens, and which source each row comes from.

Rows are dealt out by error diffusion. A tree halves the sources by weight; at each node, of n rows the first side gets
n · weight, rounded. So row n's source, and how many rows of it came before, are a few multiplications of whole numbers:
nothing is replayed. With two sources each has its share to within half a row at any time; with more, to within two
rows, which is how far the rounding of nested nodes can add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_tokens
from ithaca.data.reader import TokenFile
from ithaca.data.subset import split_by_length

LIBRARY = "Python's standard library"  # the name of the data of a run that names none
_BITS = 40  # of a share as a whole number
_HALF = 1 << _BITS - 1


@dataclass(frozen=True)
class Source:
    """Documents with their share of all tokens."""

    name: str
    share: float
    data: TokenFile

    @property
    def title(self) -> str:
        """The name in errors."""
        return f"'{self.name}'" if self.data.path else self.name


class Mixture:
    """Sources whose shares add up to one. The largest share comes first, whatever order they were given in."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = sorted(sources, key=lambda source: (-source.share, str(source.data.identity())))

    @property
    def path(self) -> Path | None:
        """The file whose name stands for the data in errors about all of them."""
        return self.sources[0].data.path

    @property
    def tokens(self) -> int:
        return sum(source.data.tokens for source in self.sources)

    @property
    def vocab(self) -> int:
        return max(source.data.vocab for source in self.sources)

    @property
    def tokenizer(self) -> str:
        return self.sources[0].data.tokenizer

    def identity(self) -> dict[str, Any]:
        """Return what tells these data from any other: each source's identity and share."""
        return {"mix": [{"share": source.share, **source.data.identity()} for source in self.sources]}


Data = TokenFile | Mixture


def sources_of(data: Data) -> list[Source]:
    """Return the sources of a mixture; other data are their only source."""
    return data.sources if isinstance(data, Mixture) else [Source(str(data.path or data.name or LIBRARY), 1.0, data)]


def mix(files: dict[str, tuple[float, TokenFile]], long: int, long_share: float | None) -> Data:
    """Return files mixed by weight and, if `long_share` is set, by length.

    `long`: documents of this many tokens are long. The shares of the files stay what the weights say; within each file
    that has both kinds, long documents get the same share, such that all together have `long_share` of the tokens.
    """
    _check_agreement(files)
    total = sum(weight for weight, _ in files.values())
    shares = {name: weight / total for name, (weight, _) in files.items()}
    if long_share is None:
        if len(files) == 1:
            return next(iter(files.values()))[1]
        return Mixture([Source(name, shares[name], data) for name, (_, data) in files.items()])
    split = {name: split_by_length(data, long) for name, (_, data) in files.items()}
    inner = _long_share_of_both(split, shares, long, long_share)
    sources, least = [], format_tokens(long)
    kinds = f"of {least} tokens and more", f"below {least} tokens"
    for name, parts in split.items():
        for data, part, kind in zip(parts, (inner, 1 - inner), kinds, strict=True):
            share = shares[name] * (part if all(parts) else 1)
            if data and share:
                sources.append(Source(f"{name} {kind}" if all(parts) else name, share, data))
    return Mixture(sources)


def _check_agreement(files: dict[str, tuple[float, TokenFile]]) -> None:
    """Raise an error if two files were made with different tokenizers, or are the same data."""
    seen: dict[str, str] = {}
    first, (_, one) = next(iter(files.items()))
    for name, (_, data) in files.items():
        if data.tokenizer != one.tokenizer:
            raise DataError(
                f"'{name}' was made with another tokenizer ({data.tokenizer[:15]}) than '{first}' "
                f"({one.tokenizer[:15]}): prepare both with the model's (ithaca data --tokenizer)"
            )
        digest = data.header.blocks_sha256
        if digest in seen:
            raise DataError(f"'{seen[digest]}' and '{name}' of data.mix have the same documents: leave one of them out")
        seen[digest] = name


def _long_share_of_both(
    split: dict[str, tuple[TokenFile | None, TokenFile | None]], shares: dict[str, float], long: int, wanted: float
) -> float:
    """Return the share of long documents in the files that have both kinds."""
    least = sum(shares[name] for name, (_, short) in split.items() if not short)
    both = sum(shares[name] for name, parts in split.items() if all(parts))
    low, high = least, least + both
    inner = (wanted - least) / both if both else 0.0
    if -1e-9 <= inner <= 1 + 1e-9 and low - 1e-9 <= wanted <= high + 1e-9:
        return min(max(inner, 0.0), 1.0)
    longest = max(int(np.diff(data.bounds()).max()) for parts in split.values() for data in parts if data)
    if high == 0:
        raise DataError(
            f"data.long_share is {wanted:g}, but no document has {long} tokens (data.long): the longest has {longest}; "
            f"data.long={longest} works"
        )
    raise DataError(
        f"data.long_share is {wanted:g}, but documents of {long} tokens and more (data.long) can only have a share of "
        f"{low:g}{f' to {high:g}' if high > low else ''} in these data: name such a share"
    )


class Interleave:
    """Deals out rows to sources by weight."""

    def __init__(self, weights: Sequence[float]):
        self._sources = len(weights)
        self._tree = _tree(sorted(enumerate(weights), key=lambda item: -item[1]))

    def locate(self, row: int) -> tuple[int, int]:
        """Return the source of a row, and how many rows of that source come before it."""
        node = self._tree
        while not isinstance(node, int):
            before = _rounded(row, node.share)
            taken = _rounded(row + 1, node.share) > before
            node, row = (node.first, before) if taken else (node.second, row - before)
        return node, row

    def counts(self, rows: int) -> list[int]:
        """Return how many of the first `rows` rows each source has."""
        found = [0] * self._sources
        nodes = [(self._tree, rows)]
        while nodes:
            node, count = nodes.pop()
            if isinstance(node, int):
                found[node] = count
            else:
                taken = _rounded(count, node.share)
                nodes += [(node.first, taken), (node.second, count - taken)]
        return found


@dataclass(frozen=True)
class _Node:
    """Two sides that rows are dealt out to. A side is a source's number, or a node again."""

    share: int  # of the first side, times 2^_BITS
    first: "_Node | int"
    second: "_Node | int"


def _tree(weights: list[tuple[int, float]]) -> _Node | int:
    """Return the nodes for sources with their weights, the largest first, cut where the sides differ least."""
    if len(weights) == 1:
        return weights[0][0]
    sums = np.cumsum([weight for _, weight in weights])
    cut = int(np.argmin(np.abs(sums[:-1] - sums[-1] / 2))) + 1
    share = round(float(sums[cut - 1] / sums[-1]) * (1 << _BITS))
    return _Node(min(max(share, 1), (1 << _BITS) - 1), _tree(weights[:cut]), _tree(weights[cut:]))


def _rounded(rows: int, share: int) -> int:
    """Return rows · share, rounded to the nearest whole number."""
    return rows * share + _HALF >> _BITS
