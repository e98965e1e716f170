"""Who holds what, as arithmetic on (rank, ranks)."""

from dataclasses import dataclass

from ithaca.tape.tiles import Tiles


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
    """Which tokens of a packed sequence its context ranks hold: interleaved chunks.

    Every chunk is split evenly over the ranks, in order, so that tile i of all ranks laid end to end is chunk i. With
    one chunk, each rank has one contiguous piece.

        13 tokens, chunks of 8, 2 ranks     rank 0: 0 1 2 3   8 9 10      rank 1: 4 5 6 7   11 12 *

    What does not divide is filled up behind the last token (*), by less than a token for each rank; a chunk that does
    not divide is rounded up.
    """

    tokens: int  # of the sequence
    chunk: int  # of them that go through a block together
    ranks: int

    @property
    def local(self) -> int:
        """Tokens of each rank."""
        return -(-self.tokens // self.ranks)

    @property
    def padded(self) -> int:
        """Tokens of the sequence when it is filled up."""
        return self.local * self.ranks

    @property
    def tiles(self) -> Tiles:
        """How each rank's tokens are cut."""
        return Tiles(self.local, min(-(-self.chunk // self.ranks), self.local))

    @property
    def chunks(self) -> Tiles:
        """How the sequence is cut."""
        return gathered(self.tiles, self.ranks)

    def places(self, rank: int) -> list[range]:
        """Where the tiles of a rank lie in the sequence."""
        tiles, chunks = self.tiles, self.chunks
        rows = [(chunks.rows(index).start, tiles.rows_in(index)) for index in range(tiles.count)]
        return [range(start + rank * count, start + (rank + 1) * count) for start, count in rows]


def gathered(tiles: Tiles, ranks: int) -> Tiles:
    """The tiles of all ranks together, cut alike on each."""
    return Tiles(tiles.length * ranks, tiles.size * ranks)
