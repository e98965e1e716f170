"""The model that a run starts with: as configured, as the run's own folder has it, or as the run that it comes from.

`model.rope` is applied once, when a run begins. From then on the run folder's config.json has the extended rope, and a
run that resumes takes it as it is.
"""

from dataclasses import dataclass
from pathlib import Path

from ithaca.config import Config
from ithaca.model.extend import context_length
from ithaca.model.source import ModelSource, describe_model, extend_model, load_model


@dataclass(frozen=True)
class Described:
    """A folder that describes a model whose weights a checkpoint has."""

    folder: Path
    rope: str | None = None  # the model.rope of the other run if a new run begins with its model; None: a run resumes


def load_source(config: Config) -> ModelSource:
    """Return the configured model, with the rope that is asked for if the context length is known."""
    model, tokens = config.model, config.train.tokens
    if not model.rope or tokens is None:
        return load_model(model.source, model.dtype, model.seed)
    return load_model(model.source, model.dtype, model.seed, rope=model.rope, tokens=tokens)


def find_source(config: Config, described: Described | None) -> ModelSource:
    """Return the configured model; one whose weights a checkpoint has, as a folder describes it.

    The model of another run is extended if `model.rope` is another than there, or the context is longer.
    """
    if described is None:
        return load_source(config)
    source, rope, tokens = describe_model(described.folder, config.model.dtype), config.model.rope, config.train.tokens
    if described.rope is None or not rope or tokens is None:
        return source
    if rope == described.rope and tokens <= context_length(source.spec):
        return source
    return extend_model(source, rope, tokens)
