"""The model of a run as a Hugging Face folder: `ithaca export RUN DIR`. Runs in one process, on the CPU."""

from pathlib import Path

from ithaca.assemble import apply, save_model
from ithaca.base.errors import ConfigError, ModelError
from ithaca.model.save import check_vacant
from ithaca.model.source import describe_model
from ithaca.parallel.mesh import mesh
from ithaca.plans.plan import Plan
from ithaca.train.checkpoint import Checkpoints
from ithaca.train.run_folder import RunFolder


def export(path: Path, folder: Path, dtype: str | None) -> int:
    """Write the newest sound checkpoint's weights; gives its step."""
    run = RunFolder(path)
    if not run.begun():
        raise ConfigError(f"'{path}' is not a run folder: it has no config.toml")
    check_vacant(folder)
    if not run.has_checkpoints():
        raise ModelError(f"'{path}' has no checkpoint yet: train it further, ithaca train --run {path}")
    source = describe_model(run.model, "float64" if run.saved_config().model.dtype == "float64" else "float32")
    model = apply(source, Plan(), mesh(device="cpu"))
    manifest = Checkpoints(run.checkpoints, model, None, keep=1).load(print, repair=False)
    assert manifest is not None
    save_model(model, folder, dtype)
    return manifest["step"]
