"""A scene: the rank of a job that a rehearsal runs, with its layers, weights and tokens."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ithaca.base.errors import PlanError
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.plans.plan import Plan
from ithaca.schedule.job import ONE_RANK, Job

WARM = 8  # a step that builds the kernels has one token in this many


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A step to rehearse, of rank 0 of these axes."""

    model: str
    plan: Plan
    tokens: int
    axes: Axes = ONE_RANK
    documents: tuple[int, ...] | None = None  # bounds of the documents in a sequence; None: one document
    layers: int | None = None  # the first ones of the model; None: all
    hold_absent: bool = True  # hold the memory of layers that do not run
    cap: int | None = None  # bytes of the device that may be used
    memory_only: bool = False  # leave out the arithmetic of attention, and hold two tiles of each host tape
    hardware: Path | None = None  # a file of GPUs: rates for the prediction
    bare: bool = False  # time its kernels and products alone as well
    once: bool = False  # one timed step alone, for long steps: no step before it that warms up and is watched
    repeats: int = 1  # timed steps; the median counts
    dtype: str = "auto"  # of the computation

    @property
    def warm_tokens(self) -> int:
        """Tokens of a step that builds the kernels before one that is timed alone: two chunks, or a part of all."""
        chunks = 2 * self.plan.chunk_of(self.tokens, shorten=True) if self.plan.sweeps else 0
        return max(self.tokens // WARM, min(self.tokens, chunks))

    def job(self, spec: Spec, dtype: torch.dtype, kernel: str) -> Job:
        """The rank of the whole job, of which some layers run. `kernel`: the attention kernel that runs."""
        return Job(
            spec=spec,
            plan=replace(self.plan.first_layers(spec.layers), kernel=kernel),
            tokens=self.tokens,
            documents=tuple(stop - start for start, stop in pairwise(self.documents)) if self.documents else None,
            axes=self.axes,
            itemsize=dtype.itemsize,
            rank=0,
            layers_run=self.layers,
        )


def held_spec(scene: Scene) -> Spec:
    """The model whose memory is held: with all its layers, or with those that run."""
    spec = read_spec(find_config(scene.model)[0])
    return spec if scene.hold_absent or scene.layers is None else spec.with_layers(min(scene.layers, spec.layers))


def scene_source(scene: Scene, spec: Spec) -> ModelSource:
    layers = spec.layers if scene.layers is None else scene.layers
    if not 1 <= layers <= spec.layers:
        raise PlanError(
            f"--layers {layers} cannot be rehearsed: the model has {spec.layers}, so 1 to {spec.layers} can"
        )
    if scene.hold_absent:
        scene.plan.placement(spec.layers)  # raises what is wrong for the whole model, whatever --layers is
    some = spec.with_layers(layers)
    return ModelSource(some, {}, RandomWeights(some, 0), scene.dtype, None)


def scene_tokens(scene: Scene, spec: Spec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random tokens, labels and the ids of their documents, as `Model.shard` takes them."""
    rows = scene.axes.shard, scene.tokens
    tokens = torch.randint(0, spec.vocab, rows, generator=torch.Generator().manual_seed(0))
    if scene.documents is None:
        return tokens, tokens, None
    lengths = torch.tensor(scene.documents).diff()
    return tokens, tokens, torch.arange(len(lengths)).repeat_interleave(lengths).expand(rows)
