"""Greedy decoding on the ranks of a model: prompts are read once, then tokens are added to them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.base.errors import InputError, PlanError, shown
from ithaca.parallel.agree import same_everywhere, together_with
from ithaca.parallel.batch import batch_rows, split_batch
from ithaca.parallel.mesh import Mesh
from ithaca.parallel.sharding import free_gathered, outside_inference_mode
from ithaca.schedule.decode import Prompts, greedy
from ithaca.schedule.forward import fill_cache
from ithaca.schedule.kv_cache import KVCache

if TYPE_CHECKING:
    from ithaca.assemble.model import Model


def check_decoding(mesh: Mesh) -> None:
    """Raise an error if tokens cannot be added to prompts on this mesh."""
    if mesh.tensor > 1:
        raise PlanError(
            f"prompts cannot be continued on {mesh.tensor} tensor ranks, which hold parts of every weight: use recipe "
            f"'sweep' with ulysses={mesh.tensor} and tensor=1, which reads the same checkpoints"
        )


@torch.no_grad()
def read_prompts(model: "Model", tokens: Tensor, documents: Tensor | None = None) -> Prompts:
    """Read prompts, one a row, and keep their K and V. Collective."""
    check_decoding(model.mesh)
    batch = split_batch(tokens, tokens, documents, model.mesh, model.spec.vocab, model.reservation.layout)
    context = model.begin_pass(batch, False, valid=1, shorten=True)
    rank, group = model.mesh.context_rank, model.mesh.context_group
    with outside_inference_mode():
        tapes = model.reservation.cache(batch.layout.tokens).begin(False).cache
        row_tokens = torch.as_tensor(tokens).shape[-1]
        rotary, kernel = model.decoder.rotary, model.kernel
        cache = KVCache(model.spec, kernel, rotary, batch, row_tokens, tapes, model.dtype, rank, group)
        free_gathered(model.decoder)  # an optimizer step may have made gathered copies stale
        model.decoder(partial(fill_cache, batch=batch, context=replace(context, cache=cache)))
        free_gathered(model.decoder)
    return Prompts(partial(_run_once, model), cache)


@torch.no_grad()
def _run_once(model: "Model", function: Callable[..., Tensor]) -> Tensor:
    with outside_inference_mode():
        found = model.decoder(function)
        free_gathered(model.decoder)
    return found


def greedy_decode(model: "Model", tokens: Tensor, count: int, documents: Tensor | None = None) -> Tensor:
    """[count] or [B, count] on the CPU, the same on every rank: the likeliest tokens after each prompt."""
    mesh = model.mesh
    same_everywhere(mesh.group, "number of tokens to decode", count)
    if type(count) is not int or count < 1:
        raise InputError(f"count, the number of new tokens, must be 1 or more; it is {shown(count)}")
    tokens = torch.as_tensor(tokens)
    prompts, rows = read_prompts(model, tokens, documents), tokens.view(-1, tokens.shape[-1])
    own = batch_rows(mesh, len(rows))
    last = rows[own.start : own.stop, -1].to(mesh.device, torch.int64)
    found = greedy(prompts, last, count, partial(agree_tokens, mesh)).tolist()
    parts = together_with(mesh.group, lambda: found, lambda rows: rows)[1][:: mesh.context_ranks]
    return torch.tensor([row for part in parts for row in part]).view(*tokens.shape[:-1], count)


def agree_tokens(mesh: Mesh, tokens: Tensor) -> None:
    """Broadcast tokens from the first of the ranks that share this rank's sequences."""
    if mesh.context_group:
        dist.broadcast(tokens, group=mesh.context_group, group_src=0)
