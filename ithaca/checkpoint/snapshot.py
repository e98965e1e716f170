"""A frozen copy of the training state in host memory, taken while training continues.

A CUDA stream copies the tensors on the GPU. A thread copies those in host memory: all of them on a CPU, the moments if
the optimizer keeps them there. Both run under the forward and backward pass of the next step, which only read the
weights. The optimizer, which writes them, waits (`before_update`). The copies share one slab of host memory, as large
as the shards and their moments; the thread allocates it while the first steps run.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from ithaca.assemble import Model
from ithaca.checkpoint.shard import Shard
from ithaca.optimizer.host_adamw import MOMENTS
from ithaca.parallel.sharding import shard_place, shards
from ithaca.tape.slab import Slab, whole_pages

WEIGHT = "weight/"  # the prefix of weights; each moment has its own name for one


def training_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Shard]:
    """Return this rank's shards of the weights and of AdamW's two moments by name, as they live on its device."""
    state: dict[str, Shard] = {}
    for (name, weight), (_, parameter) in zip(weight_state(model).items(), shards(model.decoder), strict=True):
        state[name] = weight
        if parameter in optimizer.state:
            for moment in MOMENTS:
                local = optimizer.state[parameter][moment].to_local()
                state[f"{moment}/{name.removeprefix(WEIGHT)}"] = replace(weight, local=local)
    return state


def weight_state(model: Model) -> dict[str, Shard]:
    """Return this rank's shards of the weights alone."""
    shapes, state = dict(model.spec.shapes()), {}
    for name, parameter in shards(model.decoder):
        offsets = tuple(side.start for side in shard_place(name, parameter, model.part, model.mesh))
        state[f"{WEIGHT}{name}"] = Shard(parameter.to_local().detach(), offsets, torch.Size(shapes[name]))
    return state


def local_bytes(state: dict[str, Shard]) -> int:
    """Return the bytes that a copy of this rank's shards takes."""
    return sum(whole_pages(shard.local.nbytes) for shard in state.values())


class Snapshot:
    """Host copies of a state's shards: `take` begins to copy, `finished` waits and returns the copies."""

    def __init__(self, state: dict[str, Shard]):
        self._state = state
        self._device = next(iter(state.values())).local.device  # a weight's
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            self._stream, self._done = torch.cuda.Stream(self._device), torch.cuda.Event()
        hosted = {name for name, shard in state.items() if shard.local.device.type == "cpu"}
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
    def finished(self) -> Iterator[dict[str, Shard]]:
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
        slab = Slab([shard.local.nbytes for shard in self._state.values()], self._device, lambda _: None)
        self._copies = {
            name: replace(shard, local=part.view(shard.dtype).view(shard.local.shape))
            for (name, shard), part in zip(self._state.items(), slab.parts, strict=True)
        }
        return slab

    @torch.no_grad()
    def _copy(self, names: list[str]) -> None:
        for name in names:
            self._copies[name].local.copy_(self._state[name].local, non_blocking=True)
