"""Between tokens and heads: what a block's attention needs of a tile, and gives back.

A rank holds all heads of some tokens; attention wants some heads of all tokens of the tile. One rank alone has both.
"""

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """[local tokens, all heads, …] of a tile -> [all tokens, this rank's heads, …]."""
        ...

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The way back."""
        ...


class Alone:
    """One rank: every token and every head is here."""

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors
