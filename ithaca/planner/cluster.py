"""The GPUs that are planned for, and what of them, of their nodes' memory and of their disks a Plan may take."""

from dataclasses import dataclass, replace

from ithaca.base.errors import PlanError
from ithaca.planner.hardware import Gpu
from ithaca.planner.machine import MOST_GPUS, Machine
from ithaca.tape.budget import KEPT_BACK

RUNTIME = 1_500_000_000  # bytes of a GPU that the driver and NCCL take: assumed
MARGIN = 0.04  # of a GPU, by which a prediction may be off (bench/results/rehearsals-fresh.json)


@dataclass(frozen=True)
class Cluster:
    """The GPUs that are planned for, with what their nodes have; `host` and `disk` are bytes of a node."""

    count: int
    gpu: Gpu
    host: float
    disk: float = 0.0
    node_gpus: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_GPUS:
            raise PlanError(f"--gpus {self.count}x{self.gpu.name} cannot be planned for: 1 to {MOST_GPUS} GPUs can")
        if self.count > self.node_gpus and self.count % self.node_gpus:
            below = self.count - self.count % self.node_gpus
            raise PlanError(
                f"--gpus {self.count}x{self.gpu.name} does not fill nodes of {self.node_gpus} GPUs: {below} or "
                f"{below + self.node_gpus} do, or say how many a node has with --node-gpus"
            )

    @property
    def machine(self) -> Machine:
        nodes = max(self.count // self.node_gpus, 1)
        return Machine(nodes=nodes, gpus=self.count // nodes, inside=self.gpu.inside, across=self.gpu.across)

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that a Plan may be predicted to take."""
        return max(int((1 - MARGIN) * self.gpu.memory) - RUNTIME, 0)

    def of_host(self) -> int:
        """Bytes of its node's memory that a rank may take."""
        return int((1 - KEPT_BACK) * self.host / self.machine.gpus)

    def of_disk(self) -> int:
        return int(self.disk / self.machine.gpus)

    def resized(self, count: int) -> "Cluster":
        """With more or fewer GPUs. A node keeps its memory; part of one has its share."""
        share = min(count, self.node_gpus) / self.machine.gpus
        return replace(self, count=count, host=self.host * share, disk=self.disk * share)

    def sharing(self) -> list[int]:
        """Numbers of GPUs that can share a sequence while the others do the same."""
        return [size for size in range(1, self.count + 1) if self.count % size == 0]
