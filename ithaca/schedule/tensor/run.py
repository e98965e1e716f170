"""Tensor parallelism with sequence parallelism, as Megatron has it: what a pass over a batch needs beside the blocks.

Blocks run as under `whole` (whole/run.py), on the narrower model of this rank (parallel/tensor_parts.py). Their linear
layers gather the tokens of all tensor ranks and reduce the sums over them (model/linear.py:Spread). So attention has
all tokens and some heads, and norms and residuals have this rank's tokens. Weights are cut for good: nothing of them is
gathered over tensor ranks. cost.py has what is kept and sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ithaca.model.decoder import Decoder
from ithaca.parallel.batch import Batch
from ithaca.parallel.tensor import TensorSpread
from ithaca.parallel.tensor_parts import TensorPart
from ithaca.schedule.tensor.vocabulary import Vocabulary, embed, token_losses, vocabulary_loss, whole_logits


@dataclass(frozen=True)
class TensorRanks:
    """The tensor ranks of a model, seen from one of them."""

    part: TensorPart
    spread: TensorSpread

    def begin(self, batch: Batch) -> "TensorPass":
        """A pass over a batch: gathers the tokens, labels and positions of all ranks."""
        mine = torch.stack((batch.tokens, batch.labels, batch.positions))
        tokens, labels, positions = self.spread.gather(mine[None]).unbind(1)
        return TensorPass(self.part, self.spread, tokens, labels, positions)


@dataclass(frozen=True)
class TensorPass:
    """A batch as all tensor ranks hold it: [ranks, n] each."""

    part: TensorPart
    spread: TensorSpread
    tokens: Tensor
    labels: Tensor
    positions: Tensor

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.part.vocabularies, self.spread)

    def embed(self, table: Tensor, tile: int) -> Tensor:
        return embed(table, self.tokens, self.vocabulary, tile)

    def sharing(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a block's function so that gradients of weights that several ranks hold are summed over these."""

        def shared(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
            self.spread.share_gradients(self.part, w)
            return run(w, x)

        return shared

    def loss_sum(self, decoder: Decoder, x: Tensor, weight: Tensor, head: Tensor, tile: int) -> Tensor:
        """Σ of the cross-entropy over this rank's valid tokens."""
        self.spread.share_gradients(self.part, {"norm.weight": weight})
        return vocabulary_loss(decoder.spec, x, weight, head, self.labels, self.vocabulary, tile)

    def losses(self, decoder: Decoder, x: Tensor, weight: Tensor, head: Tensor, tile: int) -> Tensor:
        return token_losses(decoder.spec, x, weight, head, self.labels, self.vocabulary, tile)

    def logits(self, decoder: Decoder, x: Tensor, weight: Tensor, head: Tensor) -> Tensor:
        return whole_logits(decoder.spec, x, weight, head, self.vocabulary)
