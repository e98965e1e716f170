"""The command that trains what was planned or rehearsed. It runs as it is printed.

A plan knows no data unless `--documents` names a token file. Then the line trains on Python's standard library, to try
the Plan, and a sentence says how to train on documents of one's own.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ithaca.base.shell import token_setting, train_command
from ithaca.base.sizes import format_tokens
from ithaca.data.misfit import misfit
from ithaca.data.preparation.tokenizer import Bytes
from ithaca.data.reader import TokenFile
from ithaca.model.extend import beyond_context
from ithaca.model.folder import has_weights
from ithaca.model.presets import PRESETS
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.documents import Documents
from ithaca.plans.plan import Plan

OWN_DATA = "make a token file (ithaca data) and name it as --documents"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A planned or rehearsed job, as far as the command that trains it needs."""

    model: str  # as the user names it
    spec: Spec
    tokens: int
    plan: Plan
    axes: Axes
    nodes: int
    documents: Documents | None = None
    batch: int | None = None  # sequences in a step; None: one for each data rank
    micro_batch: int | None = None  # sequences in a pass; None: all

    @property
    def data(self) -> TokenFile | None:
        """The token file that `--documents` names; None if it names none."""
        return self.documents.data if self.documents else None

    @property
    def folder(self) -> Path | None:
        """The model's folder; None for a preset."""
        return None if self.model in PRESETS else Path(self.model)

    @property
    def extends(self) -> bool:
        """Whether a document is longer than the model's rope is made for. A preset has no trained weights."""
        reached = self.documents.longest(self.tokens) if self.documents else self.tokens
        return self.folder is not None and beyond_context(self.spec, reached, self.tokens) is not None


def next_lines(trial: Trial) -> list[str]:
    """Return the command with a line above it; only a sentence if there are no data that the model can learn."""
    if problem := _data_problem(trial):
        return [f"To train: {problem}"]
    where = (
        f", on each of the {trial.nodes} nodes (by srun or torchrun, as docs/clusters.md shows)"
        if trial.nodes > 1
        else ""
    )
    when = "" if _has_weights(trial) else f", once '{trial.model}' has its weights"
    if trial.data:
        return [f"To train{where}{when}:", _line(trial)]
    return [
        f"To train on your documents, {OWN_DATA}.",
        f"To try this Plan on Python's standard library{where}{when}:",
        _line(trial),
    ]


def next_command(trial: Trial) -> str | None:
    """Return the command alone; None if there are no data that the model can learn."""
    return None if _data_problem(trial) else _line(trial)


def _line(trial: Trial) -> str:
    named = {"model.source": trial.model, "train.tokens": token_setting(trial.tokens)}
    data = {"data.source": trial.data.path} if trial.data else {}
    rope = {"model.rope": "auto"} if trial.extends else {}
    sizes = {"train.batch": trial.batch, "train.micro_batch": trial.micro_batch}
    batch = {name: size for name, size in sizes.items() if size}
    settings = named | batch | data | rope | plan_settings(trial.plan, trial.axes)
    if trial.nodes > 1:  # srun and torchrun count the ranks, and need a run folder that all nodes know
        return train_command(settings, "--run", f"runs/{Path(trial.model).name}-{format_tokens(trial.tokens)}")
    return train_command(settings, "--ranks", trial.axes.size)


def _data_problem(trial: Trial) -> str | None:
    """Return why the model can learn neither the token file nor, without one, the default data; None if it can."""
    if trial.data:
        return misfit(trial.data, f"'{trial.data.path}'", trial.spec.vocab, trial.folder)
    if trial.spec.vocab >= Bytes.vocab:
        return None
    return f"{OWN_DATA}; the default data have {Bytes.vocab} ids, and the model's vocabulary is {trial.spec.vocab}"


def _has_weights(trial: Trial) -> bool:
    return trial.folder is None or has_weights(trial.folder)


def plan_settings(plan: Plan, axes: Axes) -> dict[str, Any]:
    """Return Plan and mesh as options of a run."""
    options = {f"plan.{name}": value for name, value in plan_options(plan).items()}
    by_heads = {"mesh.tensor": axes.tensor} if axes.tensor > 1 else {"mesh.ulysses": axes.ulysses}
    return {**options, **by_heads, "mesh.ring": axes.ring}


def plan_options(plan: Plan) -> dict[str, Any]:
    """Return the recipe of a Plan, and the options that differ from its defaults."""
    default = Plan(recipe=plan.recipe)
    given = {item.name: getattr(plan, item.name) for item in fields(plan)}
    others = {name: value for name, value in given.items() if value is not None and value != getattr(default, name)}
    return {"recipe": plan.recipe, **others}
