"""A batch, and a rank's part of it.

Rows are laid end to end as one packed sequence in which each row is a document, or several. Labels are given as in
Hugging Face, beside their own tokens; they are shifted here, over the whole batch and before it is split, so that no
border between ranks loses one. The last token of a document predicts nothing.

Context ranks share a sequence as a layout says. What fills it up belongs to the last document, behind its last token:
nobody sees it and it predicts nothing, so it changes no number.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.documents import attended_length, document_bounds, positions
from ithaca.base.errors import InputError
from ithaca.parallel.layout import Layout, batch_range
from ithaca.parallel.mesh import Mesh

IGNORED = -100  # a label that is not learned, as in Hugging Face


@dataclass(frozen=True)
class Batch:
    """What one rank computes on; n tokens are local."""

    tokens: Tensor  # [n]
    labels: Tensor  # [n], what each token predicts, IGNORED where nothing
    positions: Tensor  # [n], within the document
    bounds: tuple[int, ...]  # offsets of the documents in the sequence that the context ranks share, both ends included
    layout: Layout  # which of its tokens are local
    valid_tokens: int  # labels that count, over all ranks
    total_tokens: int  # over all ranks
    attended: float  # Σ length² / tokens over all documents of the batch: what a token's attention costs
    fingerprint: int  # of the whole batch: ranks compare it


def split_batch(
    tokens: Tensor, labels: Tensor, documents: Tensor | None, mesh: Mesh, vocab: int, lay: Callable[[int], Layout]
) -> Batch:
    """This rank's part of a batch that every rank holds whole; `lay` gives the layout of so many tokens."""
    tokens = _check_tokens(tokens, vocab)
    labels = _whole_numbers("labels", labels)
    if labels.shape != tokens.shape:
        raise InputError(f"labels have shape {list(labels.shape)}, tokens {list(tokens.shape)}: they must agree")
    _check_ids("label", labels[labels != IGNORED], vocab)
    documents = _check_documents(documents, tokens)
    rows = tokens.shape[0]
    if rows < mesh.data_ranks:
        raise InputError(
            f"the batch has {rows} rows for {mesh.data_ranks} data ranks (replicate {mesh.replicate} × shard "
            f"{mesh.shard}): give it {mesh.data_ranks} rows or more{_or_share(rows, mesh)}"
        )
    shifted = _shift(labels, documents)
    mine = batch_range(rows, mesh.data_rank, mesh.data_ranks)
    return _part(tokens, shifted, documents, mine, mesh, lay)


def _or_share(rows: int, mesh: Mesh) -> str:
    """How else ranks can have something to do, if they can."""
    for size in range(2, mesh.shard + 1):
        if mesh.shard % size == 0 and mesh.data_ranks // size <= rows:
            return f", or let ranks share them, as ulysses={size * mesh.ulysses} does under the recipe 'sweep'"
    return ""


def whole_batch(
    tokens: Tensor, documents: Tensor | None, mesh: Mesh, vocab: int, lay: Callable[[int], Layout]
) -> Batch:
    """All of a batch on every data rank, without labels."""
    tokens = _check_tokens(tokens, vocab)
    labels = torch.full_like(tokens, IGNORED)
    return _part(tokens, labels, _check_documents(documents, tokens), range(len(tokens)), mesh, lay)


def _part(
    tokens: Tensor, shifted: Tensor, documents: Tensor, rows: range, mesh: Mesh, lay: Callable[[int], Layout]
) -> Batch:
    part = slice(rows.start, rows.stop)
    bounds, layout = document_bounds(documents[part]), lay(tokens[part].numel())
    bounds = (*bounds[:-1], layout.padded)
    places = layout.places(mesh.context_rank)

    def local(sequence: Tensor, filler: int) -> Tensor:
        filled = torch.nn.functional.pad(sequence, (0, layout.padded - len(sequence)), value=filler)
        return torch.cat([filled[place.start : place.stop] for place in places]).to(mesh.device)

    return Batch(
        tokens=local(tokens[part].flatten(), 0),
        labels=local(shifted[part].flatten(), IGNORED),
        positions=local(positions(bounds), 0),
        bounds=bounds,
        layout=layout,
        valid_tokens=int((shifted != IGNORED).sum()),
        total_tokens=tokens.numel(),
        attended=attended_length(document_bounds(documents)),
        fingerprint=_fingerprint(tokens, shifted, documents),
    )


def _check_tokens(tokens: Tensor, vocab: int) -> Tensor:
    """[B, S] of any [S] or [B, S] that the vocabulary covers."""
    tokens = _whole_numbers("tokens", tokens)
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise InputError(f"tokens have shape {list(tokens.shape)}: [S] or [B, S] with at least one token is needed")
    _check_ids("token", tokens, vocab)
    return tokens


def _check_documents(documents: Tensor | None, tokens: Tensor) -> Tensor:
    """Document ids in the shape of the tokens; without any, each row is one document."""
    if documents is None:
        return torch.zeros_like(tokens)
    documents = _whole_numbers("documents", documents)
    if documents.shape != tokens.shape:
        raise InputError(f"documents have shape {list(documents.shape)}, tokens {list(tokens.shape)}: they must agree")
    return documents


def _shift(labels: Tensor, documents: Tensor) -> Tensor:
    shifted = torch.full_like(labels, IGNORED)
    inside = documents[:, 1:] == documents[:, :-1]
    shifted[:, :-1] = torch.where(inside, labels[:, 1:], IGNORED)
    return shifted


def _check_ids(what: str, ids: Tensor, vocab: int) -> None:
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise InputError(f"{what} id {wrong} is outside the vocabulary of {vocab}: ids go from 0 to {vocab - 1}")


def _whole_numbers(what: str, numbers: Tensor) -> Tensor:
    """int64 [B, S] of a tensor, array or list of any whole numbers, [S] being one row."""
    try:
        given = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{what} are {type(numbers).__name__}: a tensor, array or list of ids is needed") from None
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise InputError(f"{what} are {str(given.dtype).removeprefix('torch.')}: whole numbers are needed")
    # Before anything is compared or filled in: -100 does not fit the small unsigned types
    given = given.to(torch.int64)
    return given[None] if given.dim() == 1 else given


def _fingerprint(*tensors: Tensor) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.cpu().contiguous().numpy().data, checksum)
    return checksum


def gather_tokens(local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """[tokens, …] of the whole sequence, of what each context rank has for its own. Collective."""
    parts = [torch.empty_like(local) for _ in range(layout.ranks)]
    dist.all_gather(parts, local.contiguous(), group=group)
    whole = local.new_empty(layout.padded, *local.shape[1:])
    for rank, part in enumerate(parts):
        places = layout.places(rank)
        for place, run in zip(places, part.split([len(place) for place in places]), strict=True):
            whole[place.start : place.stop] = run
    return whole[: layout.tokens]
