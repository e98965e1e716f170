"""How long a step takes, by part, in closed form: FLOPs over what kernels reach, bytes over what links carry.

Of a rank, for one sequence of S tokens over C × R ranks. With F = 2 · L · Hq · D · S FLOPs a token for causal attention
forward (half of the square) and N_b parameters a block:

    attention    F forward, 2.5 F backward, F once more where a block or its attention is run again; the rank with most
                 heads is waited for. A walk over tiles also merges: o and dq in fp32, read and written at each visit
    linear       2 L N_b forward, 4 backward, and what is run again; 6 · vocabulary · hidden for the loss; and what
                 norms, gates, rope and residuals read and write
    exchange     what plans/traffic.py says, by link; `sweep` and travelling K and V hide it (meshes.py)
    copies       host tapes, each written and read once, over the link to the host, those on disk over the disk's:
                 hidden behind the rest
    weights      gathered for each pass and reduced in fp32 over all ranks: hidden behind all but the shortest blocks
    optimizer    reads and writes of 28 bytes a parameter of the shard, or of moments through the link to the host

Three shares were measured on the H200: heads of up to 64 features run slower; so does one call over a whole sequence
than a walk over tiles; and what lies between a block's products, gathering and reducing its weights included, adds to
them. Left out: padding, documents.
"""

from dataclasses import dataclass

from ithaca.model.spec import Spec
from ithaca.planner.hardware import Gpu
from ithaca.planner.machine import Machine
from ithaca.planner.meshes import Choice, weigh
from ithaca.plans.places import RECOMPUTE
from ithaca.plans.plan import Plan
from ithaca.plans.tape_specs import has_room_for_x
from ithaca.schedule.sweep.rebuild import rebuild_passes

NARROW_HEADS = {"forward": 451 / 589, "backward": 419 / 516}  # head size 64 against 128, measured on an H200
ONE_CALL = 522 / 589  # forward, a sequence of 512K at once against tiles of 64K
BETWEEN = 1.12  # times what products and the bytes beside them take
DISK = 4e9  # bytes a second that a node's disk writes, and reads: assumed
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Seconds:
    """Of one step of one rank."""

    attention_forward: float
    attention_backward: float
    linear: float
    exchange: float
    copies: float
    weights: float
    optimizer: float
    step: float

    @property
    def computing(self) -> float:
        return self.attention_forward + self.attention_backward + self.linear


