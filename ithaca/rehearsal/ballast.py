"""What a rank would hold of layers that a rehearsal leaves out, as memory that nobody uses.

Their states (fp32 weights, gradients and, where they are on the device, AdamW's moments, cut over the ranks), what
their tapes take of the device, the block inputs that `whole` keeps there, and the weights that stay gathered under
ZeRO-1 and 2. All of it is held all the time, though within a pass gradients come as the others go.
"""

import math

import torch
from torch import Tensor

from ithaca.assemble import Model
from ithaca.base.errors import PlanError
from ithaca.base.owners import BLOCKS, GATHERED, GRADIENTS, STATES, TAPES
from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.layout import row_range
from ithaca.plans.tape_specs import FP32, TapeSpec, layout_of, tape_specs, tiles_of


def absent_bytes(model: Model, spec: Spec, tokens: int) -> dict[str, int]:
    """What a model of all layers holds on the device that this one, of some of them, does not."""
    absent, plan = spec.layers - model.spec.layers, model.plan
    if absent == 0:
        return {}
    if plan.checkpoint == "none":
        raise PlanError(
            f"checkpoint='none' keeps everything of {absent} layers that --layers {model.spec.layers} leaves out: "
            f"rehearse all {spec.layers}"
        )
    tiles = tiles_of(plan, layout_of(plan, tokens, model.mesh.ulysses, model.mesh.ring, shorten=True))
    asked, there = (tapes_of(model, which) for which in (spec, model.spec))
    block = absent * _block_part(model, spec)
    gathered = absent * sum(map(math.prod, spec.block_shapes().values())) * model.dtype.itemsize
    return {
        STATES: block * FP32 * (3 if plan.optimizer == "device" else 1),
        GRADIENTS: block * FP32,
        TAPES: device_tapes(asked, tiles) - device_tapes(there, tiles),
        BLOCKS: 0 if plan.sweeps else _kept_by_whole(model, spec, tiles),
        GATHERED: gathered if plan.zero < 3 else 0,
    }


def hold(sizes: dict[str, int], device: torch.device) -> list[Tensor]:
    """Memory of each owner, whose name a meter finds here."""
    held = []
    for owner, size in sizes.items():  # noqa: B007
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
    return held


def tapes_of(model: Model, spec: Spec) -> list[TapeSpec]:
    """The tapes of a rank of such a job, for a model of these layers."""
    rank, mesh = model.exchange.rank, model.mesh
    mine = Heads(model.split.q[rank], model.split.kv[rank])
    return tape_specs(model.plan, spec, model.dtype.itemsize, mine, mesh.ulysses, mesh.ring)


def device_tapes(asked: list[TapeSpec], tiles: Tiles) -> int:
    return sum(need.bytes_of(tiles.length) for need in asked if need.place == "device")


def _block_part(model: Model, spec: Spec) -> int:
    """Parameters of a block that are this rank's."""
    mesh = model.mesh
    numbers = 0
    for rows, *columns in spec.block_shapes().values():
        width = columns[0] if columns else 1
        numbers += len(row_range(rows, mesh.parameter_rank, mesh.parameter_ranks)) * width
    return numbers


def _kept_by_whole(model: Model, spec: Spec, tiles: Tiles) -> int:
    """x of every layer that has it on the device; o and, of this rank's heads, the log-sum-exp beside it with
    checkpoint selective."""
    places = model.plan.placement(spec.layers).x[model.spec.layers :]
    row = spec.hidden * places.count("device") * model.dtype.itemsize
    if model.plan.checkpoint == "selective":
        o = spec.heads * spec.head_size * model.dtype.itemsize
        lse = len(model.split.q[model.exchange.rank]) * model.mesh.ulysses * at_least_fp32(model.dtype).itemsize
        row += len(places) * (o + lse)
    return tiles.length * row
