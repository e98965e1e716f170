"""Documents packed whole into rows of the context length: best fit, the longest first, anew for each epoch.

Each document goes to the row with the least room that still holds it; if none does, it begins a row. Documents of one
length, and rows with the same room, are placed in one operation on arrays. Two heaps hold the sizes of the rooms: those
that the present length fits into, and those that wait for shorter documents. So the cost is that of a few sorts, and a
Python loop over distinct lengths and rooms instead of over documents.

The order of the rows, and of the documents in a row, is random. Every second time a document takes the second best
room, which changes what lies together from epoch to epoch. Every epoch has the number of rows of exact best fit, so the
epoch of a row is found by division: a resumed run computes one plan and replays nothing. If the random choices need
fewer rows, some rows are divided; if they need more, other ones are tried, and at last exact best fit. Random numbers
are hashes of (seed, epoch), the same in every release of numpy.

Measured on one core of a shared virtual machine (CPU time): 10 million documents with log-normal lengths (median 2000,
sigma 1.4), in rows of 32K tokens, take 6 s a plan and 3 s once to count the rows, 0.9 GB at the peak, and 0.3 GB while
the plan is used. Padding is then below 0.01 %. Given up: rows that are packed last hold short documents only.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.reader import TokenFile
from ithaca.data.shuffle import epoch_key, hashes, splitmix64

PADDING = 1024  # tokens of padding in one document: their attention costs little
_ATTEMPTS = 3  # at an epoch that differs from exact best fit and needs no more rows


@dataclass(frozen=True)
class Pieces:
    """The pieces to pack: whole documents, and parts of documents that are longer than a row."""

    starts: np.ndarray  # int64, in the data
    lengths: np.ndarray  # int64
    too_long: int  # documents longer than a row
    left_out: int  # tokens of them that are not learned

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def packing_of(data: TokenFile, packing: str) -> str:
    """Return the packing that `auto` means for these data."""
    if packing != "auto":
        return packing
    return "whole" if data.header.masked and not data.divisible else "cut"


def pieces_of(bounds: np.ndarray, length: int, too_long: str, name: str) -> Pieces:
    """Return the pieces to pack of the documents of some data; `name` is used in an error.

    `too_long`: what becomes of a document that is longer than `length`, `cut` or as data.too_long says.
    """
    shorten = {"cut": cut_documents, "drop": drop_documents, "truncate": truncate_documents}[too_long]
    pieces = shorten(bounds, length)
    if not len(pieces.starts):
        raise DataError(
            f"each of the {len(bounds) - 1} documents of {name} is longer than train.tokens {length}, and "
            "data.too_long is 'drop': data.too_long=truncate keeps their beginnings"
        )
    return pieces


def cut_documents(bounds: np.ndarray, length: int) -> Pieces:
    """Return the documents, with those longer than `length` cut into pieces of that length and a remainder."""
    sizes = np.diff(bounds)
    counts = -(-sizes // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    starts = np.repeat(bounds[:-1], counts) + number * length
    lengths = np.minimum(np.repeat(bounds[1:], counts) - starts, length)
    return Pieces(starts, lengths, int((sizes > length).sum()), 0)


def drop_documents(bounds: np.ndarray, length: int) -> Pieces:
    """Return the documents of at most `length` tokens."""
    sizes = np.diff(bounds)
    long = sizes > length
    return Pieces(bounds[:-1][~long], sizes[~long], int(long.sum()), int(sizes[long].sum()))


def truncate_documents(bounds: np.ndarray, length: int) -> Pieces:
    """Return the first `length` tokens of each document."""
    sizes = np.diff(bounds)
    long = sizes > length
    return Pieces(bounds[:-1], np.minimum(sizes, length), int(long.sum()), int((sizes[long] - length).sum()))


def with_padding(lengths: Sequence[int], length: int) -> tuple[int, ...]:
    """Return the lengths of a row's documents, those of its padding included."""
    rest = length - sum(lengths)
    return (*lengths, *[PADDING] * (rest // PADDING), *([rest % PADDING] if rest % PADDING else []))


@dataclass(frozen=True)
class EpochPlan:
    """The rows of an epoch: row i has the pieces order[offsets[i]:offsets[i + 1]]."""

    order: np.ndarray  # int32
    offsets: np.ndarray  # int64 [rows + 1]
    filled: np.ndarray  # int64 [rows + 1]: tokens before each row, without padding

    def row(self, index: int) -> np.ndarray:
        return self.order[self.offsets[index] : self.offsets[index + 1]]


def count_rows(lengths: np.ndarray, capacity: int) -> int:
    """Return how many rows each epoch of these pieces has."""
    return _Packer(lengths, capacity, 0, exact=True).rows


def plan_epoch(lengths: np.ndarray, capacity: int, rows: int, seed: int, epoch: int) -> EpochPlan:
    """Return the rows of an epoch. `rows`: of `count_rows`."""
    key = epoch_key(seed, epoch)
    for attempt in range(_ATTEMPTS + 1):
        packer = _Packer(lengths, capacity, splitmix64(key + attempt), exact=attempt == _ATTEMPTS)
        if packer.rows <= rows:
            break
    owner = packer.owner
    while (used := int(owner.max()) + 1) < rows:
        _divide_rows(owner, used, rows)
    return _shuffle_rows(lengths, owner, rows, key)


def _shuffle_rows(lengths: np.ndarray, owner: np.ndarray, rows: int, key: int) -> EpochPlan:
    """Return the plan with its rows, and the pieces of each row, in random order."""
    place = np.empty(rows, np.int64)
    place[np.argsort(hashes(rows, splitmix64(key ^ 1)))] = np.arange(rows)
    place = place[owner]
    within = hashes(len(owner), splitmix64(key ^ 2)) >> np.uint64(32)
    order = np.argsort(place.astype(np.uint64) << np.uint64(32) | within, kind="stable").astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=rows))])
    filled = np.concatenate([[0], np.cumsum(lengths[order])])[offsets]
    return EpochPlan(order, offsets, filled)


