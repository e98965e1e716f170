"""`ithaca bench peers`: Ithaca and other programs on one device, in turn. No torch.

Every round gives every side a turn, each in a process of its own, because Liger patches transformers for good. What a
side measures is in peer_sides.py.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.sizes import format_bytes, format_seconds, format_tokens
from ithaca.bench.ask import Ask
from ithaca.bench.peer_names import PACKAGES
from ithaca.bench.run import Options, Task, find_here, run
from ithaca.bench.store import Store, Stored

Json = dict[str, Any]
LAYERS = 2  # of a large model


def run_peers(
    model: str,
    layers: int | None,
    lengths: Sequence[int],
    rounds: int,
    path: Path | None,
    attention: str,
    options: Options,
) -> None:
    """Measure every side at every length in every round."""
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds} measures nothing: give 1 or more")
    if path is not None and not path.is_dir():
        raise ConfigError(f"--path {path} is not a folder: name one with packages in it")
    here = find_here(model, options)
    count = min(LAYERS, here.spec.layers) if layers is None else layers
    if not 1 <= count <= here.spec.layers:
        raise ConfigError(
            f"--layers {count} cannot be run: '{model}' has {here.spec.layers}, so 1 to {here.spec.layers} can"
        )
    asked = {"model": model, "layers": count, "attention": attention}
    tasks = [
        _task({**asked, "side": side, "tokens": tokens, "round": number + 1}, path)
        for tokens in lengths
        for number in range(rounds)
        for side in PACKAGES
    ]
    run(tasks, Store(options.out, "peers", model, here.spec, f"{count}-layers-{attention}"), here, options, peer_line)


def _task(question: Json, path: Path | None) -> Task:
    name = f"{format_tokens(question['tokens'])} round {question['round']}: {question['side']}"
    request = {"kind": "peer", **question, "path": str(path.resolve()) if path else None}
    return Task(name=name, question=question, about={}, predict=lambda: None, measure=partial(_measure, request))


def _measure(request: Json, ask: Ask) -> Json:
    return ask(request)


def peer_line(row: Stored) -> str:
    """One line of a side: its seconds, and its memory beside weights and gradients."""
    found = row.answer
    if not found or not found["ran"]:
        return f"{row.name}: {found['why'] if found else 'not run yet'}"
    beside = found["bytes_beside"]
    memory = f", {format_bytes(beside)} beside weights and gradients" if beside else ""
    return f"{row.name}: {format_seconds(found['seconds'])}{memory}, {found['attention']}"
