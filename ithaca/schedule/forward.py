"""A rank's tokens through the decoder: embedding, blocks, then the loss or the logits.

`loss_sum` and `logits` run inside the decoder's call, so that its weights are there when they are used.
"""

import torch.nn.functional as F
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.model.decoder import Decoder
from ithaca.model.rope import turn
from ithaca.parallel.batch import Batch
from ithaca.schedule.loss import head_logits, tiled_loss
from ithaca.schedule.plan import Plan
from ithaca.schedule.whole import BlockCall, run_block


def loss_sum(decoder: Decoder, batch: Batch, plan: Plan, kernel: Kernel) -> Tensor:
    """Σ of the cross-entropy over this rank's valid tokens, a scalar."""

    def run(w: dict[str, Tensor], x: Tensor) -> Tensor:
        head = _head(decoder, w)
        return tiled_loss(decoder.spec, x, w["norm.weight"], head, batch.labels, plan.loss_tile)

    return decoder.head(run, _hidden(decoder, batch, plan, kernel))


def logits(decoder: Decoder, batch: Batch, plan: Plan, kernel: Kernel) -> Tensor:
    """[tokens, vocabulary], all at once."""

    def run(w: dict[str, Tensor], x: Tensor) -> Tensor:
        return head_logits(decoder.spec, x, w["norm.weight"], _head(decoder, w))

    return decoder.head(run, _hidden(decoder, batch, plan, kernel))


def _hidden(decoder: Decoder, batch: Batch, plan: Plan, kernel: Kernel) -> Tensor:
    """[tokens, hidden]: what the last block puts out."""
    spec = decoder.spec
    x = F.embedding(batch.tokens, decoder.table())
    rope = turn(spec.rope, spec.head_size, batch.positions, x.dtype)
    pieces = Pieces.documents(batch.bounds)
    for block, turns in zip(decoder.blocks, spec.rope_layers, strict=True):
        x = block(run_block, x, BlockCall(spec, rope if turns else None, kernel, pieces, plan.checkpoint))
    return x


def _head(decoder: Decoder, w: dict[str, Tensor]) -> Tensor:
    return decoder.table() if decoder.spec.tied else w["weight"]
