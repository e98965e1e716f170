"""Attention kernels beside each other in one run: their rates, and their errors against float64.

    python -m bench.kernels                        both tables
    python -m bench.kernels --tables rates --only documents
    python -m bench.kernels --smoke                tiny, on a CPU, with the kernels that run there

`before` is what recipes of schedule `whole` did up to commit c64f972: one call of torch's flash attention for unequal
documents, one call of cuDNN for all else. Its walk cut documents as `cudnn+flash` does now. `walk` is `flash4` as
`sweep` calls it, tile by tile; the other columns are single calls, as recipes of schedule `whole` make them.

Rates: the kernels take turns, each round another one first, and medians count: a GPU that slows down under power slows
all of them down, and none always follows the one that heats it most.
Backward counts as 2.5 times the FLOPs of forward. The ratios are of forward and backward together.

Errors are relative Frobenius distances to attention in float64 of the same bf16 numbers, over all rows and over the
rows of the longest piece alone: short pieces have the larger outputs and would hide the error of a long one.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.bounds import matmul_tflops
from bench.points import Row, attempt, attention_flops, describe, packed, points_command_line, print_table, run_points
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.choose import make_kernel
from ithaca.attention.kernels.seam import Kernel, softmax_scale
from ithaca.attention.walk import Walk
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.tiles import Tiles
from ithaca.plans.plan import CHUNK
from ithaca.rehearsal.kernel_bound import seconds_of

LEAST_ROUNDS, MOST_ROUNDS = 2, 12  # over all kernels of a case
SMOKE_CHUNK = 100  # tokens of a tile of the walk
SECONDS = 4.0  # of a case; after them no round begins that need not
BLOCK = 2**27  # scores in float64 that the reference holds at a time
TENSORS = ("o", "lse", "dq", "dk", "dv")

K = 1024
FIVE = (100003, 50021, 70001, 30011, 12108)  # odd lengths that are 256K together
EIGHTEEN = (3000, 5000, 700, 9000, 1200, 2100, 8000, 350, 4000, 6000, 1500, 2500, 7000, 900, 3300, 4400, 5100, 1486)


@dataclass(frozen=True)
class Case:
    """Attention of some pieces with some heads."""

    pieces: Pieces
    heads: int
    kv_heads: int
    head_size: int = 128

    def inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Random q, k, v and gradient of o."""
        torch.manual_seed(0)
        rows, keys = self.pieces.q_bounds[-1], self.pieces.k_bounds[-1]
        sizes = ((rows, self.heads), (keys, self.kv_heads), (keys, self.kv_heads), (rows, self.heads))
        q, k, v, do = (torch.randn(*size, self.head_size, device=device, dtype=dtype) for size in sizes)
        return q, k, v, do


def documents(*lengths: int) -> Pieces:
    """Causal attention within documents of these lengths."""
    bounds = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    return Pieces.documents(tuple(bounds))


RATES = {
    "64K causal, 4/1 heads": Case(documents(64 * K), 4, 1),
    "64K causal, 32/8 heads": Case(documents(64 * K), 32, 8),
    "256K causal, 4/1 heads": Case(documents(256 * K), 4, 1),
    "256K causal, 32/8 heads": Case(documents(256 * K), 32, 8),
    "64K × 64K, 4/1 heads": Case(Pieces.rectangle(64 * K, 64 * K, ragged=False), 4, 1),
    "64K × 64K, 32/8 heads": Case(Pieces.rectangle(64 * K, 64 * K, ragged=False), 32, 8),
    "64K causal, 32/8 heads of 64": Case(documents(64 * K), 32, 8, 64),
    "64K causal, 9/3 heads of 64": Case(documents(64 * K), 9, 3, 64),
    "64 documents of 4K, 32/8 heads": Case(documents(*[4 * K] * 64), 32, 8),
    "five odd documents, 256K, 32/8 heads": Case(documents(*FIVE), 32, 8),
    "18 ragged documents, 64K, 9/3 heads of 64": Case(documents(*EIGHTEEN), 9, 3, 64),
}

SHORT, LONG = (1, 2, 37, 129, 1003, 5000), (1, 2, 129, 4097, 70000)
RAGGED_SIDES = Pieces((0, 1, 130, 5130), (0, 999, 1000, 9001), causal=False)  # rectangles of unequal sides

