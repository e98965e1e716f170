"""Take a round's query heads out of a tensor with all heads, and write them back."""

from itertools import pairwise

import torch
from torch import Tensor

from ithaca.model.spec import runs
from ithaca.parallel.head_split import HeadSplit


def take_heads(x_THD: Tensor, split: HeadSplit) -> Tensor:
    """A round's query heads: a view if they are evenly spaced, else a copy."""
    first, *others = _views(x_THD, split)
    return torch.cat((first, *others), 1) if others else first


def put_heads(x_THD: Tensor, split: HeadSplit, part: Tensor) -> None:
    """Write a round's query heads to their places."""
    views = _views(x_THD, split)
    for view, heads in zip(views, part.split([view.shape[1] for view in views], 1), strict=True):
        view.copy_(heads)


def _views(x_THD: Tensor, split: HeadSplit) -> list[Tensor]:
    """One view if the heads are evenly spaced, else one for each run of adjacent heads."""
    heads = split.q_heads
    steps = {after - before for before, after in pairwise(heads)} or {1}
    if len(steps) == 1:
        return [x_THD[:, heads[0] : heads[-1] + 1 : steps.pop()]]
    return [x_THD[:, run.start : run.stop] for run in runs(heads)]
