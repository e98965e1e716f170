"""Which rows of a weight, rows of a batch and tokens of a sequence each rank holds, as arithmetic on (rank, ranks)."""

from dataclasses import dataclass

from ithaca.base.tiles import Tiles


def row_range(rows: int, rank: int, ranks: int) -> range:
    """The rows of a weight that a rank holds, as FSDP2 cuts the first dimension.

    Pieces have the same size, rounded up, so the last ranks may hold fewer rows or none.
    """
    piece = -(-rows // ranks)
    return range(min(rank * piece, rows), min((rank + 1) * piece, rows))


def batch_range(rows: int, rank: int, ranks: int) -> range:
    """The rows of a batch that a data rank takes; the numbers of rows differ by one at most."""
    return range(rows * rank // ranks, rows * (rank + 1) // ranks)


@dataclass(frozen=True)
class Layout:
    """Which tokens of a packed sequence each of its ring × ulysses context ranks holds.

    The sequence is cut into chunks, and every chunk is split evenly over the ranks; a rank's part of chunk i is its
    tile i. Without a ring, the ranks take a chunk in order:

        13 tokens, chunks of 8, 2 Ulysses ranks     rank 0: 0 1 2 3   8 9 10      rank 1: 4 5 6 7   11 12 *

    Later tokens see more keys, and each ring rank attends to its own keys. So that all have the same work, a ring rank
    takes two runs of consecutive tokens from a chunk, one from either end. Its Ulysses ranks share both:

        16 tokens, one chunk, ring of 2 × 2 Ulysses ranks     ring rank 0: 0 1 | 2 3 and 12 13 | 14 15
                                                              ring rank 1: 4 5 | 6 7 and  8  9 | 10 11

    A sequence that does not divide is padded behind its last token (*), by less than a token for each run of each rank.
    A chunk that does not divide is rounded up.
    """

    tokens: int  # of the sequence
    chunk: int  # tokens that go through a block together
    ulysses: int = 1  # or tensor ranks, which hold tokens in the same way
    ring: int = 1

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def runs(self) -> int:
        """How many runs of consecutive tokens a rank has of each chunk."""
        return 1 if self.ring == 1 else 2

    @property
    def local(self) -> int:
        """Tokens of each rank, padding included."""
        return self._each(self.tokens)

    @property
    def padded(self) -> int:
        """Tokens of the sequence, padding included."""
        return self.local * self.ranks

    @property
    def tiles(self) -> Tiles:
        """The tiles of each rank's tokens."""
        return Tiles(self.local, min(self._each(self.chunk), self.local))

    @property
    def chunks(self) -> Tiles:
        """The chunks of the padded sequence."""
        return gathered(self.tiles, self.ranks)

    def places(self, rank: int) -> list[range]:
        """The positions of a rank's tokens in the sequence: the runs of its tiles, in the order of its memory."""
        ring, ulysses = divmod(rank, self.ulysses)
        return [
            _part(span, ulysses, self.ulysses) for tile in range(self.tiles.count) for span in self.spans(ring, tile)
        ]

    def spans(self, ring: int, tile: int) -> list[range]:
        """The positions of a chunk that the Ulysses ranks of one ring rank hold together, as runs."""
        rows, pieces = self.chunks.rows(tile), self.ring * self.runs
        chunk = range(rows.start, rows.stop)
        return [_part(chunk, piece, pieces) for piece in sorted({ring, pieces - 1 - ring} if self.ring > 1 else {0})]

    def _each(self, tokens: int) -> int:
        """Each rank's number of these tokens: the same for all ranks, and a multiple of its runs."""
        return -(-tokens // (self.ranks * self.runs)) * self.runs


def _part(span: range, index: int, parts: int) -> range:
    size = len(span) // parts
    return span[index * size : (index + 1) * size]


def gathered(tiles: Tiles, ranks: int) -> Tiles:
    """The tiles of all ranks laid together: tile i is tile i of every rank."""
    return Tiles(tiles.length * ranks, tiles.size * ranks)