ERRORS = {
    **{
        f"documents of 1 to 5000, {heads}/{kv_heads} heads": Case(documents(*SHORT), heads, kv_heads)
        for heads, kv_heads in ((2, 2), (4, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1))
    },
    **{
        f"documents of 1 to 70000, {heads}/{kv_heads} heads of {size}": Case(documents(*LONG), heads, kv_heads, size)
        for heads, kv_heads, size in ((2, 2, 128), (4, 1, 128), (8, 1, 128), (3, 1, 64), (4, 1, 64))
    },
    "16K causal, 4/1 heads": Case(documents(16 * K), 4, 1),
    "16K causal, 3/1 heads of 64": Case(documents(16 * K), 3, 1, 64),
    "8K × 64K, 4/1 heads": Case(Pieces.rectangle(8 * K, 64 * K, ragged=False), 4, 1),
    "8K × 20000, 4/1 heads of 64": Case(Pieces.rectangle(8 * K, 20000, ragged=True), 4, 1, 64),
    "three unequal rectangles, 4/1 heads": Case(RAGGED_SIDES, 4, 1),
}

SMOKE_RATES = {
    "256 causal": Case(documents(256), 4, 1, 16),
    "128 × 192": Case(Pieces.rectangle(128, 192, ragged=False), 4, 2, 16),
    "ragged documents": Case(Pieces.documents(packed(512, 200)), 4, 1, 16),
}
SMOKE_ERRORS = {
    "documents of 1 to 100": Case(documents(1, 2, 37, 100), 4, 2, 16),
    "rectangles": Case(Pieces((0, 1, 30), (0, 40, 41), causal=False), 4, 1, 16),
}


class Walked:
    """A kernel that a walk over tiles calls. Documents alone: `sweep` has no others."""

    def __init__(self, kernel: Kernel, chunk: int):
        self.kernel, self.chunk, self.name = kernel, chunk, f"{kernel.name}, walk"
        self.refuses, self.prepare = kernel.refuses, kernel.prepare

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        assert scale == softmax_scale(q), "the walk takes no other"
        walk, keys = self._walk(k, v, pieces)
        parts = [walk.forward(index, q[rows], keys) for index, rows in enumerate(keys.slices)]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, pieces: Pieces, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert scale == softmax_scale(q), "the walk takes no other"
        walk, keys = self._walk(k, v, pieces)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))

        def add(tile: int, here: slice, dk_part: Tensor, dv_part: Tensor) -> None:
            dk[keys.slices[tile]][here] += dk_part
            dv[keys.slices[tile]][here] += dv_part

        dq = [
            walk.backward(index, do[rows], q[rows], o[rows], lse[:, rows], keys, add)
            for index, rows in enumerate(keys.slices)
        ]
        return torch.cat(dq), dk.to(k.dtype), dv.to(v.dtype)

    def _walk(self, k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Walk, "InMemory"]:
        tiles = Tiles(pieces.q_bounds[-1], self.chunk)
        return Walk(self.kernel, tiles, pieces.q_bounds), InMemory(k, v, tiles.slices())


@dataclass(frozen=True)
class InMemory:
    """K and V of all tiles, where the walk reads them."""

    k: Tensor
    v: Tensor
    slices: list[slice]

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.k[self.slices[index]], self.v[self.slices[index]]

    def release(self, index: int) -> None: ...


def kernels_of(case: Case, smoke: bool) -> dict[str, Kernel]:
    """The kernels that are compared, by the name of their column; the first one is compared with the others."""
    if smoke:
        return {name: make_kernel(name) for name in ("torch-cpu", "naive")}
    before = "flash" if case.pieces.ragged else "cudnn"
    return {"flash4": make_kernel("flash4"), "cudnn+flash": make_kernel("cudnn+flash"), "before": make_kernel(before)}


def with_walk(kernels: dict[str, Kernel], case: Case, smoke: bool) -> dict[str, Kernel]:
    """The kernels, and the first one once more as a walk calls it."""
    first = next(iter(kernels.values()))
    return kernels | ({"walk": Walked(first, SMOKE_CHUNK if smoke else CHUNK)} if case.pieces.causal else {})


def usable(kernels: dict[str, Kernel], case: Case, place: "Place") -> tuple[dict[str, Kernel], Row]:
    """The kernels that run here, and a row with the reasons of the others."""
    reasons = {name: kernel.refuses(place.device, place.dtype, case.head_size) for name, kernel in kernels.items()}
    refused = {name: reason for name, reason in reasons.items() if reason}
    found = {name: kernel for name, kernel in kernels.items() if name not in refused}
    return found, {"kernels": {name: kernel.name for name, kernel in found.items()}, "refused": refused}


@dataclass(frozen=True)
class Place:
    """Where the kernels run."""

    device: torch.device
    dtype: torch.dtype
    smoke: bool


