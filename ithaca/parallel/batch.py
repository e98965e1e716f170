"""A batch of token sequences, and the part of it that one rank computes on.

Rows are laid end to end as one packed sequence, in which each row is one document or several. Labels are given as in
Hugging Face, beside their own tokens, and are shifted by one here, within each row, before the rows are split over
ranks. The last token of a document predicts nothing.

The context ranks share a sequence as its layout says. Padding belongs to the last document and stands behind its last
token: no other token sees it and it predicts nothing, so it changes no number.

Two functions lead to a `Batch`, and both give the same:

    split_batch        Every rank holds the whole batch (`model.shard`). No communication.
    rank_batch         Every rank reads only its own rows. Nothing in it communicates, so a loader can call it in a
                       thread, ahead of the step. `join_batches` then exchanges a few counts between all ranks, and
                       moves the tensors to the device:

        own = batch_rows(mesh, rows)                      # rows of the batch that this rank must read
        part = rank_batch(tokens, labels, documents, rows, mesh, vocab, make_layout)   # tensors [len(own), S]
        batches = join_batches(mesh, lambda: [part])      # collective, once for all passes of a step

`make_layout(tokens)` gives the layout of that many tokens. An error that `join_batches`' function raises on one rank is
raised on all of them: let it wait for the loader's result there.
"""

import operator
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.documents import document_bounds, positions, squared_lengths
from ithaca.base.errors import InputError, shown
from ithaca.base.owners import BATCH, owned_by
from ithaca.parallel.agree import together_with
from ithaca.parallel.layout import Layout, batch_range
from ithaca.parallel.mesh import Mesh

IGNORED = -100  # a label that is not learned, as in Hugging Face

_FINGERPRINTS = 2**61  # fingerprints are below it, so that they and their negatives fit int64


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch. It holds n tokens."""

    tokens: Tensor  # [n]
    labels: Tensor  # [n], what each token predicts, IGNORED where nothing
    positions: Tensor  # [n], within the document
    bounds: tuple[int, ...]  # offsets of the documents in the sequence that the context ranks share, both ends included
    layout: Layout  # which of its tokens are local
    valid_tokens: int  # labels that count, over all ranks
    total_tokens: int  # over all ranks
    attended: float  # Σ length² / tokens over all documents of the batch: what a token's attention costs
    fingerprint: int  # of the whole batch: ranks compare it


@dataclass(frozen=True)
class Counts:
    """Counts of rows, for ranks that may not hold these rows. Counts of different rows add up."""

    tokens: int
    valid: int  # labels that count
    squares: int  # Σ length² over the documents
    fingerprint: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.tokens + other.tokens,
            self.valid + other.valid,
            self.squares + other.squares,
            (self.fingerprint + other.fingerprint) % _FINGERPRINTS,
        )


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of a batch in host memory, and the counts of its rows. `join_batches` makes it a `Batch`."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    bounds: tuple[int, ...]
    layout: Layout
    counts: Counts  # of the rows of this rank's sequence
    shape: tuple[int, int]  # rows and tokens a row of the whole batch

    def on(self, device: torch.device, batch: Counts) -> Batch:
        """The Batch on a device; `batch` are the counts of all rows."""
        tokens, labels, places = (
            tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.labels, self.positions)
        )
        return Batch(
            tokens=tokens,
            labels=labels,
            positions=places,
            bounds=self.bounds,
            layout=self.layout,
            valid_tokens=batch.valid,
            total_tokens=batch.tokens,
            attended=batch.squares / batch.tokens,
            fingerprint=batch.fingerprint,
        )


MakeLayout = Callable[[int], Layout]


@owned_by(BATCH)
def split_batch(
    tokens: Tensor, labels: Tensor, documents: Tensor | None, mesh: Mesh, vocab: int, make_layout: MakeLayout
) -> Batch:
    """This rank's part of a batch that every rank holds whole."""
    tokens, labels, documents = _checked(tokens, labels, documents, vocab)
    check_rows(len(tokens), mesh)
    _check_unshifted(tokens, labels)
    own, shifted = batch_rows(mesh, len(tokens)), _shift(labels, documents)
    part = slice(own.start, own.stop)
    mine = _part(tokens[part], shifted[part], documents[part], own.start, len(tokens), mesh, make_layout)
    return mine.on(mesh.device, _counts(tokens, shifted, documents, 0))


