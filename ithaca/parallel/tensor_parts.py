"""Which part of every weight a tensor rank holds, as arithmetic (Megatron's tensor parallelism).

A rank has some heads and some features of the MLP: rows of the projections, gate and up, columns of the output
projection and of down. It has some tokens of the vocabulary: rows of the embedding table and of the head. So its block
is a block of a narrower model, whose outputs are summed over the ranks. Norms, and the biases that are added to such a
sum, are the same on all ranks. If there are fewer key/value heads than ranks, several ranks hold the same one
(head_split.py).

    Llama3-8B on 8 ranks     q_proj [512, 4096]   k_proj, v_proj [128, 4096]   o_proj [4096, 512]
                             gate, up [1792, 4096]   down [4096, 1792]   embedding and head [16032, 4096]
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.parallel.head_split import HeadSplit, evenly, split_heads

ALIGNED = 64  # features and tokens of the vocabulary are divided in such units, where they can be: products run faster


@dataclass(frozen=True)
class TensorPart:
    """What one tensor rank holds of a model. With one rank, everything."""

    spec: Spec  # of the whole model
    rank: int = 0
    ranks: int = 1

    @cached_property
    def split(self) -> HeadSplit:
        return split_heads(self.spec.heads, self.spec.kv_heads, self.ranks, axis="tensor")

    @cached_property
    def mlp(self) -> range:
        """Features of the MLP."""
        return _units(self.spec.mlp, self.ranks, "features of the MLP")[self.rank]

    @cached_property
    def vocabularies(self) -> list[range]:
        """Tokens of the vocabulary, of every rank."""
        return _units(self.spec.vocab, self.ranks, "tokens of the vocabulary")

    @property
    def vocab(self) -> range:
        """Tokens of the vocabulary, of this rank."""
        return self.vocabularies[self.rank]

    @cached_property
    def narrow(self) -> Spec:
        """The narrower model of this rank."""
        q, kv = self.split.q[self.rank], self.split.kv[self.rank]
        return replace(self.spec, heads=len(q), kv_heads=len(kv), mlp=len(self.mlp), vocab=len(self.vocab))

    def place(self, name: str) -> tuple[range, ...]:
        """Where this rank's part of a weight lies in the whole weight: a range for each dimension."""
        rows, columns = self._rows(name), range(self.spec.hidden)
        if name.endswith((".bias", "norm.weight")):
            return (rows,)
        if "o_proj" in name:
            columns = self._heads(self.split.q[self.rank])
        elif "down_proj" in name:
            columns = self.mlp
        return rows, columns

    def _rows(self, name: str) -> range:
        if any(part in name for part in ("q_norm", "k_norm")):
            return range(self.spec.head_size)
        if "q_proj" in name:
            return self._heads(self.split.q[self.rank])
        if "k_proj" in name or "v_proj" in name:
            return self._heads(self.split.kv[self.rank])
        if "gate_proj" in name or "up_proj" in name:
            return self.mlp
        if "embed_tokens" in name or "lm_head" in name:
            return self.vocab
        return range(self.spec.hidden)

    def _heads(self, heads: range) -> range:
        return range(heads.start * self.spec.head_size, heads.stop * self.spec.head_size)

    def holders(self, name: str) -> list[int]:
        """The ranks that hold the same part of a weight as this one, in order."""
        mine = self.place(name)
        return [rank for rank in range(self.ranks) if replace(self, rank=rank).place(name) == mine]

    def sharers(self, name: str) -> list[int]:
        """`holders` of a weight if any of its parts has several holders; else an empty list.

        Of 8 query and 2 key/value heads on 3 ranks, ranks 0 and 1 share a part, and rank 2 takes part alone.
        """
        # The same in every layer: with hundreds of layers and ranks, asking for each would take minutes
        return _sharers(self, ".".join(part for part in name.split(".") if not part.isdigit()))


@lru_cache(maxsize=256)  # every pass asks for every weight
def _sharers(part: TensorPart, name: str) -> list[int]:
    places = [replace(part, rank=rank).place(name) for rank in range(part.ranks)]
    return part.holders(name) if len(set(places)) < part.ranks else []


def _units(size: int, ranks: int, what: str) -> list[range]:
    """A range for each rank, as evenly as possible."""
    if size < ranks:
        raise PlanError(f"tensor={ranks} is more than the model's {size} {what}: 1 to {size} work")
    unit = math.gcd(size, ALIGNED) if size // math.gcd(size, ALIGNED) >= ranks else 1
    return [range(part.start * unit, part.stop * unit) for part in evenly(range(size // unit), ranks)]
