"""A frozen copy of the training state in host memory, taken while training continues.

A CUDA stream copies the tensors on the GPU. A thread copies those in host memory: all of them on a CPU, the moments if
the optimizer keeps them there. Both run under the forward and backward pass of the next step, which only read the
weights. The optimizer, which writes them, waits (`before_update`). The copies share one slab of host memory, as large
as the shards and their moments; the thread allocates it while the first steps run.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from ithaca.assemble import Model
from ithaca.optimizer.host_adamw import MOMENTS
from ithaca.parallel.mesh import host_mesh
from ithaca.parallel.sharding import host_twin, shards
from ithaca.tape.slab import Slab, whole_pages

WEIGHT = "weight/"  # the prefix of weights; each moment has its own name for one


def training_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, DTensor]:
    """Return the weights and AdamW's two moments by name, as they live on the ranks."""
    state: dict[str, DTensor] = {}
    for name, parameter in shards(model.decoder):
        state[f"{WEIGHT}{name}"] = parameter
        if parameter in optimizer.state:
            for moment in MOMENTS:
                state[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    return state


def local_bytes(state: dict[str, DTensor]) -> int:
    """Return the bytes that a copy of this rank's shards takes."""
    return sum(whole_pages(tensor.to_local().nbytes) for tensor in state.values())


class Snapshot:
    """Host copies of a state's shards: `take` begins to copy, `finished` waits and returns the copies."""

    def __init__(self, state: dict[str, DTensor]):
        self._state = state
        self._device = next(iter(state.values())).to_local().device  # a weight's
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            self._stream, self._done = torch.cuda.Stream(self._device), torch.cuda.Event()
        hosted = {name for name, tensor in state.items() if tensor.to_local().device.type == "cpu"}
        self._by_thread, self._by_stream = sorted(hosted), sorted(state.keys() - hosted)
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._allocated = self._thread.submit(self._allocate)
        self._hosted: Future[None] | None = None

    def take(self) -> None:
        """Begin to copy the state as it is after the work queued on the current stream."""
        self._allocated.result()
        if self._cuda:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._copy(self._by_stream)
                self._done.record(self._stream)
        self._hosted = self._thread.submit(self._copy, self._by_thread)

    def before_update(self) -> None:
        """Make the current stream, and the CPU, wait until the copy has read the state."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        if self._hosted:
            self._hosted.result()

    @contextmanager
    def finished(self) -> Iterator[dict[str, DTensor]]:
        """Wait for the copies, in any thread, and return them.

        In the body the thread's current stream is the snapshot's own, which is idle: DCP synchronizes with the current
        stream for each tensor, and would otherwise wait for the training's kernels.
        """
        assert self._hosted
        self._hosted.result()
        if not self._cuda:
            yield self._copies
            return
        self._done.synchronize()
        with torch.cuda.stream(self._stream):
            yield self._copies

    def close(self) -> None:
        """Wait for the copy, and unregister the slab with the driver before its memory is freed."""
        self._thread.shutdown()
        if self._cuda:
            self._done.synchronize()
        if not self._allocated.exception():
            self._allocated.result().close()

    def _allocate(self) -> Slab:
        slab = Slab([tensor.to_local().nbytes for tensor in self._state.values()], self._device, lambda _: None)
        mesh = host_mesh(next(iter(self._state.values())).device_mesh)
        named = zip(self._state.items(), slab.parts, strict=True)
        self._copies = {name: host_twin(tensor, part, mesh) for (name, tensor), part in named}
        return slab

    @torch.no_grad()
    def _copy(self, names: list[str]) -> None:
        for name in names:
            self._copies[name].to_local().copy_(self._state[name].to_local(), non_blocking=True)