@owned_by(BATCH)
def whole_batch(tokens: Tensor, documents: Tensor | None, mesh: Mesh, vocab: int, make_layout: MakeLayout) -> Batch:
    """All of a batch on every data rank, without labels."""
    tokens = _check_tokens(tokens, vocab)
    labels = torch.full_like(tokens, IGNORED)
    part = _part(tokens, labels, _check_documents(documents, tokens), 0, len(tokens), mesh, make_layout)
    return part.on(mesh.device, part.counts)


def batch_rows(mesh: Mesh, rows: int) -> range:
    """The rows that this rank needs of a batch with `rows` rows."""
    return batch_range(rows, mesh.data_rank, mesh.data_ranks)


@owned_by(BATCH)
def rank_batch(
    tokens: Tensor, labels: Tensor, documents: Tensor | None, rows: int, mesh: Mesh, vocab: int, make_layout: MakeLayout
) -> RankBatch:
    """This rank's part of a batch of `rows` rows, from the rows that `batch_rows` names. Communicates nothing."""
    check_rows(rows, mesh)
    tokens, labels, documents = _checked(tokens, labels, documents, vocab)
    own = batch_rows(mesh, rows)
    if len(tokens) != len(own):
        raise InputError(
            f"data rank {mesh.data_rank} was given {len(tokens)} rows of a batch of {rows} rows over "
            f"{mesh.data_ranks} data ranks: it needs {len(own)}, rows {own.start} to {own.stop - 1}"
        )
    return _part(tokens, _shift(labels, documents), documents, own.start, rows, mesh, make_layout)


@owned_by(BATCH)
def join_batches(mesh: Mesh, build: Callable[[], Sequence[RankBatch]]) -> list[Batch]:
    """The Batches of some passes, from what `build` returns on each rank. Collective, on the host."""
    parts, found = together_with(mesh.group, build, lambda parts: [(part.shape, part.counts) for part in parts])
    for rank, theirs in enumerate(found):
        shapes, first = [shape for shape, _ in theirs], [shape for shape, _ in found[0]]
        if shapes != first:
            raise InputError(f"rank {rank} has batches of shapes {shapes}, rank 0 {first}: they must agree")
        sharing = rank - rank % mesh.context_ranks
        if theirs != found[sharing]:
            raise InputError(f"ranks {sharing} and {rank} share a sequence, but were given different rows of the batch")
    by_data_rank = zip(*found[:: mesh.context_ranks], strict=True)
    totals = [sum((counts for _, counts in ranks), Counts(0, 0, 0, 0)) for ranks in by_data_rank]
    return [part.on(mesh.device, total) for part, total in zip(parts, totals, strict=True)]


def _part(
    tokens: Tensor, shifted: Tensor, documents: Tensor, first: int, rows: int, mesh: Mesh, make_layout: MakeLayout
) -> RankBatch:
    """This rank's part of the given rows, which begin at row `first` of a batch of `rows` rows."""
    bounds, layout = document_bounds(documents), make_layout(tokens.numel())
    bounds = (*bounds[:-1], layout.padded)
    places = layout.places(mesh.context_rank)

    def local(sequence: Tensor, filler: int) -> Tensor:
        filled = torch.nn.functional.pad(sequence, (0, layout.padded - len(sequence)), value=filler)
        mine = torch.cat([filled[place.start : place.stop] for place in places])
        return mine.pin_memory() if mesh.gpu and not mine.is_cuda else mine

    return RankBatch(
        tokens=local(tokens.flatten(), 0),
        labels=local(shifted.flatten(), IGNORED),
        positions=local(positions(bounds), 0),
        bounds=bounds,
        layout=layout,
        counts=_counts(tokens, shifted, documents, first),
        shape=(rows, tokens.shape[1]),
    )


def _counts(tokens: Tensor, shifted: Tensor, documents: Tensor, first: int) -> Counts:
    """The counts of rows that begin at row `first` of the batch."""
    return Counts(
        tokens=tokens.numel(),
        valid=int((shifted != IGNORED).sum()),
        squares=squared_lengths(document_bounds(documents)),
        fingerprint=_fingerprint(first, tokens, shifted, documents),
    )


def _fingerprint(first: int, *tensors: Tensor) -> int:
    """The sum of each row's checksum times its number in the batch, so that ranks can add the sums of their rows."""
    arrays = [tensor.cpu().contiguous().numpy() for tensor in tensors]
    total = 0
    for number, rows in enumerate(zip(*arrays, strict=True), start=first + 1):
        checksum = 0
        for row in rows:
            checksum = zlib.crc32(row.data, checksum)
        total += number * checksum
    return total % _FINGERPRINTS


