"""Every recipe on the ranks that are here against one rank: the loss and every gradient of a small model.

The model's sizes rarely divide evenly, and its rows are packed with documents of one token and more.
Each recipe runs on the meshes that its entry in plans/recipes.py allows, with all ranks sharing a sequence where it
can.

On a CPU the model computes in float64, and a gradient may be 1e-10 away from one rank's (relative Frobenius distance).
On a GPU it computes in bfloat16, where two right programs differ. The naive twin in bfloat16 shows how much: a recipe
may be FURTHER times as far from one rank as the twin is. One rank itself may be FURTHER times as far from the twin in
float64 as the twin in bfloat16 is. Each tensor is compared by itself.
"""

import math

import torch
from torch import Tensor

from ithaca.assemble import Model, apply
from ithaca.base.sizes import format_count
from ithaca.doctor.exam import COLLECTIVE_SECONDS, Exam, Found, Section, describe
from ithaca.doctor.units import columns
from ithaca.model.families import read_spec
from ithaca.model.source import DTYPES, ModelSource, RandomWeights
from ithaca.parallel.axes import Axes
from ithaca.parallel.hangs import set_timeout
from ithaca.parallel.mesh import Mesh, alone, mesh
from ithaca.parallel.sharding import whole_tensors
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES
from ithaca.schedule import reference

EXACT = 1e-10  # in float64
FURTHER = 1.5  # in bfloat16
FLOOR = 1e-5  # of the largest gradient's norm: a gradient below is rounding alone
LOSS = "loss"

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
DEVIATION = 0.1  # of the weights: with the usual 0.02 attention would be nearly uniform
DOCUMENTS = ((101,), (1, 30, 17, 53), (48, 2, 51))  # tokens of each document, row by row
SIZES = {"chunk": 37, "tile": 13}  # of Plans that have them

Rows = tuple[Tensor, Tensor, Tensor]  # tokens, labels, documents
Outcome = dict[str, Tensor]  # the loss and all gradients, in float64 on the host


def examine(exam: Exam) -> Found:
    dtype = "bfloat16" if exam.grid.gpu else "float64"
    return compare(exam.grid, dtype)


def compare(grid: Mesh, dtype: str) -> Found:
    """The distance of every recipe from one rank. The first rank compares: all ranks have the same whole gradients."""
    source = small_model(dtype)
    rows = packed_rows(source.spec.vocab, grid.size + 1)  # more than data ranks, and not evenly
    found, allowed, one = [], {}, {}
    if grid.rank == 0:
        one = step(apply(source, Plan(recipe="dense"), alone(grid.device.type)), rows)
        exact = naive_step(source, rows, torch.float64, grid.device)
        twin = exact if dtype == "float64" else naive_step(source, rows, DTYPES[dtype], grid.device)
        allowed_one, allowed = allowances(one, exact, twin, DTYPES[dtype])
        found.append({"recipe": "one rank", "mesh": "against the naive twin", **judge(one, exact, allowed_one)})
    for name in RECIPES:
        for axes in fitting_meshes(name, grid.size, source.spec.heads):
            entry = {"recipe": name, "mesh": str(axes)}
            try:
                outcome = _recipe_step(name, axes, source, rows, grid)
                found.append(entry | (judge(outcome, one, allowed) if grid.rank == 0 else {}))
            except Exception as error:  # the recipes after it are still worth trying
                found.append(entry | {"error": describe(error)})
    return {"dtype": dtype, "recipes": found}


def small_model(dtype: str) -> ModelSource:
    spec = read_spec(CONFIG)
    return ModelSource(spec, CONFIG, RandomWeights(spec, 0, DEVIATION), dtype, None)


def packed_rows(vocab: int, count: int) -> Rows:
    """Rows of documents, at least one of each kind; a fifth of the labels does not count."""
    packings = [DOCUMENTS[row % len(DOCUMENTS)] for row in range(max(count, len(DOCUMENTS)))]
    generator, shape = torch.Generator().manual_seed(0), (len(packings), sum(DOCUMENTS[0]))
    tokens = torch.randint(0, vocab, shape, generator=generator)
    labels = tokens.masked_fill(torch.rand(shape, generator=generator) < 0.2, -100)
    ids = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in packings]
    return tokens, labels, torch.stack(ids)


