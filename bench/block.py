"""Transformer blocks on one GPU: time, memory and causal MFU of a schedule, beside its bare kernels and GEMMs.

    python -m bench.block --tokens 256K,512K                     the sweep against what it cannot do without
    python -m bench.block --tokens 256K,1M --no-bare             memory: how many d the peak grows by
    python -m bench.block --tokens 32K --recipe dense,sweep --place device
    python -m bench.block --documents 256K,64x4K,192K+64x1K      time against Σ length²

Blocks only, without embedding, loss and optimizer; one rank, or one of several, whose messages come back to itself.
"Bare" runs the attention kernel on the same pairs of tiles, and every GEMM of the schedule with the same shapes, on
random data and nothing else. Attention's time within a step is that of its kernels by the profiler.
1 d is one bf16 hidden state of all tokens. MFU counts 6 · (block's parameters) + 6 · Hq · D · Σ length² / S FLOPs a
token over 989 TFLOP/s, without credit for recomputation.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from ithaca.plans.tape_specs import layout_of, rebuilds_of, tape_specs, tiles_of
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from bench.bounds import matmul_tflops
from bench.record import command_line, record
from ithaca.attention.documents import Pieces, attended_length, positions
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.attention.kernels.seam import softmax_scale
from ithaca.attention.walk import Walk
from ithaca.base.sizes import format_bytes, format_tokens, parse_tokens
from ithaca.base.tiles import Tiles
from ithaca.model.decoder import Unit
from ithaca.model.rotary import Rotary
from ithaca.model.source import load_model
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.collectives import Group
from ithaca.parallel.exchange import Alone, Ulysses
from ithaca.parallel.head_split import head_rounds, split_heads
from ithaca.parallel.layout import Layout, hops
from ithaca.parallel.loopback import Loopback
from ithaca.parallel.ring import Ring, ring_runs
from ithaca.plans.plan import Plan
from ithaca.schedule.sweep.run import SweepCall, run_sweep
from ithaca.schedule.tapes import Tapes
from ithaca.schedule.whole.attention import Attention
from ithaca.schedule.whole.ring_kernel import RingKernel
from ithaca.schedule.whole.run import BlockCall, run_block
from ithaca.tape.engine import make_engine
from ithaca.tape.tape import Tape

PEAK, BF16 = 989e12, torch.bfloat16
DEVICE = torch.device("cuda", 0)
ATTENTION = re.compile(
    "sdpa|flash|fmha|cudnn::fusion|_merge"
)  # in the names of attention's kernels, merging among them


class Blocks:
    """Some blocks with random weights, and one layout of documents to run them on: one rank of several."""

    def __init__(self, spec: Spec, bounds: tuple[int, ...], plan: Plan, ranks: int, ring: int):
        self.spec, self.plan = spec, plan
        self.kernel = choose_kernel(plan.kernel, DEVICE, BF16, spec.head_size)
        self.units = [Unit(spec.block_shapes(), BF16, DEVICE) for _ in range(spec.layers)]
        for parameter in (p for unit in self.units for p in unit.parameters()):
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
        self.layout = layout_of(plan, bounds[-1], ranks, ring)
        self.bounds = (*bounds[:-1], self.layout.padded)
        everywhere = positions(self.bounds)
        self.positions = torch.cat([everywhere[place.start : place.stop] for place in self.layout.places(0)]).to(DEVICE)
        self.exchange = Alone() if ranks == 1 else Ulysses(Group(Loopback(0, ranks)), self.layout.runs)
        self.ring = Ring(None if ring == 1 else Group(Loopback(0, ring)))
        self.split = split_heads(spec.heads, spec.kv_heads, ranks)
        self.mine = Heads(self.split.q[0], self.split.kv[0])

    def zero_grad(self) -> None:
        for unit in self.units:
            unit.zero_grad()


class Swept(Blocks):
    def __init__(self, spec: Spec, bounds: tuple[int, ...], plan: Plan, ranks: int, ring: int):
        super().__init__(spec, bounds, plan, ranks, ring)
        self.tiles = tiles_of(plan, self.layout)
        self.walk = Walk(self.kernel, self.layout.chunks, self.bounds, ring_runs(self.layout, 0))
        began = time.perf_counter()
        asked = tape_specs(plan, spec, BF16.itemsize, self.mine, ranks, ring)
        self.tapes = Tapes(asked, rebuilds_of(plan, spec), self.tiles, BF16, make_engine(DEVICE), lambda _: None)
        self.reserve_seconds = time.perf_counter() - began

    def attention_seconds(self) -> float:
        """What attention kernels take within a step, by the profiler."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.forward()
            self.timed_forward()
            self.backward()
            self.timed_backward()
            torch.cuda.synchronize()
        kernels = (event for event in profile.key_averages() if ATTENTION.search(event.key))
        return sum(event.self_device_time_total for event in kernels) / 1e6

    def forward(self) -> None:
        self.zero_grad()
        self.run = self.tapes.begin(kept=True)
        _fill(self.run.x(0), 1.0)
        torch.cuda.synchronize()

    def timed_forward(self) -> None:
        carrier = torch.zeros((), device=DEVICE, requires_grad=True)
        weights = [{name: weight.detach() for name, weight in unit.named_parameters()} for unit in self.units]
        for layer, unit in enumerate(self.units):
            call = SweepCall(
                self.spec,
                layer,
                self.run,
                self.walk,
                Rotary(self.spec.rope, self.spec.head_size),
                self.positions,
                self.plan.tile or 0,
                self.exchange,
                self.ring,
                self.split,
                lambda other: nullcontext(weights[other]),
            )
            carrier = unit(run_sweep, carrier, call)
        self.carrier = carrier

    def backward(self) -> None:
        _fill(self.run.residual, 1e-3)
        if self.spec.layers == 1:
            self.run.kv_of_layer = (
                None  # a model's last layer has its K and V still; the others, which one stands for, do not
            )
        torch.cuda.synchronize()

    def timed_backward(self) -> None:
        self.run.waits = False
        self.carrier.backward()
        del self.carrier

    def close(self) -> None:
        del self.run
        self.tapes.close()


