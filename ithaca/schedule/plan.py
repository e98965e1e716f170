"""A Plan is a value: everything that decides memory and speed, and nothing else does."""

from dataclasses import dataclass

from ithaca.errors import PlanError, suggestion

RECIPES = ("dense",)
CHECKPOINTS = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is run. Under every Plan the numbers are the same; memory and time differ."""

    recipe: str = "dense"
    """`dense`: each data rank takes whole sequences, without context parallelism."""

    checkpoint: str = "full"
    """What a block keeps for its backward pass. `none`: everything. `selective`: its input and the attention's output,
    so that attention runs once. `full`: its input."""

    zero: int = 3
    """What is cut over ranks: 1 optimizer states, 2 gradients too, 3 parameters too."""

    kernel: str = "auto"
    """The attention kernel; `auto` takes the fastest that the device and dtype allow."""

    loss_tile: int = 4096
    """Tokens whose logits exist at a time."""

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise PlanError(f"recipe '{self.recipe}' does not exist: {suggestion(str(self.recipe), RECIPES)}")
        if self.checkpoint not in CHECKPOINTS:
            raise PlanError(
                f"checkpoint '{self.checkpoint}' does not exist: {suggestion(str(self.checkpoint), CHECKPOINTS)}"
            )
        if type(self.zero) is not int or self.zero not in (1, 2, 3):
            raise PlanError(f"zero={self.zero} does not exist: 1, 2 and 3 do")
        if type(self.loss_tile) is not int or self.loss_tile < 1:
            raise PlanError(f"loss_tile={self.loss_tile} is no number of tokens: 4096 is")
