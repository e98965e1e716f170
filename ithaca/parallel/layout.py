"""Who holds what, as arithmetic on (rank, ranks)."""

from dataclasses import dataclass

from ithaca.base.tiles import Tiles


def row_range(rows: int, rank: int, ranks: int) -> range:
    """The rows of a weight that a rank holds: equal pieces, rounded up, so that the last ranks may hold fewer or none.

    This is how FSDP2 cuts the first dimension.
    """
    piece = -(-rows // ranks)
    return range(min(rank * piece, rows), min((rank + 1) * piece, rows))


def batch_range(rows: int, rank: int, ranks: int) -> range:
    """The sequences of a batch that a data rank takes: counts differ by one at most."""
    return range(rows * rank // ranks, rows * (rank + 1) // ranks)


@dataclass(frozen=True)
class Layout:
    """Which tokens of a packed sequence its context ranks, ring × ulysses of them, hold: interleaved chunks.

    Every chunk is split evenly over the ranks. Without a ring they take it in order, so that tile i of all ranks laid
    end to end is chunk i; with one chunk, each rank has one contiguous piece:

        13 tokens, chunks of 8, 2 Ulysses ranks     rank 0: 0 1 2 3   8 9 10      rank 1: 4 5 6 7   11 12 *

    Later tokens see more keys, and in a ring keys stay with their rank. So each ring rank takes two runs of a chunk,
    one from either end, which its Ulysses ranks share:

        16 tokens, one chunk, ring of 2 × 2 Ulysses ranks     ring rank 0: 0 1 | 2 3 and 12 13 | 14 15
                                                              ring rank 1: 4 5 | 6 7 and  8  9 | 10 11

    What does not divide is filled up behind the last token (*), by less than a token for each run of each rank; a chunk
    that does not divide is rounded up.
    """

    tokens: int  # of the sequence
    chunk: int  # of them that go through a block together
    ulysses: int = 1
    ring: int = 1

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def runs(self) -> int:
        """Pieces of a chunk that a rank has."""
        return 1 if self.ring == 1 else 2

    @property
    def local(self) -> int:
        """Tokens of each rank."""
        return self._each(self.tokens)

    @property
    def padded(self) -> int:
        """Tokens of the sequence when it is filled up."""
        return self.local * self.ranks

    @property
    def tiles(self) -> Tiles:
        """How each rank's tokens are cut."""
        return Tiles(self.local, min(self._each(self.chunk), self.local))

    @property
    def chunks(self) -> Tiles:
        """How the sequence is cut."""
        return gathered(self.tiles, self.ranks)

    def places(self, rank: int) -> list[range]:
        """Where the runs of a rank's tiles lie in the sequence, in its own order."""
        ring, ulysses = divmod(rank, self.ulysses)
        return [
            _part(span, ulysses, self.ulysses) for tile in range(self.tiles.count) for span in self.spans(ring, tile)
        ]

    def spans(self, ring: int, tile: int) -> list[range]:
        """What the Ulysses ranks of a ring rank have of a chunk together."""
        rows, pieces = self.chunks.rows(tile), self.ring * self.runs
        chunk = range(rows.start, rows.stop)
        return [_part(chunk, piece, pieces) for piece in sorted({ring, pieces - 1 - ring} if self.ring > 1 else {0})]

    def _each(self, tokens: int) -> int:
        """A rank's part of so many: the same for all, and in runs of one length."""
        return -(-tokens // (self.ranks * self.runs)) * self.runs


def _part(span: range, index: int, parts: int) -> range:
    size = len(span) // parts
    return span[index * size : (index + 1) * size]


def gathered(tiles: Tiles, ranks: int) -> Tiles:
    """The tiles of all ranks together, cut alike on each."""
    return Tiles(tiles.length * ranks, tiles.size * ranks)