def fitting_meshes(recipe: str, ranks: int, heads: int) -> list[Axes]:
    """The meshes on which most ranks share a sequence under a recipe. The other ranks take other sequences."""
    for sharing in (count for count in range(ranks, 0, -1) if ranks % count == 0):
        shapes = [
            (ulysses, sharing // ulysses)
            for ulysses in range(1, min(sharing, heads) + 1)
            if sharing % ulysses == 0 and RECIPES[recipe].allows(ulysses, sharing // ulysses)
        ]
        if shapes:
            return [RECIPES[recipe].axes(by_heads, ring, ranks // sharing) for by_heads, ring in shapes]
    raise AssertionError("every recipe runs on one rank")


def _recipe_step(recipe: str, axes: Axes, source: ModelSource, rows: Rows, grid: Mesh) -> Outcome:
    sizes = {name: size for name, size in SIZES.items() if name in RECIPES[recipe].options}
    here = mesh(**axes.grid, device=grid.device.type)  # pyrefly: ignore
    set_timeout(here.groups, COLLECTIVE_SECONDS)
    model = apply(source, Plan(recipe=recipe, loss_tile=50, **sizes), here)  # pyrefly: ignore
    model.engine.poison = True  # a tile that is read too early or too late is NaN
    return step(model, rows)


def step(model: Model, rows: Rows) -> Outcome:
    """The loss and the gradients of a model, whole on every rank."""
    loss = model(model.shard(*rows))
    loss.backward()
    gradients = whole_tensors(model.decoder, model.mesh, model.part, gradients=True)
    return {LOSS: loss.detach().double().cpu(), **{name: tensor.double() for name, tensor in gradients}}


def naive_step(source: ModelSource, rows: Rows, dtype: torch.dtype, device: torch.device) -> Outcome:
    """The loss and gradients by the naive twin, row by row on the host. Random weights depend on the kind of device."""
    spec = source.spec
    weights = {}
    for name, shape in spec.shapes():
        weight = torch.empty(shape, dtype=DTYPES[source.dtype], device=device)
        source.weights.read(name, range(shape[0]), weight)
        weights[name] = weight.cpu().to(dtype).requires_grad_()
    _, labels, ids = rows
    valid = ((labels[:, 1:] != -100) & (ids[:, 1:] == ids[:, :-1])).sum()
    loss = sum(reference.loss(spec, weights, *row).double() for row in zip(*rows, strict=True)) / valid
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {LOSS: loss.detach(), **{name: weight.grad for name, weight in weights.items()}}
    return {name: tensor.double() for name, tensor in found.items() if tensor is not None}


Bounds = dict[str, float]  # how far each tensor may be away


def allowances(one: Outcome, exact: Outcome, twin: Outcome, dtype: torch.dtype) -> tuple[Bounds, Bounds]:
    """How far one rank may be from the exact twin, and how far a recipe may be from one rank."""
    if dtype == torch.float64:
        return dict.fromkeys(exact, EXACT), dict.fromkeys(exact, EXACT)
    return _scaled(distances(twin, exact)), _scaled(distances(twin, one))


def _scaled(spread: Bounds) -> Bounds:
    return {name: FURTHER * distance for name, distance in spread.items()}


def distances(found: Outcome, wanted: Outcome) -> Bounds:
    """The relative Frobenius distance of each tensor."""
    assert found.keys() == wanted.keys()
    floor = FLOOR * max(tensor.norm().item() for tensor in wanted.values())
    return {
        name: (found[name] - tensor).norm().item() / max(tensor.norm().item(), floor) for name, tensor in wanted.items()
    }


def judge(found: Outcome, wanted: Outcome, allowed: Bounds) -> Found:
    """The tensor that is furthest away relative to the allowed distance, and all that are too far away."""
    far = distances(found, wanted)

    def share(name: str) -> float:
        return far[name] / allowed[name] if math.isfinite(far[name]) else math.inf

    worst = max(far, key=share)
    return {
        "worst": worst,
        "distance": far[worst] if math.isfinite(far[worst]) else str(far[worst]),
        "allowed": allowed[worst],
        "wrong": [name for name in far if not share(name) <= 1],
    }


def conclude(exam: Exam, told: list[Found], findings: dict[str, Found]) -> Found:  # noqa: ARG001
    found = told[0]["recipes"]
    for rank, theirs in enumerate(told[1:], start=1):
        for ours, their in zip(found[1:], theirs["recipes"], strict=True):
            if "error" in their and "error" not in ours:
                ours["error"] = f"rank {rank}: {their['error']}"
    problems = [_problem(entry) for entry in found if _badness(entry) > 1]
    return {"dtype": told[0]["dtype"], "ranks": exam.grid.size, "recipes": found, "problems": problems}


def _badness(entry: Found) -> float:
    """The distance as a multiple of what is allowed; infinite for an error or NaN."""
    if "error" in entry or isinstance(entry["distance"], str):
        return math.inf
    return entry["distance"] / entry["allowed"]


def _problem(entry: Found) -> str:
    who = f"recipe '{entry['recipe']}' on {entry['mesh']}" if entry["recipe"] in RECIPES else "one rank"
    if "error" in entry:
        return f"{who} failed: {entry['error']}"
    others = len(entry["wrong"]) - 1
    more = f", and so are {format_count(others, 'other tensor')}" if others else ""
    away = f"{_far(entry['distance'])} away, where {entry['allowed']:.1e} is allowed"
    return f"{who}: {_kind(entry['worst'])} is {away}{more}"


def _kind(tensor: str) -> str:
    return "the loss" if tensor == LOSS else f"the gradient of {tensor}"


def _far(distance: float | str) -> str:
    return distance if isinstance(distance, str) else f"{distance:.1e}"


def lines(found: Found) -> list[str]:
    text = [f"loss and all gradients in {found['dtype']}, {format_count(found['ranks'], 'rank')} against one"]
    rows = [["recipe", "mesh", "furthest tensor", "distance", "allowed", ""]]
    for entry in found["recipes"]:
        figures = ["", "", ""]
        if "error" not in entry:
            figures = [entry["worst"], _far(entry["distance"]), f"{entry['allowed']:.1e}"]
        rows.append([entry["recipe"], entry["mesh"], *figures, "right" if _badness(entry) <= 1 else "WRONG"])
    return text + columns(rows, left=3)


SECTION = Section("recipes", examine, conclude, lines)
