"""What a run needs before its first step: configuration, data and model, each complete and fitting the others."""

import hashlib
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ithaca.base.errors import DataError
from ithaca.config import Config
from ithaca.data.inputs import standard_library
from ithaca.data.tokenfile import TokenFile, open_tokens
from ithaca.model.source import ModelSource, describe_model, load_model
from ithaca.model.spec import Spec
from ithaca.parallel.mesh import Mesh
from ithaca.train.auto import Chosen, Room, choose_plan
from ithaca.train.run_folder import RunFolder

CPU_TOKENS, GPU_TOKENS = 8 * 2**10, 64 * 2**10


def settle(config: Config, run: RunFolder, grid: Mesh, room: Room) -> tuple[Config, Chosen]:
    """Fill in what was not given: as the run had it when it was begun, else as suits the ranks; and choose the Plan."""
    saved = run.saved_config().train if run.begun() else config.train
    suited = GPU_TOKENS if grid.device.type == "cuda" else CPU_TOKENS
    tokens = config.train.tokens or saved.tokens or suited
    batch = config.train.batch or saved.batch
    config = replace(config, train=replace(config.train, tokens=tokens, batch=batch))
    chosen = choose_plan(config, _spec(config, run), grid, tokens, room)
    sharing = chosen[1].ring * chosen[1].ulysses
    batch = batch or (config.train.micro_batch or 1) * (grid.size // sharing)
    config = replace(config, train=replace(config.train, batch=batch))
    run.check(config)
    return config, chosen


def _spec(config: Config, run: RunFolder) -> Spec:
    named = config.model
    if run.has_checkpoints():
        return describe_model(run.model, named.dtype).spec
    return load_model(named.source, named.dtype, named.seed).spec


def open_data(config: Config) -> TokenFile:
    return open_tokens(Path(config.data.source)) if config.data.source else standard_library()


def identity(data: TokenFile) -> list[Any]:
    """What tells data from other data, cheaply: counts, tokenizer, and a checksum of both ends of the tokens."""
    ends = np.concatenate((data.tokens[:65536], data.tokens[-65536:]))
    return [len(data.tokens), data.documents, data.tokenizer, zlib.crc32(np.ascontiguousarray(ends).data)]


def open_source(config: Config, run: RunFolder, resumed: bool, data: TokenFile) -> ModelSource:
    """The model to train: as it was named or, once there are checkpoints, as the run folder describes it."""
    named = config.model
    source = describe_model(run.model, named.dtype) if resumed else load_model(named.source, named.dtype, named.seed)
    _check_vocabulary(source, data)
    return source


def _check_vocabulary(source: ModelSource, data: TokenFile) -> None:
    if data.vocab > source.spec.vocab:
        raise DataError(
            f"the data have token ids below {data.vocab}, but the model's vocabulary is {source.spec.vocab}: "
            "prepare them with the model's tokenizer (ithaca data --tokenizer)"
        )
    file = source.folder / "tokenizer.json" if source.folder else None
    if file is None or not file.exists() or data.tokenizer in ("bytes", "unknown"):
        return
    theirs = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    if data.tokenizer != theirs:
        raise DataError(
            f"'{data.path}' was made with another tokenizer ({data.tokenizer[:15]}…) than the model's "
            f"({theirs[:15]}…): prepare it with --tokenizer {source.folder}"
        )
