"""A frozen copy of the training state in host memory, taken while training goes on.

On a GPU the copy runs on a stream of its own, under the next step's forward and backward pass: they read the weights,
only the optimizer writes them, and it waits (`before_update`). The copies share one slab of host memory, exactly as
large as the shards and their states, allocated and registered with the driver (0.7 s per GiB) by a thread while the
first steps run. torch's own pinned allocator would round each tensor up to a power of two.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ithaca.assemble import Model
from ithaca.parallel.sharding import shards

ALIGNMENT = 512


def training_state(model: Model, optimizer: torch.optim.Optimizer | None) -> dict[str, DTensor]:
    """The weights and, with an optimizer, AdamW's two moments by name, as they live on the ranks."""
    state: dict[str, DTensor] = {}
    for name, parameter in shards(model.decoder):
        state[f"weight/{name}"] = parameter
        if optimizer and parameter in optimizer.state:
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    return state


def local_bytes(state: dict[str, DTensor]) -> int:
    """What a copy of this rank's part takes."""
    return sum(_aligned(tensor.to_local().nbytes) for tensor in state.values())


class Snapshot:
    """Host copies of a state's shards; `take` begins a copy, `finish` waits for it and gives the copies."""

    def __init__(self, state: dict[str, DTensor]):
        self._state = state
        some = next(iter(state.values()))
        self._device = some.to_local().device
        self._cuda = self._device.type == "cuda"
        self._mesh = some.device_mesh
        if self._cuda:  # the same ranks, for tensors in host memory
            self._mesh = DeviceMesh("cpu", some.device_mesh.mesh.cpu(), mesh_dim_names=some.device_mesh.mesh_dim_names)
            self._stream, self._done = torch.cuda.Stream(self._device), torch.cuda.Event()
        self._slab: Tensor | None = None
        self._allocation = threading.Thread(target=self._allocate, daemon=True)
        self._allocation.start()

    def take(self) -> None:
        """Begin to copy the state as the current stream leaves it."""
        self._allocation.join()
        if not self._cuda:
            self._copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy()
            self._done.record(self._stream)

    def before_update(self) -> None:
        """Hold the current stream until the copy has read what an update is about to change."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    @contextmanager
    def finished(self) -> Iterator[dict[str, DTensor]]:
        """Wait, on the host and in any thread, for the copy, and give it.

        Within, the thread's current stream is the snapshot's idle one: DCP synchronizes with the current stream once a
        tensor, and would otherwise wait for the training's kernels each time.
        """
        if not self._cuda:
            yield self._copies
            return
        self._done.synchronize()
        with torch.cuda.stream(self._stream):
            yield self._copies

    def close(self) -> None:
        """Let the driver forget the slab before its memory goes."""
        self._allocation.join()
        if self._cuda and self._slab is not None:
            torch.cuda.cudart().cudaHostUnregister(self._slab.data_ptr())  # pyrefly: ignore
            self._slab = None

    def _allocate(self) -> None:
        slab = torch.empty(local_bytes(self._state), dtype=torch.uint8)
        if self._cuda:
            with torch.cuda.device(self._device):
                code = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0)  # pyrefly: ignore
            assert code == 0, f"the driver does not register {slab.nbytes} bytes of host memory (code {code})"
        start, self._copies = 0, {}
        for name, tensor in self._state.items():
            size = tensor.to_local().nbytes
            self._copies[name] = self._view(slab[start : start + size], tensor)
            start += _aligned(size)
        self._slab = slab

    def _view(self, part: Tensor, tensor: DTensor) -> DTensor:
        local = part.view(tensor.dtype).view(tensor.to_local().shape)
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(local, self._mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def _copy(self) -> None:
        for name, tensor in self._state.items():
            self._copies[name].to_local().copy_(tensor.to_local(), non_blocking=True)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
