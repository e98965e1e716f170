"""Who holds what: pure arithmetic, every case covered once."""

import torch

from ithaca.parallel.layout import batch_range, row_range


def test_rows_are_cut_as_torch_chunks_them() -> None:
    for rows in range(1, 40):
        for ranks in range(1, 9):
            chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
            chunks += [[]] * (ranks - len(chunks))
            assert [list(row_range(rows, rank, ranks)) for rank in range(ranks)] == chunks


def test_sequences_are_dealt_evenly_and_once() -> None:
    for rows in range(1, 40):
        for ranks in range(1, min(rows, 8) + 1):
            parts = [batch_range(rows, rank, ranks) for rank in range(ranks)]
            assert [row for part in parts for row in part] == list(range(rows))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