def rates(case: Case, place: Place) -> Row:
    """Median seconds and TFLOP/s of each kernel, forward and backward; the kernels take turns."""
    every = with_walk(kernels_of(case, place.smoke), case, place.smoke)
    kernels, row = usable(every, case, place)
    q, k, v, do = case.inputs(place.device, place.dtype)
    scale, pieces = softmax_scale(q), case.pieces
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in kernels}
    spent = 0.0
    for turn in range(2 if place.smoke else MOST_ROUNDS + 1):
        names = [*kernels]
        if not names or (turn > LEAST_ROUNDS and spent > SECONDS):
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            kernel = kernels[name]
            try:
                found = _time(kernel, q, k, v, do, pieces, scale, place.device)
            except Exception as problem:  # the other kernels can still run
                row["refused"][name] = describe(problem)
                del kernels[name], taken[name]
                continue
            taken[name].append(found)
            spent += sum(found) if turn else 0.0  # the first turn compiles, and does not count
    flops = attention_flops(pieces, case.heads, case.head_size)
    for name, times in taken.items():
        forward, backward = (statistics.median(part) for part in zip(*times[1:], strict=True))
        row[name] = {
            "forward_seconds": forward,
            "backward_seconds": backward,
            "seconds": forward + backward,
            "forward_tflops": flops / forward / 1e12,
            "backward_tflops": 2.5 * flops / backward / 1e12,
            "rounds": len(times) - 1,
        }
    return row | {"ratios": _ratios(row, [*every])}


def _time(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, do: Tensor, pieces: Pieces, scale: float, device: torch.device
) -> tuple[float, float]:
    """Seconds of one forward and one backward call."""
    kept: list[Tensor] = []
    forward = seconds_of(lambda: kept.extend(kernel.forward(q, k, v, pieces, scale)), device)
    o, lse = kept
    return forward, seconds_of(lambda: kernel.backward(do, q, k, v, o, lse, pieces, scale), device)


def _ratios(row: Row, names: list[str]) -> dict[str, float]:
    """How many times as fast as each other kernel the first one is."""
    first, *others = names
    if first not in row:
        return {}
    return {name: row[name]["seconds"] / row[first]["seconds"] for name in others if name in row}


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, ...]:
    """o, lse, dq, dk and dv in float64, over blocks of rows that hold at most `BLOCK` scores."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    lse = q.new_full((q.shape[1], len(q)), -torch.inf)
    group = q.shape[1] // k.shape[1]
    for rows, keys in pieces.spans():
        step = max(BLOCK // (group * (keys.stop - keys.start)), 1)
        for start in range(rows.start, rows.stop, step):
            block = slice(start, min(start + step, rows.stop))
            # A causal block sees no key behind its last row
            seen = slice(keys.start, keys.start + block.stop - rows.start) if pieces.causal else keys
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                q_GTD, do_GTD = q[block, heads].transpose(0, 1), do[block, heads].transpose(0, 1)
                k_UD, v_UD = k[seen, head], v[seen, head]
                scores_GTU = q_GTD @ k_UD.T
                scores_GTU *= scale
                if pieces.causal:
                    at_T = torch.arange(block.start - rows.start, block.stop - rows.start, device=q.device)
                    at_U = torch.arange(seen.stop - seen.start, device=q.device)
                    scores_GTU.masked_fill_(at_U > at_T[:, None], -torch.inf)
                lse_GT = scores_GTU.logsumexp(-1)
                weights_GTU = scores_GTU.sub_(lse_GT[..., None]).exp_()
                o_GTD = weights_GTU @ v_UD
                dv[seen, head] += (weights_GTU.mT @ do_GTD).sum(0)
                dscores_GTU = (do_GTD @ v_UD.T).sub_((do_GTD * o_GTD).sum(-1, keepdim=True)).mul_(weights_GTU)
                dscores_GTU *= scale
                dk[seen, head] += (dscores_GTU.mT @ q_GTD).sum(0)
                dq[block, heads] = (dscores_GTU @ k_UD).transpose(0, 1)
                o[block, heads], lse[heads, block] = o_GTD.transpose(0, 1), lse_GT
    return o, lse, dq, dk, dv


def errors(case: Case, place: Place) -> Row:
    """Relative errors of each kernel's outputs and gradients, over all rows and over the longest piece."""
    all_kernels = kernels_of(case, place.smoke)
    if not place.smoke:
        all_kernels |= {"cudnn": make_kernel("cudnn")}  # alone, piece by piece: the error to compare with
        del all_kernels["before"]
    kernels, row = usable(all_kernels, case, place)
    q, k, v, do = case.inputs(place.device, place.dtype)
    scale, pieces = softmax_scale(q), case.pieces
    wanted = exact(q, k, v, do, pieces, scale)
    for name, kernel in kernels.items():
        row[name] = attempt(lambda kernel=kernel: _errors(kernel, q, k, v, do, pieces, scale, wanted))
    first, *_, last = all_kernels
    return row | {"over": _over(row.get(first, {}), row.get(last, {})), "compared": f"{first} / {last}"}


