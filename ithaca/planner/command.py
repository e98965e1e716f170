"""`ithaca plan` from its options: which GPUs, with what numbers, and what their nodes have."""

from pathlib import Path

from ithaca.errors import PlanError
from ithaca.planner.hardware import Gpu, parse_gpus, read_gpus
from ithaca.planner.machine import MOST_ON_A_NODE
from ithaca.planner.search import LONGEST, SHORTEST, Cluster
from ithaca.planner.show_plan import run as show
from ithaca.sizes import parse_bytes, parse_tokens

USUAL = "8xH100-80GB"


def run(
    model: str,
    gpus: str | None,
    tokens: str,
    host: str | None,
    disk: str,
    recipe: str | None,
    node_gpus: int,
    hardware: Path | None,
    measure: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    if not 1 <= node_gpus <= MOST_ON_A_NODE:
        raise PlanError(f"--node-gpus {node_gpus} cannot be planned for: 1 to {MOST_ON_A_NODE} can")
    wanted = None if tokens == "max" else parse_tokens(tokens)
    if wanted is not None and not SHORTEST <= wanted <= LONGEST:
        raise PlanError(f"--tokens {tokens} cannot be planned for: {SHORTEST}, a tile of attention, to 4096M can")
    if measure:
        from ithaca.rehearsal.measure import measure_here  # only now: torch takes its time

        if hardware:
            raise PlanError(f"--measure {measure} and --hardware {hardware} both name rates: give one of them")
        gpus, hardware = gpus or f"8x{measure_here(measure)}", measure
    count, gpu = parse_gpus(gpus or USUAL, read_gpus(hardware))
    show(model, cluster_of(count, gpu, host, disk, node_gpus), wanted, recipe, as_json, picture)


def cluster_of(count: int, gpu: Gpu, host: str | None, disk: str, node_gpus: int = 8) -> Cluster:
    return Cluster(
        count=count,
        gpu=gpu,
        host=parse_bytes(host) if host else gpu.ram * min(count, node_gpus),
        disk=0 if disk == "0" else parse_bytes(disk),
        node_gpus=node_gpus,
    )
