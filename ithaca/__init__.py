"""Ithaca trains transformers on contexts of millions of tokens, on the GPUs you have.

    model = ithaca.load_model("path/to/hf-folder")
    model = ithaca.apply(model, ithaca.Plan(checkpoint="full"), mesh=ithaca.mesh())
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-5)
    batch = model.shard(tokens, labels=tokens)
    model(batch).backward()
    optimizer.step()
    ithaca.save_model(model, "out-folder")

The names below are public, everything else is not. Importing this package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ithaca.assemble import Model, apply, save_model
    from ithaca.base.errors import ConfigError, DataError, InputError, IthacaError, ModelError, PlanError
    from ithaca.model.source import ModelSource, load_model
    from ithaca.model.spec import Spec
    from ithaca.optimizer.adamw import make_optimizer
    from ithaca.parallel.batch import Batch
    from ithaca.parallel.mesh import Mesh, mesh
    from ithaca.planner.command import plan
    from ithaca.plans.plan import Plan
    from ithaca.schedule.sweep.placement import place

_MODULES = {
    "Batch": "ithaca.parallel.batch",
    "ConfigError": "ithaca.base.errors",
    "DataError": "ithaca.base.errors",
    "InputError": "ithaca.base.errors",
    "IthacaError": "ithaca.base.errors",
    "Mesh": "ithaca.parallel.mesh",
    "Model": "ithaca.assemble",
    "ModelError": "ithaca.base.errors",
    "ModelSource": "ithaca.model.source",
    "Plan": "ithaca.plans.plan",
    "PlanError": "ithaca.base.errors",
    "Spec": "ithaca.model.spec",
    "apply": "ithaca.assemble",
    "load_model": "ithaca.model.source",
    "make_optimizer": "ithaca.optimizer.adamw",
    "mesh": "ithaca.parallel.mesh",
    "place": "ithaca.schedule.sweep.placement",
    "plan": "ithaca.planner.command",
    "save_model": "ithaca.assemble",
}

__all__ = [  # noqa: RUF022 (the order of use)
    "load_model",
    "Plan",
    "plan",
    "place",
    "mesh",
    "apply",
    "make_optimizer",
    "save_model",
    "Model",
    "ModelSource",
    "Spec",
    "Mesh",
    "Batch",
    "IthacaError",
    "ModelError",
    "PlanError",
    "InputError",
    "DataError",
    "ConfigError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ithaca' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