def predict_seconds(
    spec: Spec,
    plan: Plan,
    gpu: Gpu,
    machine: Machine,
    tokens: int,
    ulysses: int,
    ring: int = 1,
    attended: int | None = None,
) -> Seconds:
    """`attended`: the length of each of several sequences that are `tokens` together."""
    plan = plan.settled()
    sharing = ulysses * ring
    local, mesh = -(-tokens // sharing), weigh(spec, plan, machine, tokens, ulysses, ring)
    uneven = max(map(len, mesh.split.q)) * ulysses / spec.heads
    forward = 2 * spec.layers * spec.heads * spec.head_size * (attended or tokens) * local * uneven
    share = dict(NARROW_HEADS) if spec.head_size <= 64 else dict.fromkeys(NARROW_HEADS, 1.0)
    share["forward"] *= 1.0 if plan.sweeps else ONE_CALL
    again = _attention_again(spec, plan)
    merging = _merged_bytes(spec, mesh) * local * uneven / gpu.bandwidth if plan.sweeps else 0.0
    parts = {
        "attention_forward": (1 + again) * (forward / (gpu.attention_forward * share["forward"]) + merging),
        "attention_backward": 2.5 * forward / (gpu.attention_backward * share["backward"]) + merging,
        "linear": BETWEEN * local * (_linear_flops(spec, plan) / gpu.matmul + _moved_bytes(spec, plan) / gpu.bandwidth),
        "exchange": mesh.exchange,
        "copies": max(
            _copied_bytes(spec, plan, ("host", "disk")) * local / gpu.host,
            _copied_bytes(spec, plan, ("disk",)) * local * machine.gpus / DISK,
        ),
        "weights": _weights(spec, plan, machine),
        "optimizer": _optimizer(spec, plan, gpu, machine),
    }
    return Seconds(**parts, step=_step(plan, mesh, **parts))


def _step(
    plan: Plan,
    mesh: Choice,
    attention_forward: float,
    attention_backward: float,
    linear: float,
    exchange: float,
    copies: float,
    weights: float,
    optimizer: float,
) -> float:
    computing = attention_forward + attention_backward + linear
    return optimizer + max(mesh.with_exchange(plan, computing), copies, exchange, weights)


def _attention_again(spec: Spec, plan: Plan) -> float:
    """The share of layers whose attention runs a second time."""
    if plan.sweeps:
        return plan.placement(spec.layers).o.count(RECOMPUTE) / spec.layers
    return float(plan.checkpoint not in ("none", "selective"))


def _merged_bytes(spec: Spec, mesh: Choice) -> float:
    """For one token, all layers: at each visit but the first a sum in fp32 is read and written, a part in bf16 read."""
    visits = (mesh.chunks - 1) / 2
    return spec.layers * visits * mesh.ring * spec.heads * spec.head_size * (2 * FP32 + BF16)


def _linear_flops(spec: Spec, plan: Plan) -> float:
    """Of all layers and the loss, for one token."""
    q, kv, hidden, mlp = spec.heads * spec.head_size, spec.kv_heads * spec.head_size, spec.hidden, spec.mlp
    project, mix, feed = hidden * (q + 2 * kv), q * hidden, 3 * hidden * mlp
    block = project + mix + feed
    again = 0.0 if plan.checkpoint == "none" else block - hidden * mlp  # the last product is not run again
    if plan.recipe == "untied":
        again += project  # q, K and V once to attend again, and once for their gradients
    if plan.sweeps:
        again += 2 * hidden * kv  # K and V, for later chunks
        again += rebuild_passes(plan.placement(spec.layers), has_room_for_x(spec)) * (mix + feed) / spec.layers
    return spec.layers * (6 * block + 2 * again) + 6 * spec.vocab * hidden


def _moved_bytes(spec: Spec, plan: Plan) -> float:
    """What is read and written beside the products, for one token: counted in tensors of each width."""
    q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    runs = 2 if plan.checkpoint != "none" else 1  # of the forward pass
    hidden = 8 * runs + 14  # norms, residuals; backward, also of the norms
    heads = 4 * runs + 12  # rope, and packing for the exchange; the same backward
    mlp = 3 * runs + 6
    block = hidden * spec.hidden + heads * (q + 2 * kv) / 2 + mlp * spec.mlp
    return BF16 * (spec.layers * block + 3 * spec.vocab)  # logits are read twice and written once


def _copied_bytes(spec: Spec, plan: Plan, places: tuple[str, ...]) -> float:
    """To there or from there, for one token: each direction has a link of its own, so the larger counts."""
    placement = plan.placement(spec.layers)
    hosted = sum(map(placement.x.count, places)) * spec.hidden
    if plan.sweeps:
        hosted += sum(map(placement.o.count, places)) * spec.heads * spec.head_size
        hosted += spec.layers * spec.hidden * (plan.residual in places)
    return hosted * BF16


def _weights(spec: Spec, plan: Plan, machine: Machine) -> float:
    """Gathered in bf16 for both passes (under ZeRO-1 and 2 once), reduced in fp32, over the slower link."""
    if machine.ranks == 1:
        return 0.0
    sent = spec.parameters() * (machine.ranks - 1) / machine.ranks * (BF16 * (2 if plan.zero == 3 else 1) + FP32)
    return sent / (machine.across if machine.nodes > 1 else machine.inside)


def _optimizer(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine) -> float:
    """Weights, gradients and moments are read, weights and moments written; all in fp32."""
    shard = spec.parameters() / machine.ranks
    if plan.optimizer == "host":
        return 8 * shard / gpu.host
    return 28 * shard / gpu.bandwidth
