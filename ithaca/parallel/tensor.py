"""The collectives of tensor ranks, which hold parts of every weight and share each sequence by tokens.

Between the layers of a block each rank has its own tokens with all features (Megatron's sequence parallelism):

    gather    [n, E] of each rank   ->  [t · n, E], one rank's tokens behind the other's
    reduce    the inverse, a reduce-scatter: the sum over all ranks for this rank's tokens

Each sends (t − 1) · n · E numbers of a rank, in the dtype of the computation. Weights that several ranks hold, such as
norms, get gradients of only some tokens or heads on each of these ranks: `share_gradients` sums them.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from ithaca.base.owners import EXCHANGE, owned_by
from ithaca.parallel.collectives import Group
from ithaca.parallel.tensor_parts import TensorPart


class TensorSpread:
    """The collectives between this rank's tokens and those of all tensor ranks (model/linear.py:Spread)."""

    def __init__(self, group: Group | None):
        self._group = group
        self.ranks, self.rank = (group.ranks, group.rank) if group else (1, 0)

    @owned_by(EXCHANGE)
    def gather(self, x: Tensor) -> Tensor:
        """[t · n, …] of all ranks, in their order."""
        if self._group is None:
            return x
        x = x.contiguous()
        every = x.new_empty(self.ranks * len(x), *x.shape[1:])
        self._group.all_gather(every.view(-1), x.view(-1)).wait()
        return every

    @owned_by(EXCHANGE)
    def reduce(self, y: Tensor) -> Tensor:
        """[n, …], the sum over all ranks for this rank's tokens."""
        if self._group is None:
            return y
        total = y.new_empty(len(y) // self.ranks, *y.shape[1:])
        self._group.reduce_scatter(total.view(-1), y.contiguous().view(-1)).wait()
        return total

    def share_gradients(self, part: TensorPart, w: Mapping[str, Tensor]) -> None:
        """Have backward passes sum the gradients of weights that several ranks hold, in the order of the ranks.

        Every rank gets the same sum, bit by bit, so the copies of a weight stay equal. A weight keeps its hook, and
        gets it once.
        """
        for name, weight in w.items():
            holders = part.sharers(name)
            if holders and weight.requires_grad and not hasattr(weight, "shares_gradient"):
                weight.register_hook(partial(self._summed, holders))
                weight.shares_gradient = True  # pyrefly: ignore

    def _summed(self, holders: Sequence[int], gradient: Tensor) -> Tensor:
        every = self.gather(gradient[None])
        total = every[holders[0]].clone()
        for rank in holders[1:]:
            total += every[rank]
        return total
