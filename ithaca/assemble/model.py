"""A model on its ranks: weights sharded over them, a Plan to run it by, and the calls that train it."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.assemble.decode import check_decoding, greedy_decode, read_prompts
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.seam import Kernel
from ithaca.base.errors import InputError
from ithaca.base.misuse import describe, missing_attribute, refuse_keywords
from ithaca.base.precision import at_least_fp32
from ithaca.model.decoder import Decoder
from ithaca.model.source import ModelSource
from ithaca.model.spec import Spec
from ithaca.parallel.agree import first_then_others, same_batch, same_everywhere
from ithaca.parallel.axes import Axes
from ithaca.parallel.batch import (
    Batch,
    RankBatch,
    count_valid,
    describe_no_mean,
    gather_tokens,
    rank_batch,
    split_batch,
    whole_batch,
)
from ithaca.parallel.collectives import Group
from ithaca.parallel.exchange import Alone, Reordered, Ulysses
from ithaca.parallel.head_split import HeadSplit, describe_share, split_heads
from ithaca.parallel.layout import Layout, batch_range
from ithaca.parallel.mesh import Mesh, describe_crossing
from ithaca.parallel.ring import Ring
from ithaca.parallel.sharding import (
    discard_unreduced,
    free_gathered,
    outside_inference_mode,
    prepare_pass,
    shard_parameters,
    total,
)
from ithaca.parallel.tensor import TensorSpread
from ithaca.parallel.tensor_parts import TensorPart
from ithaca.plans.plan import Plan
from ithaca.schedule.cuda_graph import graph_passes
from ithaca.schedule.decode import Prompts
from ithaca.schedule.forward import ForwardContext, logits, loss_sum, losses
from ithaca.schedule.job import Job
from ithaca.schedule.marks import PassWork, StepMarks, no_mark, pass_work
from ithaca.schedule.reservation import BUSY, Reservation
from ithaca.schedule.tensor.run import TensorRanks
from ithaca.tape.engine import make_engine

# Attributes of models of `transformers`, and what to use here
ELSEWHERE = {
    "config": "model.spec has the sizes, model.source.config the config.json",
    "device": "model.mesh.device is its device",
    "generate": "model.greedy_decode(tokens, 32) gives the likeliest next tokens; to sample, save it with "
    "ithaca.save_model(model, folder) and generate with transformers",
    "save_pretrained": "ithaca.save_model(model, folder) writes the Hugging Face folder",
    "gradient_checkpointing_enable": "the Plan says what is saved, as ithaca.Plan(checkpoint='full')",
}
CALL = "the model takes a Batch: batch = model.shard(tokens, labels=tokens), then loss = model(batch)"


@dataclass(frozen=True)
class Substitutes:
    """What a rehearsal uses in place of the real kernel and tapes."""

    kernel: Callable[[Kernel], Kernel] = lambda kernel: kernel  # wraps the attention kernel
    computes: bool = True  # whether the wrapped kernel is ever called
    tiles_held: int | None = None  # tiles of each host or disk tape that are in memory; None: all
    visits: int | None = None  # visits at either end of a walk that are made; None: all
    cache_place: str | None = None  # of K and V of prompts, as all layers would have it; None: as these layers do


class Model(nn.Module):
    """A decoder that runs by a Plan over a mesh. Made by `ithaca.apply`; every call is collective."""

    def __init__(self, source: ModelSource, plan: Plan, mesh: Mesh, substitutes: Substitutes):
        super().__init__()
        spec = source.spec
        self.source, self.plan, self.mesh = source, plan.settled_for(spec), mesh
        self.plan.placement(spec.layers)  # raises the Plan's mistakes before anything is made
        self.dtype = source.compute_dtype(mesh.device)
        chosen = choose_kernel(plan.kernel, mesh.device, self.dtype, spec.head_size, substitutes.computes)
        self.kernel = substitutes.kernel(chosen)
        self.visits = substitutes.visits
        self.part = TensorPart(spec, mesh.tensor_rank, mesh.tensor)
        self.decoder = Decoder(self.part.narrow, at_least_fp32(self.dtype))
        self.engine = make_engine(mesh.device)
        segments = Layout(1, 1, mesh.ulysses, mesh.ring).runs
        self.exchange = Ulysses(Group(mesh.ulysses_group), segments) if mesh.ulysses_group else Alone()
        if mesh.tensor > 1 and mesh.ring > 1:
            self.exchange = Reordered(mesh.tensor, segments)
        self.ring = Ring(Group(mesh.ring_group) if mesh.ring_group else None)
        tensor_group = Group(mesh.tensor_group) if mesh.tensor_group else None
        self.tensor = TensorRanks(self.part, TensorSpread(tensor_group)) if tensor_group else None
        self.split = self.part.split if self.tensor else split_heads(spec.heads, spec.kv_heads, mesh.ulysses)
        self.rounds = plan.rounds(HeadSplit.alone(self.part.narrow) if self.tensor else self.split)
        self.reservation = Reservation(
            spec,
            replace(self.plan, kernel=self.kernel.name),
            mesh,
            self.dtype,
            self.engine,
            substitutes.tiles_held,
            outside_inference_mode,
            substitutes.cache_place,
        )
        self._begins_step = True
        self._compiled: set[bool] = set()  # what the kernel is prepared for: documents alone, or rectangles as well
        shard_parameters(self.decoder, mesh, plan.zero, self.dtype)
        self._graphs = graph_passes(self.decoder, mesh, self.dtype, self.kernel.name) if self.plan.cuda_graph else None

    @property
    def spec(self) -> Spec:
        return self.source.spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a Batch (`forward`). Calls as those of other libraries are errors."""
        batch = args[0] if args else kwargs.get("batch")
        unknown = [name for name in kwargs if name not in FORWARD]
        if unknown or not isinstance(batch, Batch):
            raise InputError(f"{f'{unknown[0]}=' if unknown else describe(batch)} was given, but {CALL}")
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if error := missing_attribute("a model of ithaca.apply", name, ELSEWHERE):
            raise error
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Model":  # noqa: ARG002
        """Refuse `.to`, `.half()` and the like: shards would change under FSDP2 and the optimizer, silently."""
        own = torch.empty(0, dtype=at_least_fp32(self.dtype), device=self.mesh.device)
        try:
            changed = fn(own)
        except (RuntimeError, AssertionError):  # a device that is not there
            changed = None
        if changed is None or (changed.dtype, changed.device) != (own.dtype, own.device):
            raise InputError(
                f"this model stays on {own.device} with shards in {str(own.dtype).removeprefix('torch.')}: choose them "
                "before, as ithaca.mesh(device='cuda') and ithaca.load_model(folder, dtype='bfloat16')"
            )
        return self

    @refuse_keywords(
        InputError,
        input_ids="tokens is its name here",
        attention_mask="padding at the end needs no mask, only labels of -100; documents separates documents",
        position_ids="documents separates documents, and positions follow from them",
    )
    def shard(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> Batch:
        """This rank's part of a batch that every rank holds whole.

        tokens     [S] or [B, S] ids
        labels     the same shape, each beside its own token as in Hugging Face (`labels = tokens` learns everything,
                   -100 is not learned): the shift by one happens here
        documents  the same shape; a new id begins a new document, which sees nothing before it. Each row is a document
                   of its own in any case
        """
        return split_batch(tokens, labels, documents, self.mesh, self.spec.vocab, self.reservation.layout)

    def rank_batch(self, tokens: Tensor, labels: Tensor, documents: Tensor | None, rows: int) -> RankBatch:
        """This rank's part of a batch of `rows` rows, given only its own rows (parallel/batch.py)."""
        return rank_batch(tokens, labels, documents, rows, self.mesh, self.spec.vocab, self.reservation.layout)

    def allocate(self, rows: int, tokens: int, say: Callable[[str], None] = lambda _: None) -> None:
        """Allocate the tapes for passes over `rows` sequences of `tokens` tokens before training begins.

        Otherwise the first pass does. `say` is called with the progress. Raises an error while a pass waits for its
        backward.
        """
        pass_tokens = self._pass_tokens(rows, tokens)
        self._compile(pass_tokens, say)
        self.reservation.allocate(pass_tokens, True, say=say)

    def _compile(self, tokens: int, say: Callable[[str], None]) -> None:
        """Compile the attention kernel, or load what an earlier run compiled; one rank of a node before the others."""
        facts = KERNEL_FACTS.get(self.kernel.name)  # None: a kernel of the user's own
        if facts is None or not facts.compiles:
            return
        layout = self.reservation.layout(tokens)
        rectangles = layout.ring > 1 or layout.chunks.count > 1
        if rectangles in self._compiled:
            return
        rank, size = self.mesh.context_rank % self.mesh.ulysses, self.spec.head_size
        heads = {(len(split.q[rank]), len(split.kv[rank])) for group in self.rounds for split in group if split.q[rank]}
        say(f"Compiling attention kernel {self.kernel.name}, or loading it from its cache")

        def work() -> None:
            for query_heads, kv_heads in sorted(heads):
                self.kernel.prepare(self.mesh.device, self.dtype, query_heads, kv_heads, size, rectangles)

        ratios = sorted({query_heads // kv_heads for query_heads, kv_heads in heads})
        first_then_others(self.mesh.group, (ratios, size, str(self.dtype)), work)
        self._compiled |= {rectangles, False}

    def check_memory(self, rows: int, tokens: int) -> None:
        """Raise the error that `allocate` would raise if memory is short, without allocating."""
        self.reservation.check_memory(self._pass_tokens(rows, tokens))

    def host_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of this node's memory that tapes for such passes take, those of all its ranks together."""
        return self.reservation.host_bytes(self._pass_tokens(rows, tokens))

    def reserve(self, rows: int, tokens: int, say: Callable[[str], None] = lambda _: None) -> None:
        """The old name of `allocate`."""
        warnings.warn("model.reserve is now model.allocate: the old name still works", stacklevel=2)
        self.allocate(rows, tokens, say)

    def check_room(self, rows: int, tokens: int) -> None:
        """The old name of `check_memory`."""
        warnings.warn("model.check_room is now model.check_memory: the old name still works", stacklevel=2)
        self.check_memory(rows, tokens)

    def _pass_tokens(self, rows: int, tokens: int) -> int:
        """Tokens of a pass on the ranks that share this one's sequences."""
        same_everywhere(self.mesh.group, "number of rows or tokens", (rows, tokens))
        for name, number in (("rows", rows), ("tokens", tokens)):
            if type(number) is not int or number < 1:
                raise InputError(f"{name} must be a number, 1 or more; it is {number}")
        return max(len(batch_range(rows, self.mesh.data_rank, self.mesh.data_ranks)), 1) * tokens

    def describe_ranks(self) -> list[str]:
        """Which ranks share a sequence, and how; nothing if each has its own."""
        if self.mesh.context_ranks == 1:
            return []
        share = describe_share(self.split, self.mesh.ring, "tensor" if self.tensor else "ulysses")
        return [share, *describe_crossing(self.mesh, self.plan.entry.ring)]

    def describe_tapes(self) -> list[str]:
        """Where saved tensors live; nothing if the Plan needs no tapes."""
        return self.reservation.describe()

    def forward(
        self, batch: Batch, valid_tokens: int | None = None, last: bool = True, marks: StepMarks | None = None
    ) -> Tensor:
        """The mean cross-entropy over the valid tokens of all ranks: the same number on each of them.

        With several micro-batches in an optimizer step, give the step's `valid_tokens` (the sum over its batches), so
        that their losses and gradients add up to those of one large batch, and `last=False` for all but the last:
        ZeRO-1 and 2 then keep gathered weights, and ZeRO-1 unreduced gradients, until it comes (`model.zero_grad()`
        discards those; an optimizer's does not reach them).

        A batch without a valid token has no mean: that is an InputError (`batch.valid_tokens` is the count). As one of
        several micro-batches it is allowed, and its loss and gradients are 0.

        `marks` collects the progress of the pass (schedule/marks.py).
        """
        valid = batch.valid_tokens if valid_tokens is None else valid_tokens
        context = self.begin_pass(batch, torch.is_grad_enabled(), valid, marks=marks)
        prepare_pass(self.decoder, self.plan.zero, self._begins_step, last)
        self._begins_step = last
        with outside_inference_mode():
            loss = total(self._loss_sum(batch, context), self.mesh)
            if not torch.is_grad_enabled():
                free_gathered(self.decoder)
        return loss / valid

    def _loss_sum(self, batch: Batch, context: ForwardContext) -> Tensor:
        if self._graphs and torch.is_grad_enabled() and self._graphs.serve(batch):
            return self._graphs.loss_sum(batch, context)
        return self.decoder(partial(loss_sum, batch=batch, context=context))

    def _drop_graph(self) -> None:
        """Free the memory of the CUDA graph for other passes. The next training pass captures anew."""
        if self._graphs:
            self._graphs.drop()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Launch operations one by one in the body, whatever `plan.cuda_graph` says, so that a profiler sees them."""
        self._drop_graph()
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """[n], the cross-entropy of each of this rank's tokens in at least fp32; 0 where the token has no label.

        No gradients, and nothing is saved for them. The tapes of training passes of the same size are used, if free.
        """
        context = self.begin_pass(batch, False, valid=1)
        free_gathered(self.decoder)  # an optimizer step may have made gathered copies stale
        with outside_inference_mode():
            found = self.decoder(partial(losses, batch=batch, context=context))
            free_gathered(self.decoder)
        return found

    @torch.no_grad()
    def logits(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """[S, vocabulary] or [B, S, vocabulary], the same on every rank. For small inputs: all logits exist at once."""
        batch = whole_batch(tokens, documents, self.mesh, self.spec.vocab, self.reservation.layout)
        context = self.begin_pass(batch, False, valid=1, shorten=True)
        free_gathered(self.decoder)  # an optimizer step may have made gathered copies stale
        with outside_inference_mode():
            flat = self.decoder(partial(logits, batch=batch, context=context))
            free_gathered(self.decoder)
            if self.mesh.context_group:
                flat = gather_tokens(flat, batch.layout, self.mesh.context_group)
        return flat.view(*torch.as_tensor(tokens).shape, -1)

    def read_prompts(self, tokens: Tensor, documents: Tensor | None = None) -> Prompts:
        """Prompts whose K and V are kept, so that tokens can be added to them (schedule/decode.py).

        Each row of `tokens`, [S] or [B, S], is a prompt, and each data rank reads some of them. A new token sees the
        last document of its row. The prompts' memory is used again by the next ones; `free_prompts` frees it.
        """
        self._drop_graph()
        return read_prompts(self, tokens, documents)

    def greedy_decode(self, tokens: Tensor, count: int, documents: Tensor | None = None) -> Tensor:
        """[count] or [B, count] on the CPU, the same on every rank: the likeliest tokens after each prompt.

        For short answers to long prompts. There is no end token: `count` tokens are computed in any case.
        """
        self._drop_graph()
        return greedy_decode(self, tokens, count, documents)

    def free_prompts(self) -> None:
        """Free the memory of the last prompts."""
        self.reservation.free_cache()

    def check_prompts(self, tokens: int) -> None:
        """Raise the error that `read_prompts` would raise if memory is short, for passes of this many tokens."""
        check_decoding(self.mesh)
        self.reservation.check_cache(tokens)

    def free_tapes(self) -> None:
        """Free all tapes, those of training too. The next pass allocates its own again."""
        self._drop_graph()
        self.reservation.free_tapes()

    def begin_pass(
        self, batch: Batch, training: bool, valid: int, shorten: bool = False, marks: StepMarks | None = None
    ) -> ForwardContext:
        """Check that every rank has the same batch and divides by the same number, and begin a pass over it."""
        reservation, tokens = self.reservation, batch.layout.tokens
        self._compile(tokens, lambda _: None)
        needed = bool(reservation.specs(training))
        missing = needed and reservation.find(tokens, training, shorten) is None
        busy = training and reservation.busy
        layout = reservation.layout(tokens)
        # One rank alone has its tokens in order under every layout
        foreign = batch.layout != layout and max(batch.layout.ranks, layout.ranks) > 1
        any_missing, any_busy, any_foreign, some, others = same_batch(
            self.mesh.group, (batch.fingerprint, count_valid(valid)), missing, busy, foreign, training, not training
        )
        if count_valid(valid) == 0:
            raise InputError(describe_no_mean(batch, valid))
        if any_foreign:
            raise InputError("the batch was cut for another Plan or mesh: let the `shard` of this model cut it")
        if some and others:
            raise InputError(
                "some ranks want gradients of this pass and others do not: use torch.no_grad() on all or none"
            )
        if any_busy:
            raise InputError(BUSY)
        if any_missing:
            reservation.allocate(tokens, training, shorten)
        tapes = reservation.find(tokens, training, shorten) if needed else None
        return ForwardContext(
            plan=self.plan,
            kernel=self.kernel,
            layout=layout,
            exchange=self.exchange,
            ring=self.ring,
            rounds=self.rounds,
            tapes=tapes.begin(training) if tapes else None,
            visits=self.visits,
            mark=marks.begin_pass(partial(self._pass_work, layout, batch.bounds)) if marks else no_mark,
            tensor=self.tensor,
        )

    def _pass_work(self, layout: Layout, bounds: tuple[int, ...]) -> PassWork:
        axes = Axes(ring=self.mesh.ring, ulysses=self.mesh.ulysses, tensor=self.mesh.tensor)
        lengths = tuple(end - start for start, end in pairwise(bounds))
        job = Job(spec=self.spec, plan=self.plan, tokens=bounds[-1], axes=axes, documents=lengths)
        return pass_work(job, layout, bounds)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, never the gathered copies that ZeRO-1 and 2 keep for a while."""
        free_gathered(self.decoder)
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that ZeRO-1 has not reduced yet."""
        super().zero_grad(set_to_none)
        discard_unreduced(self.decoder)


FORWARD = inspect.signature(Model.forward).parameters
