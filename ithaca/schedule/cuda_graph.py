"""Passes of one rank as CUDA graphs: the host launches all GPU operations of a pass at once.

A host launches 40,000 to 60,000 operations a second, and a small model has thousands in a pass, each of which keeps the
GPU busy for a few microseconds. So the GPU waits for the host (bench/recipes.py). Here forward and backward are
captured once, by an ordinary pass over inputs that stay in place. Every later pass copies its batch there and replays.

    time      a pass that warms up, and the capture: a second, once; again if a batch has more documents than there is
              room for, or if parameters are replaced or frozen
    memory    a captured pass keeps its memory, so passes without gradients, which are not captured, need more; a second
              copy of the gradients if a step has several passes
    given up  Gradients lie in the graph's memory, which the next forward pass overwrites: a gradient that is kept
              beyond `zero_grad` is lost. A backward pass must come before the next forward pass. Passes over another
              number of tokens are not captured

Documents differ from batch to batch, but the arguments of a captured call are fixed. So the bounds of documents are an
input tensor with room for more documents, and the attention kernel must read it on the GPU (`KernelFacts.replays`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ithaca.attention.documents import MOST_PIECES
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.base.errors import InputError, PlanError
from ithaca.base.torch_private import local_tensor, sharded_like
from ithaca.model.decoder import Decoder
from ithaca.parallel.batch import Batch
from ithaca.parallel.mesh import Mesh
from ithaca.parallel.one_rank import drop_copies, give_gradient, make_leaves
from ithaca.schedule.forward import ForwardContext, loss_sum
from ithaca.schedule.marks import no_mark

FEWEST = 16  # documents that a graph has room for

Work = Callable[[], Sequence[Tensor]]


class Recorder(Protocol):
    """Captures the GPU operations that a function launches. Captures of one recorder share memory."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run the work once before its capture, which compiling kernels, for example, would disturb."""
        ...

    def record(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Capture the work. Return its tensors and a function that computes them again, in place."""
        ...


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace for every stream that it has ever seen."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """Captures CUDA graphs. Other threads go on meanwhile: loaders copy batches, checkpoints are written."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), _capture_stream(torch.cuda.current_device())

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run the work on another stream, as torch's notes on CUDA graphs demand."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = work()
        finally:
            torch.cuda.set_stream(current)  # after a capture that fails, torch would stay on the stream of captures
        return outputs, graph.replay


def graph_passes(decoder: Decoder, mesh: Mesh, dtype: torch.dtype, kernel: str) -> "GraphedPasses":
    """The passes of a decoder as CUDA graphs, or an error if the mesh or the kernel cannot have any."""
    facts, leave = KERNEL_FACTS.get(kernel), "set plan.cuda_graph=false"
    if not mesh.gpu:
        raise PlanError(f"cuda_graph=true needs a CUDA GPU, and the model is on {mesh.device.type}: {leave}")
    if mesh.size > 1:
        raise PlanError(f"cuda_graph=true is for one rank, and the mesh has {mesh.size}: {leave}")
    if facts is None or not facts.replays:
        known = " or ".join(facts.name for facts in KERNEL_FACTS.values() if facts.replays)
        raise PlanError(
            f"cuda_graph=true needs a kernel that reads the bounds of documents on the GPU, {known}, and '{kernel}' "
            f"does not: {leave}, or set plan.kernel"
        )
    return GraphedPasses(decoder, dtype, CudaRecorder)


class GraphedPasses:
    """The training passes of a decoder. The first pass, or the first after `drop`, fixes the number of tokens."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, make_recorder: Callable[[], Recorder]):
        self._decoder, self._dtype, self._make_recorder = decoder, dtype, make_recorder
        self._tokens: int | None = None
        self._graph: _Graph | None = None

    def serve(self, batch: Batch) -> bool:
        """Whether a pass over this batch can be a replay. If nothing is trained, there is no backward pass."""
        trained = any(parameter.requires_grad for parameter in self._decoder.parameters())
        return trained and self._tokens in (None, len(batch.tokens)) and len(batch.bounds) - 1 <= MOST_PIECES

    def loss_sum(self, batch: Batch, context: ForwardContext) -> Tensor:
        """The result of `forward.loss_sum`, computed by a replay."""
        self._tokens, documents = len(batch.tokens), len(batch.bounds) - 1
        # A graph uses the addresses that the weights had when it was captured
        weights = tuple((id(p), local_tensor(p).data_ptr(), p.requires_grad) for p in self._decoder.parameters())
        graph = self._graph
        if graph is None or documents > graph.room or weights != graph.weights:
            self._graph = graph = None  # its memory is for the next one
            graph = self._graph = _Graph(self._decoder, self._dtype, self._make_recorder(), weights, batch, context)
        anchor = torch.zeros((), device=batch.tokens.device, requires_grad=True)
        return _Replayed.apply(anchor, graph, batch)

    def drop(self) -> None:
        """Free the graph and its memory. The next pass captures another one, for its own number of tokens."""
        self._graph = self._tokens = None


class _Graph:
    """One pass, captured. `room`: the most documents that its batches can have."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: torch.dtype,
        recorder: Recorder,
        weights: tuple[Any, ...],
        batch: Batch,
        context: ForwardContext,
    ):
        self.weights, documents = weights, len(batch.bounds) - 1
        self.room = min(max(FEWEST, 1 << (documents - 1).bit_length()), MOST_PIECES)
        self._inputs = [torch.empty_like(tensor) for tensor in _inputs(batch)]
        self._bounds = torch.empty(self.room + 1, dtype=torch.int32, device=batch.tokens.device)
        self._scale: Tensor | None = None
        self._number = 0
        self._fill(batch)
        tokens, labels, positions = self._inputs
        batch = replace(batch, tokens=tokens, labels=labels, positions=positions, bounds=(0, len(tokens)))
        context = replace(context, bounds=self._bounds, mark=no_mark)
        captured = _CapturedPass(decoder, dtype, batch, context)
        try:
            recorder.warm_up(captured.forward_and_backward)
            (self._loss,), self._forward = recorder.record(captured.forward)
            self._scale = captured.scale
            gradients, self._backward = recorder.record(captured.backward)
            self._gradients = [*zip(captured.trained, gradients, strict=True)]
        finally:
            captured.end()  # also after memory ran out: a later pass must not find its weights

    def forward(self, batch: Batch) -> tuple[int, Tensor]:
        """Replay the forward pass for a batch. Return the pass's number and its loss."""
        for parameter, gradient in self._gradients:
            # The gradient of the step's previous pass lies in memory that this pass overwrites
            if parameter.grad is not None and local_tensor(parameter.grad).data_ptr() == gradient.data_ptr():
                parameter.grad = sharded_like(parameter, gradient.clone())
        self._fill(batch)
        self._forward()
        self._number += 1
        return self._number, self._loss.clone()

    def backward(self, number: int, scale: Tensor) -> None:
        """Replay the backward pass of the last forward pass, and give every parameter its gradient."""
        if number != self._number:
            raise InputError(
                "another pass has begun since this loss was computed, and a CUDA graph (plan.cuda_graph=true) keeps "
                "one at a time: call backward before the next pass, or set cuda_graph to false"
            )
        assert self._scale is not None
        self._scale.copy_(scale)
        self._backward()
        for parameter, gradient in self._gradients:
            give_gradient(parameter, gradient)

    def _fill(self, batch: Batch) -> None:
        """Copy a batch to the inputs. The bounds end with empty documents, as many as there is room for."""
        for mine, given in zip(self._inputs, _inputs(batch), strict=True):
            mine.copy_(given, non_blocking=True)
        bounds = torch.full((len(self._bounds),), batch.bounds[-1], dtype=torch.int32)
        bounds[: len(batch.bounds)] = torch.tensor(batch.bounds, dtype=torch.int32)
        bounds = bounds.pin_memory() if self._bounds.is_cuda else bounds
        self._bounds.copy_(bounds, non_blocking=True)