class Whole(Blocks):
    """The schedule `whole` on tensors; block inputs on the host where the Plan says so."""

    def __init__(self, spec: Spec, bounds: tuple[int, ...], plan: Plan, ranks: int, ring: int):
        super().__init__(spec, bounds, plan, ranks, ring)
        began = time.perf_counter()
        asked = tape_specs(plan, spec, BF16.itemsize, self.mine, ranks, ring)
        tiles = tiles_of(plan, self.layout)
        self.tapes = Tapes(asked, {}, tiles, BF16, make_engine(DEVICE), lambda _: None) if asked else None
        self.reserve_seconds = time.perf_counter() - began
        rounds = head_rounds(self.split, plan.heads_at_once(ranks))
        kernel = self.kernel
        if ring > 1:
            kernel = RingKernel(kernel, self.ring, self.layout, self.bounds, plan.travel == "gather")
        self.attention = Attention(spec, kernel, Pieces.documents(self.bounds), self.exchange, rounds)

    def forward(self) -> None:
        self.zero_grad()
        self.x = torch.randn(self.layout.local, self.spec.hidden, device=DEVICE, dtype=BF16)
        self.run = self.tapes.begin(kept=True) if self.tapes else None
        torch.cuda.synchronize()

    def timed_forward(self) -> None:
        rope = Rotary(self.spec.rope, self.spec.head_size).at(self.positions, BF16)
        y = self.x
        del self.x  # as a model's, it is kept by the block alone, if at all
        for layer, unit in enumerate(self.units):
            checkpoint = self.plan.checkpoint or "full"
            y = unit(run_block, y, BlockCall(self.attention, layer, rope, checkpoint, self.plan.tile, self.run))
        self.y = get_gradient_edge(y)  # in a model nobody keeps the output itself

    def backward(self) -> None:
        if self.run:
            self.run.waits = False
        self.dy = torch.randn(self.layout.local, self.spec.hidden, device=DEVICE, dtype=BF16) * 1e-3
        torch.cuda.synchronize()

    def timed_backward(self) -> None:
        torch.autograd.backward((self.y,), (self.dy,))
        del self.y, self.dy

    def close(self) -> None:
        if self.tapes:
            self.tapes.close()


def _fill(tape: Tape, scale: float) -> None:
    tape.drop()  # what was fetched ahead is not what will be read
    for index in range(tape.tiles.count):
        tape.write(index, tape.blank(index).normal_(0.0, scale))


