"""Cross-entropy of a tile of logits and its gradient in place, in Triton, for GPUs; loss.py has the plain twin.

The logits are read twice and written once, where eager torch makes fp32 copies and passes over them some ten times.
One program takes a token's row, block after block. With 32 warps, and more than 32 registers a thread, an SM has room
for one program, so the rows at work (132 of 256 KB, for Llama 3 on an H200) stay in L2 from one pass to the next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ithaca.parallel.batch import IGNORED

WIDEST = 32768  # logits that a program takes at a time
PER_WARP = 1024  # 32 a thread: enough loads on their way, and they fit in its registers


@triton.jit
def _cross_entropy(logits, labels, losses, stride, vocab, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """One token. A thread stores where it has loaded, so the gradient may take the place of the logits."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    label = tl.load(labels + token).to(tl.int32)
    valid = label != IGNORED
    chosen = tl.load(row + tl.maximum(label, 0)).to(tl.float32)
    top = -3.4e38  # finite: -inf less -inf, of a block that overflowed, would be NaN
    total = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
    # Differences before the logarithm: beside large logits it would be rounded away
    tl.store(losses + token, tl.where(valid, tl.log(total) + (top - chosen), 0.0))
    share = tl.where(valid, 1.0 / total, 0.0)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < vocab
        x = tl.load(row + column, mask=mask, other=float("-inf")).to(tl.float32)
        probability = tl.exp(x - top) * share
        gradient = tl.where(column == label, probability - 1.0, probability)
        gradient = tl.where(valid, gradient, 0.0)  # also where a logit is not finite
        tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=mask)


def cross_entropies_(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """The cross-entropy of each token in fp32; the logits become the gradient of their sum."""
    tokens, vocab = logits_TV.shape
    assert logits_TV.stride(1) == 1
    losses = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    block = min(triton.next_power_of_2(max(vocab, PER_WARP)), WIDEST)
    _cross_entropy[(tokens,)](
        logits_TV, labels_T.contiguous(), losses, logits_TV.stride(0), vocab,
        IGNORED=IGNORED, BLOCK=block, num_warps=block // PER_WARP,
    )  # fmt: skip
    return losses
