"""`ithaca plan --meshes`: every mesh of the GPUs under a recipe, what its links carry and how fast it is.

The table uses the same search and the same cost model as `ithaca plan`, so its first row is the mesh of the answer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ithaca.base.sizes import format_bytes, format_number, format_seconds, format_tokens
from ithaca.model.spec import Spec
from ithaca.parallel.head_split import HeadSplit, imbalance
from ithaca.planner.answer.report import Question, train_lines
from ithaca.planner.documents import Documents
from ithaca.planner.hardware import Cluster
from ithaca.planner.kernels import kernel_of
from ithaca.planner.meshes import Choice, cannot_share, mesh_shapes, weigh
from ithaca.planner.search import Answer, best_of, search
from ithaca.plans.plan import Plan

ROWS = 12  # meshes in the printed table

Compared = list[tuple[Choice, Answer | None]]


def compare_meshes(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str,
    sharing: int | None = None,
    documents: Documents | None = None,
) -> Compared:
    """Every mesh that the recipe allows with its answer: first the mesh that `search` takes, then the others by speed.

    A mesh on which nothing fits has no answer, comes last, and is timed with the recipe's defaults. `sharing`: only the
    meshes on which this many GPUs share a sequence.
    """
    default = replace(Plan(recipe=recipe).settled(), kernel=kernel_of(spec, cluster))
    sizes = cluster.sharing() if sharing is None else [sharing]
    shapes = [shape for size in sizes for shape in mesh_shapes(spec, default, cluster.machine, size)]
    if not shapes and sharing:
        raise cannot_share(spec, default, cluster.machine, sharing)
    if sharing:
        best = best_of(spec, cluster, tokens, sharing, recipe, documents=documents)
    else:
        best = search(spec, cluster, tokens, recipe, documents=documents)
    lengths = documents.lengths(tokens) if documents else None
    found: Compared = []
    for shape in shapes:
        answer = search(spec, cluster, tokens, recipe, mesh=shape, documents=documents)
        plan = default if answer is None else answer.plan
        found.append((weigh(spec, plan, cluster.gpu, cluster.machine, tokens, *shape, documents=lengths), answer))

    def order(item: tuple[Choice, Answer | None]) -> tuple[bool, bool, float]:
        choice, answer = item
        return answer is None, best is None or choice.axes != best.axes, -choice.rate

    return sorted(found, key=order)


def mesh_lines(question: Question, compared: Compared, impossible: Sequence[str]) -> list[str]:
    """The table of meshes, the best first, and the command that trains on it."""
    gpu, (best, answer) = question.cluster.gpu, compared[0]
    by_heads = "tensor" if any(choice.axes.tensor > 1 for choice, _ in compared) else "ulysses"
    left_out = f" (the first {ROWS} of {len(compared)}; --json prints all)" if len(compared) > ROWS else ""
    lines = [
        f"{question.model} at {format_tokens(best.tokens)} tokens on {question.gpus} with recipe '{question.recipe}': "
        f"meshes, the best first{left_out}",
        "",
        *_columns([_mesh_row(choice, found is not None, by_heads) for choice, found in compared[:ROWS]]),
        "",
        *(f"Not possible: {reason}" for reason in impossible),
        "sent: bytes that the busiest GPU sends in a step, to GPUs of its node and to other nodes, without weights",
        "K, V: memory of a layer's K and V, with their gradients; the least decides between equally fast meshes",
        f"Assumed: {gpu.inside / 1e9:g} GB/s from each GPU inside its node, {gpu.across / 1e9:g} GB/s to other nodes, "
        f"attention kernel {kernel_of(question.spec, question.cluster)}",
    ]
    return [*lines, "", *train_lines(question, answer)] if answer else lines


def _mesh_row(choice: Choice, fits: bool, by_heads: str) -> dict[str, str]:
    """The row of a mesh in the table; `by_heads`: the axis whose ranks divide the heads."""
    axes, seconds = choice.axes, choice.seconds
    return {
        f"{by_heads} × ring": f"{axes.by_heads} × {axes.ring}",
        "sequences": str(axes.data),
        "query heads": _heads(choice.split),
        "sent in node": format_bytes(choice.sent.inside),
        "across": format_bytes(choice.sent.across),
        "K, V": format_bytes(choice.kv_bytes),
        "sending": format_seconds(seconds.exchange),
        "step": format_seconds(seconds.step),
        "tokens/s per GPU": format_number(choice.rate) if fits else "does not fit",
    }


def _columns(rows: list[dict[str, str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    table = [{name: name for name in rows[0]}, *rows]
    first = next(iter(widths))
    return [
        "  ".join(row[name].ljust(width) if name == first else row[name].rjust(width) for name, width in widths.items())
        for row in table
    ]


def _heads(split: HeadSplit) -> str:
    """Query heads of each Ulysses rank; if they are uneven, by how much the largest share exceeds the mean."""
    fewest, most = min(map(len, split.q)), max(map(len, split.q))
    return str(most) if fewest == most else f"{fewest}–{most}, +{100 * imbalance(split):.0f} %"


def mesh_object(question: Question, compared: Compared, impossible: Sequence[str]) -> dict[str, Any]:
    """The table as the object of `--json`."""
    machine, gpu = question.cluster.machine, question.cluster.gpu
    return {
        "model": question.model,
        "tokens": compared[0][0].tokens,
        "recipe": question.recipe,
        "nodes": machine.nodes,
        "gpus": machine.gpus,
        "assumed": {
            "inside_bytes_per_second": machine.inside,
            "across_bytes_per_second": machine.across,
            "flops": gpu.matmul,
        },
        "meshes": [
            {
                "ulysses": choice.axes.ulysses,
                "tensor": choice.axes.tensor,
                "ring": choice.axes.ring,
                "data": choice.axes.data,
                "imbalance": imbalance(choice.split),
                "inside_bytes": choice.sent.inside,
                "across_bytes": choice.sent.across,
                "kv_bytes": choice.kv_bytes,
                "computing_seconds": choice.seconds.computing,
                "exchange_seconds": choice.seconds.exchange,
                "seconds": choice.seconds.step,
                "tokens_per_second_per_gpu": choice.rate,
                "fits": answer is not None,
            }
            for choice, answer in compared
        ],
        "not_possible": list(impossible),
    }
