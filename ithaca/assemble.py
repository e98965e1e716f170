"""A model put together: weights cut over ranks, a Plan to run it by, and the calls that train it.

The order is fixed: modules without memory, then FSDP2, then this rank's shards from the source. Parallelism is applied
here and nowhere else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.attention.kernels.choose import choose_kernel
from ithaca.base.errors import InputError, ModelError, PlanError
from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles
from ithaca.model.decoder import Decoder
from ithaca.model.save import check_vacant, write_folder
from ithaca.model.source import DTYPES, ModelSource
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.agree import on_this_node, same_batch, same_everywhere, together
from ithaca.parallel.batch import Batch, RankBatch, gather_tokens, rank_batch, split_batch, whole_batch
from ithaca.parallel.collectives import Group
from ithaca.parallel.exchange import Alone, Ulysses
from ithaca.parallel.head_split import describe_share, head_rounds, split_heads
from ithaca.parallel.layout import Layout, batch_range
from ithaca.parallel.mesh import Mesh, alone, describe_crossing
from ithaca.parallel.ring import Ring
from ithaca.parallel.sharding import cut, discard_unreduced, free_gathered, load, prepare_pass, total, whole_tensors
from ithaca.plans.plan import Plan
from ithaca.plans.tape_specs import (
    TapeSpec,
    describe,
    disk_bytes,
    host_bytes,
    layout_of,
    rebuilds_of,
    tape_specs,
    tiles_of,
)
from ithaca.schedule.forward import ForwardContext, logits, loss_sum
from ithaca.schedule.memory_check import Node, check_memory
from ithaca.schedule.tapes import Tapes
from ithaca.tape.engine import make_engine

BUSY = (
    "a second forward pass began before the backward pass of the first, whose tapes it would overwrite: "
    "call backward, or drop the loss, or use torch.no_grad() where no gradient is wanted"
)


class Model(nn.Module):
    """A decoder that runs by a Plan over a mesh. Made by `ithaca.apply`; every call is collective."""

    def __init__(self, source: ModelSource, plan: Plan, mesh: Mesh):
        super().__init__()
        self.source, self.plan, self.mesh = source, plan.settled(), mesh
        self.plan.placement(source.spec.layers)  # whose mistakes are better told before there is a model
        self.dtype = source.compute_dtype(mesh.device)
        self.kernel = choose_kernel(plan.kernel, mesh.device, self.dtype, source.spec.head_size)
        self.decoder = Decoder(source.spec, at_least_fp32(self.dtype))
        self.engine = make_engine(mesh.device)
        runs = Layout(1, 1, mesh.ulysses, mesh.ring).runs
        self.exchange = Ulysses(Group(mesh.ulysses_group), runs) if mesh.ulysses_group else Alone()
        self.ring = Ring(Group(mesh.ring_group) if mesh.ring_group else None)
        self.split = split_heads(source.spec.heads, source.spec.kv_heads, mesh.ulysses)
        self.rounds = head_rounds(self.split, plan.heads_at_once(mesh.ulysses))
        self.tiles_held: int | None = None  # of each host or disk tape, in a rehearsal of memory; None: all
        self._tapes: dict[bool, Tapes] = {}  # for passes that are kept for backward, and for those that are not
        self._begins_step = True
        cut(self.decoder, mesh, plan.zero, self.dtype)

    @property
    def spec(self) -> Spec:
        return self.source.spec

    def shard(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> Batch:
        """This rank's part of a batch that every rank holds whole.

        tokens     [S] or [B, S] ids
        labels     the same shape, each beside its own token as in Hugging Face (`labels = tokens` learns everything,
                   -100 is not learned): the shift by one happens here
        documents  the same shape; a new id begins a new document, which sees nothing before it. Each row is a document
                   of its own in any case
        """
        return split_batch(tokens, labels, documents, self.mesh, self.spec.vocab, self._lay)

    def rank_batch(self, tokens: Tensor, labels: Tensor, documents: Tensor | None, rows: int) -> RankBatch:
        """Return this rank's part of a batch of `rows` rows, given only its own rows (parallel/batch.py)."""
        return rank_batch(tokens, labels, documents, rows, self.mesh, self.spec.vocab, self._lay)

    def _lay(self, tokens: int, shorten: bool = True) -> Layout:
        """Who holds which of so many tokens. A chunk that is too long is refused when all ranks can be told."""
        return layout_of(self.plan, tokens, self.mesh.ulysses, self.mesh.ring, shorten)

    def allocate(self, rows: int, tokens: int, say: Callable[[str], None] = lambda _: None) -> None:
        """Take, before training begins, the memory that passes over `rows` sequences of `tokens` tokens need.

        A first pass does the same; `say` is told how far it is. Refused while a pass waits for its backward.
        """
        self._allocate(self._cut(rows, tokens), True, say)

    def check_memory(self, rows: int, tokens: int) -> None:
        """Refuse now what `reserve` would refuse for want of memory, and take nothing yet."""
        asked = self._needs(True)
        tiles = together(self.mesh.group, self._cut(rows, tokens))
        if asked:
            self._check_memory(asked, tiles)

    def host_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of this node's memory that tapes for such passes take, those of all its ranks together."""
        tiles = together(self.mesh.group, self._cut(rows, tokens))
        return on_this_node(self.mesh.group, host_bytes(self._needs(True), tiles, self.mesh.gpu))[0]

    def _cut(self, rows: int, tokens: int) -> Callable[[], Tiles]:
        """How this rank's tapes are cut for passes over so many sequences."""
        same_everywhere(self.mesh.group, "number of rows or tokens", (rows, tokens))
        for name, number in (("rows", rows), ("tokens", tokens)):
            if type(number) is not int or number < 1:
                raise InputError(f"{name}={number} is no number of {name}: 1 or more is")
        mine = max(len(batch_range(rows, self.mesh.data_rank, self.mesh.data_ranks)), 1) * tokens
        return lambda: tiles_of(self.plan, self._lay(mine, shorten=False))

    def describe_ranks(self) -> list[str]:
        """Which ranks share a sequence, and how; nothing where each has its own."""
        if self.mesh.context_ranks == 1:
            return []
        return [describe_share(self.split, self.mesh.ring), *describe_crossing(self.mesh, self.plan.rings)]

    def describe_tapes(self) -> list[str]:
        """What the Plan keeps outside of tensors, and where; nothing where it keeps nothing so."""
        tapes = self._tapes.get(True)
        return describe(self._needs(True), tapes.tiles, self.plan, self.spec) if tapes else []

    def forward(self, batch: Batch, valid_tokens: int | None = None, last: bool = True) -> Tensor:
        """The mean cross-entropy over the valid tokens of all ranks: the same number on each of them.

        With several micro-batches in an optimizer step, give the step's `valid_tokens` (the sum over its batches), so
        that their losses and gradients add up to those of one large batch, and `last=False` for all but the last:
        ZeRO-1 and 2 then keep gathered weights, and ZeRO-1 unreduced gradients, until it comes (`model.zero_grad()`
        discards those; an optimizer's does not reach them).
        """
        if valid_tokens is not None and valid_tokens < 0:
            raise InputError(f"valid_tokens is {valid_tokens}: the number of valid tokens of the step is needed")
        job = self._job(
            batch,
            lambda: tiles_of(self.plan, self._lay(batch.layout.tokens, shorten=False)),
            torch.is_grad_enabled(),
        )
        prepare_pass(self.decoder, self.plan.zero, self._begins_step, last)
        self._begins_step = last
        with _outside_inference_mode():
            mine = total(self.decoder(loss_sum, batch, job), self.mesh)
            if not torch.is_grad_enabled():
                free_gathered(self.decoder)
        valid = batch.valid_tokens if valid_tokens is None else valid_tokens
        return mine / max(valid, 1)

    @torch.no_grad()
    def logits(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """[S, vocabulary] or [B, S, vocabulary], the same on every rank. For small inputs: all logits exist at once."""
        batch = whole_batch(tokens, documents, self.mesh, self.spec.vocab, self._lay)
        job = self._job(batch, lambda: tiles_of(self.plan, batch.layout), False)
        with _outside_inference_mode():
            flat = self.decoder(logits, batch, job)
            free_gathered(self.decoder)
            if self.mesh.context_group:
                flat = gather_tokens(flat, batch.layout, self.mesh.context_group)
        return flat.view(*torch.as_tensor(tokens).shape, -1)

    def _job(self, batch: Batch, cut: Callable[[], Tiles], training: bool) -> ForwardContext:
        """Check that every rank has the same batch, and begin a pass over its tokens, cut as `cut` says."""
        asked, mine = self._needs(training), self._tapes.get(True)
        missing = bool(asked) and self._tapes_for(cut, training) is None
        busy = training and mine is not None and mine.busy
        layout = self._lay(batch.layout.tokens)
        # One rank has its tokens in order, whatever they were cut for
        foreign = batch.layout != layout and max(batch.layout.ranks, layout.ranks) > 1
        any_missing, any_busy, any_foreign, some, others = same_batch(
            self.mesh.group, batch.fingerprint, missing, busy, foreign, training, not training
        )
        if any_foreign:
            raise InputError("the batch was cut for another Plan or mesh: let the `shard` of this model cut it")
        if some and others:
            raise InputError(
                "some ranks want gradients of this pass and others do not: use torch.no_grad() on all or none"
            )
        if any_busy:
            raise InputError(BUSY)
        if any_missing:
            self._allocate(cut, training, lambda _: None)
        tapes = self._tapes_for(cut, training) if asked else None
        begun = tapes.begin(training) if tapes else None
        return ForwardContext(self.plan, self.kernel, layout, self.exchange, self.ring, self.rounds, begun)

    def _needs(self, training: bool) -> list[TapeSpec]:
        rank, ranks = self.exchange.rank, self.exchange.ranks
        mine = Heads(self.split.q[rank], self.split.kv[rank])
        asked = tape_specs(self.plan, self.spec, self.dtype.itemsize, mine, ranks, self.mesh.ring)
        return [need for need in asked if training or not need.training]

    def _tapes_for(self, cut: Callable[[], Tiles], training: bool) -> Tapes | None:
        """What is there for such a pass; one that keeps nothing can also use what training has, between its passes."""
        candidates = [self._tapes.get(True)]
        if not training:
            candidates = [tapes for tapes in candidates if tapes and not tapes.busy] + [self._tapes.get(False)]
        try:
            return next((tapes for tapes in candidates if tapes and tapes.tiles == cut()), None)
        except PlanError:
            return None  # this rank's tokens cannot be cut so: `_reserve` tells all ranks

    def _allocate(self, cut: Callable[[], Tiles], training: bool, say: Callable[[str], None]) -> None:
        """Make tapes for such passes, in place of those for others. Collective."""
        asked, before = self._needs(training), self._tapes.get(training)

        def check() -> Tiles:
            if before and before.busy:
                raise InputError(BUSY)
            return cut()

        tiles = together(self.mesh.group, check)
        if before:
            self._tapes.pop(training).close()
        if asked:
            self._check_memory(asked, tiles)
            rebuilds = rebuilds_of(self.plan, self.spec) if training else {}
            with _outside_inference_mode():
                made = together(
                    self.mesh.group,
                    lambda: Tapes(
                        asked, rebuilds, tiles, self.dtype, self.engine, say, self.tiles_held, self.plan.disk
                    ),
                )
            self._tapes[training] = made

    def _check_memory(self, asked: list[TapeSpec], tiles: Tiles) -> None:
        """Refuse, on all ranks, tapes that one of them has no room for. Collective."""
        group, device, sharing = self.mesh.group, self.mesh.device, self.mesh.context_ranks
        mine = (0, 0) if self.tiles_held else (host_bytes(asked, tiles, self.mesh.gpu), disk_bytes(asked, tiles))
        (memory, ranks), (disk, _) = (on_this_node(group, amount) for amount in mine)
        node = Node(memory, ranks, disk)
        together(group, lambda: check_memory(asked, tiles, sharing, self.plan, self.spec, device, node))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, whenever they are asked for: never the gathered copies that ZeRO-1 and 2 keep a while."""
        free_gathered(self.decoder)
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those that ZeRO-1 has not reduced yet among them."""
        super().zero_grad(set_to_none)
        discard_unreduced(self.decoder)


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """FSDP2 cannot gather into inference tensors, nor tapes outlive them: run as under `no_grad` instead."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def apply(source: ModelSource, plan: Plan, mesh: Mesh | None = None) -> Model:
    """Put a named model onto the ranks of a mesh (None: this process alone) and read its weights. Collective."""
    mesh = mesh or alone()
    same_everywhere(mesh.group, "model or Plan", (source.spec, source.dtype, source.weights.identity(), plan))
    if mesh.context_ranks > 1 and not plan.shares:
        raise PlanError(
            f"recipe '{plan.recipe}' has no context parallelism, but the mesh has ulysses {mesh.ulysses} × ring "
            f"{mesh.ring}: set both to 1 and shard to {mesh.shard * mesh.context_ranks}, or use recipe 'sweep'"
        )
    if mesh.ulysses > 1 and not plan.shares_heads:
        raise PlanError(
            f"recipe 'ring' shares a sequence over ring ranks only, but the mesh has ulysses {mesh.ulysses}: "
            f"set ulysses to 1 and ring to {mesh.context_ranks}, or use recipe 'hybrid'"
        )
    if mesh.ring > 1 and not plan.rings:
        by_heads = f"set ring to 1 and ulysses to {mesh.context_ranks}, or " * (mesh.context_ranks <= source.spec.heads)
        raise PlanError(
            f"recipe '{plan.recipe}' shares a sequence by heads only, but the mesh has ring {mesh.ring}: "
            f"{by_heads}use recipe 'sweep'"
        )

    def assemble() -> Model:
        model = Model(source, plan, mesh)
        load(model.decoder, mesh, source.weights)
        return model

    return together(mesh.group, assemble)


def save_model(model: Model, folder: str | Path, dtype: str | None = None) -> None:
    """Write a Hugging Face folder that `transformers` loads. Collective; rank 0 writes.

    Each weight leaves in the dtype it came in (`dtype` names another); a preset's in the dtype of the computation.
    """
    # A link or '.' is written where it leads
    folder, writes = Path(folder).resolve(), model.mesh.rank == 0
    together(model.mesh.group, lambda: _check_target(folder, dtype, writes))
    dtypes = {name: _stored_dtype(model, name, dtype) for name, _ in model.spec.shapes()}
    tensors = whole_tensors(model.decoder)

    def write() -> None:
        try:
            if writes:
                write_folder(model.source, dtypes, tensors, folder, rename_dtype=dtype is not None)
        finally:
            # The other ranks only take part in gathering; so does the writer for what a failed write left over
            for _ in tensors:
                pass

    together(model.mesh.group, write)


def _check_target(folder: Path, dtype: str | None, writes: bool) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' is not supported: {', '.join(DTYPES)} are")
    if writes:
        check_vacant(folder)


def _stored_dtype(model: Model, name: str, dtype: str | None) -> torch.dtype:
    return DTYPES[dtype] if dtype else model.source.weights.stored_dtype(name) or model.dtype
