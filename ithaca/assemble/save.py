"""`save_model`: a model from its ranks into a Hugging Face folder."""

from pathlib import Path

import torch

from ithaca.assemble.model import Model
from ithaca.base.errors import ModelError
from ithaca.base.misuse import check_type
from ithaca.model.save import check_vacant, write_folder
from ithaca.model.source import DTYPES
from ithaca.parallel.agree import together
from ithaca.parallel.sharding import whole_tensors


def save_model(model: Model, folder: str | Path, dtype: str | None = None) -> None:
    """Write a Hugging Face folder that `transformers` loads. Collective; rank 0 writes.

    Each weight is written in the dtype in which it was stored (`dtype` names another); a preset's in the dtype of the
    computation.
    """
    check_type(
        model, Model, ModelError, "save_model takes the model of ithaca.apply first: save_model(model, 'folder')"
    )
    needed = "save_model takes the name of a new folder second: save_model(model, 'folder')"
    together(model.mesh.group, lambda: check_type(folder, str | Path, ModelError, needed))  # pyrefly: ignore
    # A link or '.' is written where it leads
    folder, writes = Path(folder).resolve(), model.mesh.rank == 0
    together(model.mesh.group, lambda: _check_target(folder, dtype, writes))
    dtypes = {name: _stored_dtype(model, name, dtype) for name, _ in model.spec.shapes()}
    tensors = whole_tensors(model.decoder, model.mesh, model.part)

    def write() -> None:
        try:
            if writes:
                write_folder(model.source, dtypes, tensors, folder, rename_dtype=dtype is not None)
        finally:
            # The other ranks only take part in gathering, and so does the writer after a failed write
            for _ in tensors:
                pass

    together(model.mesh.group, write)


def _check_target(folder: Path, dtype: str | None, writes: bool) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' is not supported: {', '.join(DTYPES)} are")
    if writes:
        check_vacant(folder)


def _stored_dtype(model: Model, name: str, dtype: str | None) -> torch.dtype:
    return DTYPES[dtype] if dtype else model.source.weights.stored_dtype(name) or model.dtype
