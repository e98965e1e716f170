"""The tiled loss against its twin: the sum and every gradient, at tiles that do not divide."""

import pytest
import torch

from ithaca.model.presets import PRESETS
from ithaca.model.spec import read_spec
from ithaca.schedule.loss import naive_loss, tiled_loss
from tests.models import relative

SPEC = read_spec(PRESETS["tiny"])


@pytest.mark.parametrize("tile", [1, 7, 23, 100])
@pytest.mark.parametrize("learned", [(True, True, True), (True, False, False), (False, True, True)])
def test_tiles(tile: int, learned: tuple[bool, ...]) -> None:
    generator = torch.Generator().manual_seed(tile)
    shapes = ((23, 16), (16,), (31, 16))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    labels = torch.randint(0, 31, (23,), generator=generator).masked_fill(torch.arange(23) % 4 == 0, -100)
    results = []
    for loss in (lambda *x: naive_loss(SPEC, *x), lambda *x: tiled_loss(SPEC, *x, tile)):
        leaves = [tensor.clone().requires_grad_(needed) for tensor, needed in zip(given, learned, strict=True)]
        value = loss(*leaves, labels)
        (2 * value).backward()
        results.append([value, *(leaf.grad for leaf in leaves if leaf.requires_grad)])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert relative(found, wanted) <= 1e-12