def check_rows(rows: int, mesh: Mesh) -> None:
    """Raise an error if a batch has fewer rows than there are data ranks."""
    if rows < mesh.data_ranks:
        raise InputError(
            f"the batch has {rows} rows for {mesh.data_ranks} data ranks (replicate {mesh.replicate} × shard "
            f"{mesh.shard}): give it {mesh.data_ranks} rows or more{_or_share(rows, mesh)}"
        )


def _or_share(rows: int, mesh: Mesh) -> str:
    """Advice to use another mesh that gives every rank work, if there is one."""
    for size in range(2, mesh.shard + 1):
        if mesh.shard % size == 0 and mesh.data_ranks // size <= rows:
            if mesh.tensor > 1:
                return f", or let ranks share them, as ring={size * mesh.ring} does beside tensor={mesh.tensor}"
            return f", or let ranks share them, as ulysses={size * mesh.ulysses} does under the recipe 'sweep'"
    return ""


def _checked(tokens: Tensor, labels: Tensor, documents: Tensor | None, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = _check_tokens(tokens, vocab)
    labels = _whole_numbers("labels", labels)
    if labels.shape != tokens.shape:
        raise InputError(f"labels have shape {list(labels.shape)}, tokens {list(tokens.shape)}: they must agree")
    _check_ids("label", labels[labels != IGNORED], vocab)
    return tokens, labels, _check_documents(documents, tokens)


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


def _check_unshifted(tokens: Tensor, labels: Tensor) -> None:
    """Raise an error for labels that a caller has shifted: they would be shifted twice, and learn the token after next.

    Labels as in Hugging Face are their tokens or -100, so none of these is refused.
    """
    if tokens.shape[1] > 1 and torch.equal(labels[:, :-1], tokens[:, 1:]) and not torch.equal(labels, tokens):
        raise InputError(
            "labels are shifted by one already (each is the next token), and `shard` shifts them: give labels=tokens"
        )


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
    if numbers is None:
        raise InputError(
            f"{what} are missing: labels=tokens counts every token in the loss, and -100 leaves a token out"
        )
    try:
        given = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):
        rows = " with rows of one length" if isinstance(numbers, list | tuple) else ""
        raise InputError(
            f"{what} are {type(numbers).__name__}: a tensor, array or list of ids is needed{rows}"
        ) from None
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise InputError(f"{what} are {str(given.dtype).removeprefix('torch.')}: whole numbers are needed")
    if given.is_meta or given.layout != torch.strided:
        kind = "on the meta device" if given.is_meta else f"of layout {str(given.layout).removeprefix('torch.')}"
        raise InputError(f"{what} are {kind}: a dense tensor with values is needed")
    # Before anything is compared or filled in: -100 does not fit the small unsigned types
    given = given.to(torch.int64)
    return given[None] if given.dim() == 1 else given


def gather_tokens(local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """[tokens, …] of the whole sequence, from the local tokens of all context ranks. Collective."""
    parts = [torch.empty_like(local) for _ in range(layout.ranks)]
    dist.all_gather(parts, local.contiguous(), group=group)
    whole = local.new_empty(layout.padded, *local.shape[1:])
    for rank, part in enumerate(parts):
        places = layout.places(rank)
        for place, run in zip(places, part.split([len(place) for place in places]), strict=True):
            whole[place.start : place.stop] = run
    return whole[: layout.tokens]


def count_valid(valid: object) -> int:
    """`valid` as a positive int64 number of valid tokens; 0 if it is not one."""
    try:
        number = operator.index(valid)  # pyrefly: ignore
    except TypeError:
        return 0
    return number if 0 < number < 2**63 else 0


def describe_no_mean(batch: Batch, valid: object) -> str:
    """Why a batch has no mean loss over this many valid tokens."""
    if isinstance(valid, int) and valid == batch.valid_tokens == 0:
        return (
            f"0 of the {batch.total_tokens} tokens of the batch have a label that counts, so it has no mean loss: "
            "leave it out, or give valid_tokens, the number in all micro-batches of the step"
        )
    needed = "the number of valid tokens in all micro-batches of the step is needed, 1 or more"
    return f"valid_tokens is {shown(valid)}: {needed}"
