"""How long a step takes, by part, in closed form: FLOPs over what kernels reach, bytes over what links carry.

Of a rank, for one sequence of S tokens over C × R ranks. With F = 2 · L · Hq · D · S FLOPs a token for causal attention
forward (half of the square) and N_b parameters a block:

    attention    F forward, 2.5 F backward, F once more where a block or its attention is run again; the rank with most
                 heads is waited for
    linear       2 L N_b forward, 4 backward, and what is run again; 6 · vocabulary · hidden for the loss
    exchange     what plans/traffic.py says, by link; `sweep` and travelling K and V hide it (meshes.py)
    copies       host tapes, each written and read once, over the link to the host: hidden behind the rest
    optimizer    reads and writes of 28 bytes a parameter of the shard, or of moments through the link to the host

Heads of up to 64 features run slower, by the share that was measured on the H200. Left out: padding, documents, launch
gaps, the gathering of parameters, which hides behind all but the shortest blocks.
"""

from dataclasses import dataclass

from ithaca.model.spec import Spec
from ithaca.planner.hardware import Gpu
from ithaca.planner.machine import Machine
from ithaca.planner.meshes import Choice, weigh
from ithaca.plans.needs import has_room_for_x
from ithaca.plans.places import RECOMPUTE
from ithaca.plans.plan import Plan
from ithaca.plans.rebuild import rebuild_passes

NARROW_HEADS = {"forward": 451 / 589, "backward": 419 / 516}  # head size 64 against 128, measured on an H200
BF16 = 2


@dataclass(frozen=True)
class Seconds:
    """Of one step of one rank."""

    attention_forward: float
    attention_backward: float
    linear: float
    exchange: float
    copies: float
    optimizer: float
    step: float

    @property
    def computing(self) -> float:
        return self.attention_forward + self.attention_backward + self.linear


def predict_seconds(
    spec: Spec, plan: Plan, gpu: Gpu, machine: Machine, tokens: int, ulysses: int, ring: int = 1
) -> Seconds:
    plan = plan.settled()
    sharing = ulysses * ring
    local, mesh = -(-tokens // sharing), weigh(spec, plan, machine, tokens, ulysses, ring)
    uneven = max(map(len, mesh.share.q)) * ulysses / spec.heads
    forward = 2 * spec.layers * spec.heads * spec.head_size * tokens * local * uneven
    narrow = NARROW_HEADS if spec.head_size <= 64 else dict.fromkeys(NARROW_HEADS, 1.0)
    again = _attention_again(spec, plan)
    parts = {
        "attention_forward": (1 + again) * forward / (gpu.attention_forward * narrow["forward"]),
        "attention_backward": 2.5 * forward / (gpu.attention_backward * narrow["backward"]),
        "linear": _linear_flops(spec, plan) * local / gpu.matmul,
        "exchange": mesh.exchange,
        "copies": _copied_bytes(spec, plan) * local / gpu.host,
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
    optimizer: float,
) -> float:
    computing = attention_forward + attention_backward + linear
    return optimizer + max(mesh.with_exchange(plan, computing), copies, exchange)


def _attention_again(spec: Spec, plan: Plan) -> float:
    """The share of layers whose attention runs a second time."""
    if plan.sweeps:
        return plan.placement(spec.layers).o.count(RECOMPUTE) / spec.layers
    return float(plan.checkpoint not in ("none", "selective"))


def _linear_flops(spec: Spec, plan: Plan) -> float:
    """Of all layers and the loss, for one token."""
    q, kv, hidden, mlp = spec.heads * spec.head_size, spec.kv_heads * spec.head_size, spec.hidden, spec.mlp
    project, mix, feed = hidden * (q + 2 * kv), q * hidden, 3 * hidden * mlp
    block = project + mix + feed
    again = 0.0 if plan.checkpoint == "none" else block - hidden * mlp  # the last product is not run again
    if plan.sweeps:
        again += 2 * hidden * kv  # K and V, for later chunks
        again += rebuild_passes(plan.placement(spec.layers), has_room_for_x(spec)) * (mix + feed) / spec.layers
    return spec.layers * (6 * block + 2 * again) + 6 * spec.vocab * hidden


def _copied_bytes(spec: Spec, plan: Plan) -> float:
    """To the host or from it, for one token: each direction has a link of its own, so the larger counts."""
    placement = plan.placement(spec.layers)
    hosted = placement.x.count("host") * spec.hidden
    if plan.sweeps:
        hosted += placement.o.count("host") * spec.heads * spec.head_size
        hosted += spec.layers * spec.hidden * (plan.gradient == "host")
    return hosted * BF16


def _optimizer(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine) -> float:
    """Weights, gradients and moments are read, weights and moments written; all in fp32."""
    shard = spec.parameters() / machine.ranks
    if plan.optimizer == "host":
        return 8 * shard / gpu.host
    return 28 * shard / gpu.bandwidth