class Bare:
    """What the sweep cannot do without: its attention kernels and its GEMMs, each on random data of its shape."""

    def __init__(self, blocks: Swept):
        self.spec, self.kernel, self.walk = blocks.spec, blocks.kernel, blocks.walk
        spec, size, mine = self.spec, blocks.layout.chunks.size, blocks.mine
        self.q, self.do = (torch.randn(size, len(mine.q), spec.head_size, device=DEVICE, dtype=BF16) for _ in range(2))
        self.k, self.v = (torch.randn(size, len(mine.kv), spec.head_size, device=DEVICE, dtype=BF16) for _ in range(2))
        self.gemms = _gemms(spec, blocks.tiles, blocks.plan.tile or blocks.tiles.size, blocks.layout)
        chunks = range(blocks.tiles.count)
        self.visits = [visit for chunk in chunks for tile in self.walk.visits(chunk) for visit in tile.visits]
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def attention_forward(self) -> None:
        for visit in self.visits:
            args = self._args(visit)
            self._kept[visit.pieces] = self.kernel.forward(*args, visit.pieces, softmax_scale(self.q))

    def attention_backward(self) -> None:
        for visit in self.visits:
            q, k, v = self._args(visit)
            o, lse = self._kept[visit.pieces]
            self.kernel.backward(self.do[visit.rows], q, k, v, o, lse, visit.pieces, softmax_scale(q))

    def _args(self, visit: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[visit.rows], self.k[visit.keys], self.v[visit.keys]

    def linear(self) -> None:
        for (m, k, n, kind), count in self.gemms.items():
            # The layouts that the GEMM has in the block: x · Wᵀ, dy · W, dyᵀ · x
            a = torch.randn((k, m) if kind == "weight" else (m, k), device=DEVICE, dtype=BF16)
            b = torch.randn((n, k) if kind == "forward" else (k, n), device=DEVICE, dtype=BF16)
            a, b = (a.T if kind == "weight" else a), (b.T if kind == "forward" else b)
            for _ in range(count * self.spec.layers):
                a @ b


def _gemms(spec: Spec, chunks: Tiles, tile: int, layout: Layout) -> Counter[tuple[int, int, int, str]]:
    """(m, k, n, which of the three) -> how often, for one block's forward and backward."""
    heads, keys, hidden, wide = spec.heads * spec.head_size, spec.kv_heads * spec.head_size, spec.hidden, spec.mlp
    found: Counter[tuple[int, int, int, str]] = Counter()

    def layer(rows: int, into: int, out: int, forward: int) -> None:
        """A linear layer: so many times forward, once backward."""
        found[rows, into, out, "forward"] += forward
        found[rows, out, into, "input"] += 1
        found[out, rows, into, "weight"] += 1

    for index in range(chunks.count):
        rows = chunks.rows_in(index)
        layer(rows, hidden, heads, 2)
        # k and v, which later chunks ask for once more, but for those that are under way by then
        asked = index < chunks.count - 1 - hops(layout.ulysses, layout.ring)
        for _ in range(2):
            layer(rows, hidden, keys, 3 if asked else 2)
        for part in Tiles(rows, min(tile, rows)).slices():
            size = part.stop - part.start
            layer(size, heads, hidden, 2)
            layer(size, hidden, wide, 2)
            layer(size, hidden, wide, 2)
            layer(size, wide, hidden, 1)
    return found


def timed(work: Callable[[], None]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def measure(
    spec: Spec, bounds: tuple[int, ...], plan: Plan, ranks: int, repeats: int, with_bare: bool, ring: int = 1
) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    blocks = (Swept if plan.sweeps else Whole)(spec, bounds, plan, ranks, ring)
    bare: Bare | None = None
    seconds: dict[str, list[float]] = {}

    def take(name: str, work: Callable[[], None], warm: bool) -> None:
        taken = timed(work)
        if not warm or repeats == 0:
            seconds.setdefault(name, []).append(taken)

    peak = [0, 0]
    for number in range(repeats + 1):  # the first is a warm-up
        torch.cuda.reset_peak_memory_stats()
        blocks.forward()
        take("forward", blocks.timed_forward, number == 0)
        blocks.backward()
        take("backward", blocks.timed_backward, number == 0)
        blocks.zero_grad()
        if number == 0:
            peak = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            bare = Bare(blocks) if with_bare and isinstance(blocks, Swept) else None
        if bare:
            take("attention_forward", bare.attention_forward, number == 0)
            take("attention_backward", bare.attention_backward, number == 0)
            take("linear", bare.linear, number == 0)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    if isinstance(blocks, Swept) and repeats:
        median["attention"] = blocks.attention_seconds()
    blocks.close()
    attended, tokens = attended_length(bounds), bounds[-1]
    block = sum(p.numel() for p in blocks.units[0].parameters())
    flops = tokens / (ranks * ring) * spec.layers * (6 * block + 6 * spec.heads * spec.head_size * attended)
    step = median["forward"] + median["backward"]
    result = {
        "recipe": plan.recipe,
        "tokens": tokens,
        "ranks": ranks,
        "ring": ring,
        "documents": len(bounds) - 1,
        "attended": attended,
        "layers": spec.layers,
        "plan": {name: value for name, value in vars(plan).items() if value is not None},
        "kernel": blocks.kernel.name,
        "seconds": step,
        **{f"seconds_{name}": value for name, value in median.items()},
        "mfu_causal": flops / step / PEAK,
        "peak_bytes_allocated": peak[0],
        "peak_bytes": peak[1],
        "d_bytes": blocks.layout.local * spec.hidden * 2,
        "reserve_seconds": blocks.reserve_seconds,
    }
    if bare:
        result["seconds_bare"] = median["attention_forward"] + median["attention_backward"] + median["linear"]
        result["over_bare"] = step / result["seconds_bare"]
    return result


def read_documents(text: str) -> tuple[int, ...]:
    """'192K+64x1K' -> where these documents begin and end."""
    bounds = [0]
    for part in text.split("+"):
        match = re.fullmatch(r"(?:(\d+)x)?(\w+)", part)
        if not match:
            raise SystemExit(f"'{part}' is not a document: write 192K, or 64x1K for many")
        bounds += [bounds[-1] + parse_tokens(match[2]) * (i + 1) for i in range(int(match[1] or 1))]
    return tuple(bounds)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", default=1, type=int)
    parser.add_argument("--tokens", default="256K", help="several, parted by commas")
    parser.add_argument("--documents", help="layouts in place of --tokens, as 64x4K,192K+64x1K")
    parser.add_argument("--ranks", default=1, type=int, help="Ulysses ranks, of which this is one, looped back")
    parser.add_argument("--ring", default=1, type=int, help="ring ranks of so many Ulysses ranks, looped back likewise")
    parser.add_argument("--recipe", default="sweep", help="several, parted by commas")
    parser.add_argument("--place", default="host", help="of x, o and the gradient under the sweep")
    parser.add_argument("--kv", default="device")
    parser.add_argument("--chunk", type=parse_tokens)
    parser.add_argument("--tile", type=parse_tokens)
    parser.add_argument("--repeats", default=3, type=int, help="0: once, without a warm-up")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--name", help="of the file of results")
    args = parser.parse_args()
    spec = replace(load_model(args.model).spec, layers=args.layers)
    spec = replace(spec, rope_layers=spec.rope_layers[: args.layers])
    if args.documents and args.recipe != "sweep":
        raise SystemExit("--documents compares the attention of the sweep: leave --recipe out")
    layouts = [read_documents(text) for text in (args.documents or args.tokens).split(",")]
    bound, results = matmul_tflops(), []
    for recipe in args.recipe.split(","):
        options = {"recipe": recipe}
        if recipe == "sweep":
            options |= dict.fromkeys(("x", "o", "residual"), args.place)
            options |= {"kv": args.kv, "chunk": args.chunk, "tile": args.tile}
        for bounds in layouts:
            plan = Plan(**options).settled()
            row = measure(spec, bounds, plan, args.ranks, args.repeats, not args.no_bare, args.ring)
            results.append({**row, "matmul_tflops": bound})
            print(_line(row), flush=True)
    for first, second in pairwise(results):
        growth = second["d_bytes"] - first["d_bytes"]
        if first["recipe"] == second["recipe"] and growth > 0:
            slope = (second["peak_bytes_allocated"] - first["peak_bytes_allocated"]) / growth
            second["slope_d"] = slope
            print(f"  slope from {first['tokens']} to {second['tokens']} tokens: {slope:.3f} d")
    if args.documents:
        _compare_layouts(results)
    name = args.name or f"block-{args.model}-{format_tokens(layouts[0][-1])}-{args.recipe.replace(',', '-')}"
    print(
        f"{args.model}, {args.layers} layers, matmul bound {bound:.0f} TFLOP/s -> "
        f"{record(name, results, args.out, args.commit)}"
    )


def _compare_layouts(results: list[dict[str, Any]]) -> None:
    """Time against Σ length², which attention's is proportional to: of its kernels, and of the whole step."""
    first = results[0]
    for row in results:
        row["work_share"] = row["attended"] * row["tokens"] / (first["attended"] * first["tokens"])
        attention = first["seconds_attention"] * row["work_share"]
        row["seconds_attention_expected"] = attention
        row["seconds_expected"] = first["seconds"] - first["seconds_attention"] + attention
        print(
            f"  {row['documents']:3} documents, Σ length² {100 * row['work_share']:6.2f} % of the first layout's: "
            f"step {row['seconds']:.3f} s, {row['seconds'] / row['seconds_expected']:.3f} x expected; "
            f"attention {row['seconds_attention']:.3f} s, {row['seconds_attention'] / attention:.3f} x expected"
        )


def _line(row: dict[str, Any]) -> str:
    text = (
        f"  {row['recipe']:6} {format_tokens(row['tokens']):>5} in {row['documents']:3} documents  "
        f"{row['seconds']:.3f} s ({row['seconds_forward']:.3f} + {row['seconds_backward']:.3f})  "
        f"{100 * row['mfu_causal']:.1f} % causal MFU  peak {format_bytes(row['peak_bytes_allocated'])} "
        f"({format_bytes(row['peak_bytes'])} reserved)"
    )
    if "over_bare" in row:
        parts = " + ".join(f"{row[f'seconds_{n}']:.3f}" for n in ("attention_forward", "attention_backward", "linear"))
        text += f"  {row['over_bare']:.3f} x bare {row['seconds_bare']:.3f} s ({parts})"
    return text


if __name__ == "__main__":
    main()
