"""A model put together: `apply` makes it, `Model` runs it, `save_model` writes it."""

from ithaca.assemble.make import apply
from ithaca.assemble.model import Model, Substitutes
from ithaca.assemble.save import save_model

__all__ = ["Model", "Substitutes", "apply", "save_model"]
