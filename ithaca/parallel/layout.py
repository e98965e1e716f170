"""Who holds what, as arithmetic on (rank, ranks)."""


def row_range(rows: int, rank: int, ranks: int) -> range:
    """The rows of a weight that a rank holds: equal pieces, rounded up, so that the last ranks may hold fewer or none.

    This is how FSDP2 cuts the first dimension.
    """
    piece = -(-rows // ranks)
    return range(min(rank * piece, rows), min((rank + 1) * piece, rows))


def batch_range(rows: int, rank: int, ranks: int) -> range:
    """The sequences of a batch that a data rank takes: counts differ by one at most."""
    return range(rows * rank // ranks, rows * (rank + 1) // ranks)