def _inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.tokens, batch.labels, batch.positions


class _CapturedPass:
    """The forward and the backward pass, as functions that a recorder captures."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, batch: Batch, context: ForwardContext):
        self._decoder, self._dtype, self._batch, self._context = decoder, dtype, batch, context
        self._leaves: list[tuple[nn.Parameter, Tensor]] = []
        self._loss: Tensor | None = None
        self.scale: Tensor | None = None
        self.trained: list[nn.Parameter] = []  # parameters that have a gradient, in the order of `backward`

    def forward(self) -> Sequence[Tensor]:
        self._leaves = make_leaves(self._decoder, self._dtype)
        with torch.enable_grad():
            self._loss = self._decoder(lambda decoder: loss_sum(decoder, self._batch, self._context))
        if self.scale is None:
            self.scale = torch.ones_like(self._loss)
        return [self._loss.detach()]

    def backward(self) -> Sequence[Tensor]:
        assert self._loss is not None
        torch.autograd.backward(self._loss, self.scale)
        found = [(parameter, leaf.grad) for parameter, leaf in self._leaves if leaf.grad is not None]
        self.trained = [parameter for parameter, _ in found]
        return [gradient for _, gradient in found]

    def forward_and_backward(self) -> None:
        self.forward()
        self.backward()
        self.end()

    def end(self) -> None:
        """Free the autograd graph and the decoder's copies of weights."""
        self._leaves, self._loss = [], None
        drop_copies(self._decoder)


class _Replayed(torch.autograd.Function):
    """A loss whose backward pass is a replay, too."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph: _Graph, batch: Batch) -> Tensor:  # noqa: ARG004
        ctx.graph = [graph]  # for one backward pass: a loss that is kept must not keep the graph's memory
        ctx.number, loss = graph.forward(batch)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:
        assert ctx.graph, "backward was called twice on one loss"
        ctx.graph.pop().backward(ctx.number, scale)
        return None, None, None
