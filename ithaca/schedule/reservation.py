"""The tapes of a model, allocated for a number of tokens and reused by every pass over the same number.

Training passes have tapes of their own; a pass without gradients also uses these, if they are free.
All calls are collective: ranks agree before one of them allocates, so that too little memory on one rank is an error on
all of them and not a hang.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from ithaca.base.errors import InputError, PlanError
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Spec
from ithaca.parallel.agree import least, on_this_node, together
from ithaca.parallel.layout import Layout
from ithaca.parallel.mesh import Mesh
from ithaca.plans.plan import Plan
from ithaca.schedule.decode_cost import cache_place, cache_tapes
from ithaca.schedule.job import Job
from ithaca.schedule.memory_check import NodeTapes, check_cache, check_memory, describe_tapes, free_device_memory
from ithaca.schedule.sweep.rebuild import rebuilds_of
from ithaca.schedule.tapes import Tapes
from ithaca.tape.engine import Engine
from ithaca.tape.file import shares
from ithaca.tape.spec import TapeSpec, disk_bytes, host_bytes

BUSY = (
    "a second forward pass began before the backward pass of the first, whose tapes it would overwrite: "
    "call backward, or drop the loss, or use torch.no_grad() where no gradient is wanted"
)


class Reservation:
    """Tapes for passes of one Plan on one rank."""

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        mesh: Mesh,
        dtype: torch.dtype,
        engine: Engine,
        tiles_held: int | None,
        outside_inference: Callable[[], AbstractContextManager[None]],
        place: str | None = None,
    ):
        """`tiles_held`: tiles of each host or disk tape in memory, in a rehearsal of memory; None: all.

        `place`: of the K/V cache; None: as `cache_place` says.
        """
        self._place = place
        self._spec, self._plan, self._mesh, self._dtype, self._engine = spec, plan, mesh, dtype, engine
        self._axes = mesh.axes
        self._tiles_held, self._outside_inference = tiles_held, outside_inference
        self._tapes: dict[bool, Tapes] = {}  # for training passes, and for passes without gradients
        self._cache: tuple[TapeSpec, Tapes] | None = None

    def job(self, tokens: int) -> Job:
        """This rank's part of a pass over this many tokens of the ranks that share a sequence."""
        rank = self._mesh.head_rank
        axes, itemsize = self._axes, self._dtype.itemsize
        return Job(spec=self._spec, plan=self._plan, tokens=tokens, axes=axes, itemsize=itemsize, rank=rank)

    def layout(self, tokens: int, shorten: bool = True) -> Layout:
        """Which tokens each rank holds. Without `shorten`, a chunk longer than the sequence is an error."""
        return self.job(tokens).costs.layout(self._plan, self._axes, tokens, shorten)

    def specs(self, training: bool) -> list[TapeSpec]:
        """The tapes that a pass needs."""
        return [tape for tape in self.job(1).tapes if training or not tape.training]

    def find(self, tokens: int, training: bool, shorten: bool = False) -> Tapes | None:
        """Allocated tapes that fit such a pass and are not in use; None if there are none."""
        candidates = [self._tapes.get(True)]
        if not training:
            candidates = [tapes for tapes in candidates if tapes and not tapes.busy] + [self._tapes.get(False)]
        try:
            tiles = self._tiles(tokens, shorten)
        except PlanError:
            return None  # this rank's tokens cannot be cut so: `allocate` raises the error on all ranks
        return next((tapes for tapes in candidates if tapes and tapes.tiles == tiles), None)

    @property
    def busy(self) -> bool:
        """Whether a pass waits for its backward pass."""
        return True in self._tapes and self._tapes[True].busy

    def allocate(
        self, tokens: int, training: bool, shorten: bool = False, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Allocate tapes for such passes and free the earlier ones; `say` is called with the progress."""
        specs, before = self.specs(training), self._tapes.get(training)

        def check() -> Tiles:
            if before and before.busy:
                raise InputError(BUSY)
            return self._tiles(tokens, shorten)

        tiles = together(self._mesh.group, check)
        if before:
            self._tapes.pop(training).close()
        if not specs:
            return
        self._check(tokens, specs)
        rebuilds = rebuilds_of(self._plan, self._spec) if training else {}
        with self._outside_inference():
            self._tapes[training] = together(
                self._mesh.group,
                lambda: Tapes(
                    specs, rebuilds, tiles, self._dtype, self._engine, say, self._tiles_held, self._plan.folders
                ),
            )

    def cache(self, tokens: int) -> Tapes:
        """Tapes for K and V of all layers, reused for the next prompts of as many tokens. Collective."""
        job = self.job(tokens)
        if self._cache and self._cache[1].tiles == job.tiles:
            return self._cache[1]
        self.free_cache()
        spec = self.check_cache(tokens)
        with self._outside_inference():
            make = partial(Tapes, [spec], {}, job.tiles, self._dtype, self._engine, lambda _: None, self._tiles_held)
            self._cache = spec, together(self._mesh.group, make)
        return self._cache[1]

    def check_cache(self, tokens: int) -> TapeSpec:
        """Return the tapes for K and V of all layers, or raise the error that `cache` would raise. Collective."""
        job = self.job(tokens)
        spec = cache_tapes(job, self._cache_place(job))
        hosted = host_bytes([spec], job.tiles, self._mesh.gpu) if self._tiles_held is None else 0
        node = NodeTapes(*on_this_node(self._mesh.group, hosted))
        together(self._mesh.group, lambda: check_cache(job, [spec], self._mesh.device, node))
        return spec

    def free_cache(self) -> None:
        """Free the tapes of the last prompts."""
        if self._cache:
            self._cache[1].close()
        self._cache = None

    def free_tapes(self) -> None:
        """Free all tapes that no pass waits for; the next pass allocates its own again."""
        self.free_cache()
        for training in [training for training, tapes in self._tapes.items() if not tapes.busy]:
            self._tapes.pop(training).close()

    def _cache_place(self, job: Job) -> str:
        """Where K and V of all layers live: on a GPU as `cache_place` says, if there is room now, else on its host."""
        if self._place or not self._mesh.gpu:
            return self._place or "device"
        needed = cache_tapes(job, "device").bytes_of(job.tiles.length)
        free = least(self._mesh.group, free_device_memory(self._mesh.device))[0]
        return cache_place(job) if needed <= free else "host"

    def check_memory(self, tokens: int) -> None:
        """Raise the error that `allocate` would raise if memory is short, without allocating."""
        together(self._mesh.group, lambda: self._tiles(tokens, shorten=False))
        if specs := self.specs(True):
            self._check(tokens, specs)

    def host_bytes(self, tokens: int) -> int:
        """Bytes of this node's memory that tapes for such passes take, those of all its ranks together."""
        tiles = together(self._mesh.group, lambda: self._tiles(tokens, shorten=False))
        return on_this_node(self._mesh.group, host_bytes(self.specs(True), tiles, self._mesh.gpu))[0]

    def describe(self) -> list[str]:
        """Where saved tensors live, in lines; nothing if there are no tapes."""
        tapes = self._tapes.get(True)
        return describe_tapes(self.job(tapes.tiles.length * self._mesh.context_ranks)) if tapes else []

    def _tiles(self, tokens: int, shorten: bool) -> Tiles:
        layout = self.layout(tokens, shorten)
        return self.job(tokens).costs.tiles(self._plan, layout)

    def _check(self, tokens: int, specs: list[TapeSpec]) -> None:
        """Raise an error, on all ranks, if one of them has no room for these tapes."""
        job, group = self.job(tokens), self._mesh.group
        hosted, on_disk = 0, 0
        if self._tiles_held is None:
            hosted, on_disk = host_bytes(specs, job.tiles, self._mesh.gpu), disk_bytes(specs, job.tiles)
        memory, ranks = on_this_node(group, hosted)
        folders = len(self._plan.folders)
        parts = shares(on_disk, folders) if folders else []
        node = NodeTapes(memory, ranks, tuple(on_this_node(group, part)[0] for part in parts))
        together(group, lambda: check_memory(job, specs, self._mesh.device, node))
