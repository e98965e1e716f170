"""Attention of the same rows to different keys, merged into one."""

import torch
from torch import Tensor

from ithaca.base.precision import fusable


def merge(o_sum: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Merge attention over more keys into (o_sum, lse) in place; o [T, H, D], lse [H, T].

    A row that has seen no key yet has lse = -inf.
    """
    if fusable(o_sum):
        from ithaca.attention import triton_merge as fused

        fused.merge(o_sum, lse, o_part, lse_part)
        return
    total = torch.logaddexp(lse, lse_part)
    keep, take = ((part - total).exp_().T[..., None] for part in (lse, lse_part))
    o_sum.mul_(keep).addcmul_(o_part, take)
    lse.copy_(total)
