"""New tokens after prompts: each pass computes one more token of every continuation from the K/V cache (kv_cache.py).

A pass gathers each block's weights once, as a training pass does, and reads all K and V of the prompts. That is for a
few tokens after a long prompt, as in an evaluation. To serve a model, other engines are faster by far.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ithaca.base.owners import BLOCKS, owned_by
from ithaca.model.block import mlp, output_projection, project
from ithaca.model.decoder import Decoder
from ithaca.model.rotary import Rotation
from ithaca.model.spec import Heads
from ithaca.schedule.kv_cache import KVCache
from ithaca.schedule.loss import head_logits

Run = Callable[[Callable[..., Tensor]], Tensor]  # calls a function with the decoder, whose weights are gathered


class Prompts:
    """Prompts whose K and V are kept: `begin` continuations of them, then `step` token by token. Calls are collective.

    Each row of the batch is one prompt. A continuation begins with the prompt's last token, so the first step takes
    that token and predicts the first new one. Continuation c of row r has the number r * copies + c.
    """

    def __init__(self, run: Run, cache: KVCache):
        self._run, self._cache = run, cache
        self._positions = torch.empty(0, dtype=torch.int64)

    @property
    def rows(self) -> int:
        """Prompts of this data rank."""
        return len(self._cache.positions)

    def begin(self, copies: int, most: int) -> None:
        """Begin `copies` continuations of each prompt with room for `most` tokens; others are forgotten."""
        self._cache.begin(copies, most)
        positions = torch.tensor(self._cache.positions, dtype=torch.int64, device=self._cache.device)
        self._positions = positions.repeat_interleave(copies)

    def step(self, tokens_R: Tensor) -> Tensor:
        """[continuations, vocabulary]: the logits after one more token of each continuation."""
        positions = self._positions + self._cache.count
        found = self._run(partial(_next_logits, tokens_R=tokens_R, positions_R=positions, cache=self._cache))
        self._cache.count += 1
        return found


def _next_logits(decoder: Decoder, tokens_R: Tensor, positions_R: Tensor, cache: KVCache) -> Tensor:
    spec = decoder.spec
    x = decoder.embed(lambda table: F.embedding(tokens_R, table))
    rope = decoder.rotary.at(positions_R, x.dtype)
    for layer, (block, rotates) in enumerate(zip(decoder.blocks, spec.rope_layers, strict=True)):
        x = block(partial(_block, layer=layer, rotation=rope if rotates else None, cache=cache), x)

    def head(w: dict[str, Tensor], x: Tensor) -> Tensor:
        return head_logits(spec, x, w["norm.weight"], decoder.table() if spec.tied else w["weight"])

    return decoder.head(head, x)


@owned_by(BLOCKS)
def _block(w: dict[str, Tensor], x: Tensor, layer: int, rotation: Rotation | None, cache: KVCache) -> Tensor:
    spec, heads = cache.spec, Heads.all(cache.spec)
    q, k, v = project(spec, w, x, rotation, heads)
    return mlp(spec, w, output_projection(spec, w, x, cache.attend(layer, q, k, v), heads))


def greedy(prompts: Prompts, last_R: Tensor, count: int, agree: Callable[[Tensor], None]) -> Tensor:
    """[prompts, count]: greedy decoding after each prompt's token `last_R`; `agree` makes tokens equal on all ranks."""
    prompts.begin(1, count)
    found, tokens = [], last_R
    for _ in range(count):
        tokens = prompts.step(tokens).argmax(-1)
        agree(tokens)
        found.append(tokens)
    return torch.stack(found, 1)
