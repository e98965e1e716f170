"""The GPUs that a plan is for, and how fast they compute and send."""

from dataclasses import dataclass

from ithaca.base.errors import PlanError

MOST_GPUS = 2**20  # of a job
MOST_ON_A_NODE = 576  # the largest domain of NVLink that is announced


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of GPUs. The speeds are those of the H100 and H200 (SXM); none of the links was measured here."""

    nodes: int
    gpus: int  # on each
    inside: float = 450e9
    """Bytes a second that a GPU sends to others of its node: NVLink 4, as NVIDIA states it for one direction."""
    across: float = 50e9
    """Bytes a second that a GPU sends to other nodes: a network card of 400 Gbit/s for each."""
    flops: float = 500e12
    """Of attention and matrix products, a second: about what kernels of one H200 reach at length, in bf16."""

    def __post_init__(self) -> None:
        for name, most in (("nodes", MOST_GPUS), ("gpus", MOST_ON_A_NODE)):
            count = getattr(self, name)
            if type(count) is not int or not 1 <= count <= most:
                raise PlanError(f"--{name} {count} cannot be planned for: 1 to {most} can")
        if self.ranks > MOST_GPUS:
            raise PlanError(
                f"{self.nodes} nodes of {self.gpus} GPUs are {self.ranks}: up to {MOST_GPUS} can be planned for"
            )

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    def node(self, rank: int) -> int:
        return rank // self.gpus

    def describe(self) -> str:
        inside, across = (f"{speed / 1e9:.4g} GB/s" for speed in (self.inside, self.across))
        return f"{inside} from a GPU inside its node, {across} to other nodes, {self.flops / 1e12:.4g} TFLOP/s"