def _divide_rows(owner: np.ndarray, used: int, rows: int) -> None:
    """Halve the rows with most pieces, each once, until there are `rows` rows.

    `owner`: the row of each piece, of `used` rows; it is changed.
    """
    counts = np.bincount(owner)
    fullest = np.argsort(-counts, kind="stable")[: rows - used]
    fullest = fullest[counts[fullest] > 1]
    moved_to = np.full(used, -1)
    moved_to[fullest] = np.arange(used, used + len(fullest))
    inside = np.flatnonzero(moved_to[owner] >= 0)
    inside = inside[np.argsort(owner[inside], kind="stable")]
    first = np.flatnonzero(np.diff(owner[inside], prepend=-1))
    place = np.arange(len(inside)) - np.repeat(first, np.diff(np.append(first, len(inside))))
    odd = inside[place % 2 == 1]
    owner[odd] = moved_to[owner[odd]]


class _Packer:
    """Best fit of all pieces. `owner`: the row of each piece; `rows`: how many there are."""

    def __init__(self, lengths: np.ndarray, capacity: int, key: int, exact: bool):
        self.owner, self.rows = np.empty(len(lengths), np.int32), 0
        self._key, self._exact, self._coins = key, exact, 0
        self._with_room: dict[int, list[np.ndarray]] = {}  # rows by the tokens that still fit
        self._fitting: list[int] = []  # a heap of rooms that the present size fits into
        self._waiting: list[int] = []  # a heap of the others, negative, so that the largest comes first
        # One sort by length, the longest first, and by hash among equal lengths
        keys = (capacity - lengths).astype(np.uint64) << np.uint64(32) | hashes(len(lengths), key) >> np.uint64(32)
        order = np.argsort(keys, kind="stable")  # equal keys in one order on every machine
        sizes, first = np.unique(-lengths[order], return_index=True)
        placed = np.empty(len(lengths), np.int32)
        for size, start, stop in zip((-sizes).tolist(), first.tolist(), [*first.tolist()[1:], len(order)], strict=True):
            self._place(placed[start:stop], size, capacity)
        self.owner[order] = placed

    def _place(self, pieces: np.ndarray, size: int, capacity: int) -> None:
        """Assign a row to each of some pieces of one size."""
        while self._waiting and -self._waiting[0] >= size:
            heapq.heappush(self._fitting, -heapq.heappop(self._waiting))
        while len(pieces) and self._fitting:
            room = self._best_room()
            held = self._with_room.pop(room)
            pieces = self._fill(pieces, size, held[0] if len(held) == 1 else np.concatenate(held), room)
        if len(pieces):
            count = -(-len(pieces) // (capacity // size))
            new = np.arange(self.rows, self.rows + count, dtype=np.int32)
            self.rows += count
            self._fill(pieces, size, new, capacity)

    def _fill(self, pieces: np.ndarray, size: int, rows: np.ndarray, room: int) -> np.ndarray:
        """Put pieces into rows with this room, into each as many as it holds. Return the pieces that are left."""
        each = room // size
        full = min(len(pieces) // each, len(rows))
        pieces[: full * each] = rows[:full] if each == 1 else np.repeat(rows[:full], each)
        self._keep(rows[:full], room - each * size, size)
        pieces, rows = pieces[full * each :], rows[full:]
        if len(pieces) and len(rows):
            pieces[:] = rows[0]
            self._keep(rows[:1], room - len(pieces) * size, size)
            pieces, rows = pieces[:0], rows[1:]
        self._keep(rows, room, size)
        return pieces

    def _keep(self, rows: np.ndarray, room: int, size: int) -> None:
        """Remember rows by the room that they have left."""
        if not room or not len(rows):
            return
        if room in self._with_room:
            self._with_room[room].append(rows)
            return
        self._with_room[room] = [rows]
        heapq.heappush(self._fitting, room) if room >= size else heapq.heappush(self._waiting, -room)

    def _best_room(self) -> int:
        """Return the smallest room that fits; sometimes the second smallest, so that epochs differ."""
        best = heapq.heappop(self._fitting)
        if self._exact or not self._fitting:
            return best
        self._coins += 1
        return best if splitmix64(self._key ^ self._coins) & 1 else heapq.heapreplace(self._fitting, best)
