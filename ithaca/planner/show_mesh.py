"""What `ithaca mesh` does: the meshes that work for a model on some nodes, as a table or as JSON."""

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from ithaca.base.sizes import format_bytes, format_seconds, format_tokens
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.head_split import HeadSplit, imbalance
from ithaca.planner.machine import Machine
from ithaca.planner.meshes import Choice, choose, impossible
from ithaca.plans.plan import Plan


def run(model: str, machine: Machine, tokens: int, recipe: str, sharing: int | None, as_json: bool) -> None:
    """`ithaca mesh MODEL --nodes N --gpus G`."""
    spec, plan = read_spec(find_config(model)[0]), Plan(recipe=recipe)
    choices = choose(spec, plan, machine, tokens, sharing)
    if as_json:
        why_not = list(impossible(spec, plan, machine, sharing))
        print(json.dumps(_object(model, machine, tokens, plan, choices) | {"not_possible": why_not}, indent=2))
        return
    best = choices[0]
    lines = [
        f"{model}, {format_tokens(tokens)} tokens, recipe '{recipe}', {machine.nodes} × {machine.gpus} GPUs; "
        f"{best.ulysses * best.ring} share a sequence, sequences at a time: {best.data}",
        _table(choices),
        *(f"not possible: {reason}" for reason in impossible(spec, plan, machine, sharing)),
        "Bytes are what the busiest GPU sends in a step, inside its node and to other nodes, without parameters; K, V: "
        f"a block's, with their gradients. Seconds are for comparing. Assumed: {machine.describe()}.",
        f"ithaca train --set plan.recipe={recipe} --set mesh.ulysses={best.ulysses} --set mesh.ring={best.ring}",
    ]
    console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, str))


def _table(choices: Iterable[Choice]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ulysses × ring", no_wrap=True)
    for name in ("query heads", "inside", "across", "K, V", "exchange", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, choice in enumerate(choices):
        table.add_row(
            f"{choice.ulysses} × {choice.ring}{'  best' if number == 0 else ''}",
            _heads(choice.split),
            format_bytes(choice.inside),
            format_bytes(choice.across),
            format_bytes(choice.kv_bytes),
            format_seconds(choice.exchange),
            format_seconds(choice.seconds),
        )
    return table


def _heads(split: HeadSplit) -> str:
    """Of each rank, and by how much the fullest has more than the mean."""
    fewest, most = (choose_of(map(len, split.q)) for choose_of in (min, max))
    return str(most) if fewest == most else f"{fewest}–{most}, + {100 * imbalance(split):.0f} %"


def _object(model: str, machine: Machine, tokens: int, plan: Plan, choices: list[Choice]) -> dict[str, Any]:
    return {
        "model": model,
        "tokens": tokens,
        "recipe": plan.recipe,
        "nodes": machine.nodes,
        "gpus": machine.gpus,
        "assumed": {
            "inside_bytes_per_second": machine.inside,
            "across_bytes_per_second": machine.across,
            "flops": machine.flops,
        },
        "meshes": [
            {
                "ulysses": choice.ulysses,
                "ring": choice.ring,
                "data": choice.data,
                "imbalance": imbalance(choice.split),
                "inside_bytes": choice.inside,
                "across_bytes": choice.across,
                "kv_bytes": choice.kv_bytes,
                "computing_seconds": choice.computing,
                "exchange_seconds": choice.exchange,
                "seconds": choice.seconds,
            }
            for choice in choices
        ],
    }