def _errors(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    pieces: Pieces,
    scale: float,
    wanted: tuple[Tensor, ...],
) -> Row:
    o, lse = kernel.forward(q, k, v, pieces, scale)
    found = (o, lse, *kernel.backward(do, q, k, v, o, lse, pieces, scale))
    rows, keys = max(pieces.spans(), key=lambda span: (span[0].stop - span[0].start) * (span[1].stop - span[1].start))
    everything = slice(None)
    result: Row = {}
    for scope, (of_q, of_k) in {"all": (everything, everything), "longest": (rows, keys)}.items():
        places: dict[str, Any] = {"lse": (everything, of_q)} | dict.fromkeys(("o", "dq"), of_q)
        places |= dict.fromkeys(("dk", "dv"), of_k)
        for name, got, true in zip(TENSORS, found, wanted, strict=True):
            part, whole = got[places[name]].double(), true[places[name]]
            result[f"{name} {scope}"] = ((part - whole).norm() / whole.norm()).item()
    return result


def _over(found: Row, other: Row) -> dict[str, float]:
    """The error of a kernel over that of another one, tensor by tensor."""
    if "error" in found or "error" in other:
        return {}
    return {name: found[name] / other[name] for name in found if other.get(name)}


def _rate_line(row: Row) -> str:
    rates_of = {name: row[name] for name in row["kernels"] if name in row}
    parts = [f"{name} {found['forward_tflops']:.0f}/{found['backward_tflops']:.0f}" for name, found in rates_of.items()]
    return f"{row['point']}: " + ", ".join(parts + [f"{name}: {why}" for name, why in row["refused"].items()])


def _error_line(row: Row) -> str:
    name, worst = max(row["over"].items(), key=lambda item: item[1], default=("", float("nan")))
    return f"{row['point']}: {row['compared']} {worst:.3f} ({name})" + "".join(
        f", {kernel}: {why}" for kernel, why in row["refused"].items()
    )


def print_rates(rows: list[Row]) -> None:
    good = [row for row in rows if "error" not in row]
    names = list(dict.fromkeys(name for row in good for name in (*row["kernels"], *row["refused"])))
    if not names:
        return
    lines = []
    for row in good:
        cells = [
            f"{row[name]['forward_tflops']:.0f}/{row[name]['backward_tflops']:.0f}" if name in row else "–"
            for name in names
        ]
        cells += [f"{row['ratios'][name]:.3f}" if name in row["ratios"] else "–" for name in names[1:]]
        lines.append([row["point"], *cells])
    header = ["TFLOP/s forward/backward", *names, *(f"{names[0]} is … × {name}" for name in names[1:])]
    print_table("Rates", header, lines)


def print_errors(rows: list[Row]) -> None:
    good = [row for row in rows if "error" not in row and row["over"]]
    if not good:
        return
    worst = {
        row["point"]: [max(v for key, v in row["over"].items() if key.split()[0] == name) for name in TENSORS]
        for row in good
    }
    worst["worst"] = [max(column) for column in zip(*worst.values(), strict=True)]
    lines = [[point, *(f"{ratio:.3f}" for ratio in ratios)] for point, ratios in worst.items()]
    print_table(f"Errors, {good[0]['compared']}", ["", *TENSORS], lines)


TABLES: dict[str, tuple[Callable[[Case, Place], Row], Callable[[Row], str], Callable[[list[Row]], None]]] = {
    "rates": (rates, _rate_line, print_rates),
    "errors": (errors, _error_line, print_errors),
}


def main() -> None:
    parser = points_command_line(__doc__)
    parser.add_argument("--tables", default="rates,errors", help="rates, errors or both")
    args = parser.parse_args()
    use_expandable_segments()
    device = torch.device("cpu" if args.smoke else "cuda")
    place = Place(device, torch.float32 if args.smoke else torch.bfloat16, args.smoke)
    cases = {"rates": SMOKE_RATES, "errors": SMOKE_ERRORS} if args.smoke else {"rates": RATES, "errors": ERRORS}
    bound, shown = matmul_tflops(device), []
    for table in args.tables.split(","):
        measure, line, show = TABLES[table]
        points = [(name, partial(_measured, measure, case, place, bound)) for name, case in cases[table].items()]
        shown.append((show, run_points(f"kernels-{table}", points, args, line)))
    for show, rows in shown:
        show(rows)


def _measured(measure: Callable[[Case, Place], Row], case: Case, place: Place, bound: float | None) -> Row:
    sizes = {"heads": case.heads, "kv_heads": case.kv_heads, "head_size": case.head_size, "causal": case.pieces.causal}
    bounds = {"q_bounds": case.pieces.q_bounds, "k_bounds": case.pieces.k_bounds}
    return {**sizes, **bounds, **measure(case, place), "matmul_tflops": bound}


if __name__ == "__main__":
    main()
