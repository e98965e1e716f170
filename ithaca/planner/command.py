"""`ithaca plan` from its options, and `ithaca.plan`: which GPUs, with what numbers, and what their nodes have."""

from pathlib import Path

from ithaca.base.errors import PlanError
from ithaca.base.sizes import parse_bytes, parse_tokens
from ithaca.model.spec import Spec
from ithaca.planner.cluster import Cluster
from ithaca.planner.explain import Asked
from ithaca.planner.fitting import LONGEST, SHORTEST
from ithaca.planner.hardware import Gpu, parse_gpus, read_gpus
from ithaca.planner.longest import longest
from ithaca.planner.machine import MOST_ON_A_NODE
from ithaca.planner.search import search
from ithaca.planner.show_plan import refusal
from ithaca.planner.show_plan import run as show
from ithaca.plans.plan import Plan

USUAL = "8xH100-80GB"
MOST_BYTES = 1e18  # of a node's memory, and of its disk


def run(
    model: str,
    gpus: str | None,
    tokens: str,
    host: str | None,
    disk: str,
    recipe: str | None,
    node_gpus: int,
    hardware: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    if not 1 <= node_gpus <= MOST_ON_A_NODE:
        raise PlanError(f"--node-gpus {node_gpus} cannot be planned for: 1 to {MOST_ON_A_NODE} can")
    wanted = None if tokens == "max" else parse_tokens(tokens)
    if wanted is not None and not SHORTEST <= wanted <= LONGEST:
        raise PlanError(f"--tokens {tokens} cannot be planned for: {SHORTEST}, a tile of attention, to 4096M can")
    count, gpu = parse_gpus(USUAL if gpus is None else gpus, read_gpus(hardware))
    show(model, cluster_of(count, gpu, host, disk, node_gpus), wanted, recipe, as_json, picture)


def plan(
    spec: Spec,
    gpus: str = USUAL,
    *,
    tokens: int | str,
    host: str | None = None,
    disk: str = "0",
    recipe: str | None = None,
) -> Plan:
    """The fastest Plan for a context of `tokens` tokens on some GPUs, as `ithaca plan` finds it.

    Raises PlanError where none fits. `host` and `disk` are what a node has, as 1.9TB; not given: what is usual, and no
    disk. Which ranks should share a sequence is said by `ithaca plan` and `ithaca mesh`.
    """
    count, gpu = parse_gpus(gpus, read_gpus())
    cluster, wanted = cluster_of(count, gpu, host, disk), parse_tokens(tokens)
    answer = search(spec, cluster, wanted, recipe)
    if answer is None:
        asked = Asked(spec.family, spec, cluster, wanted, recipe)
        raise PlanError(refusal(asked, longest(spec, cluster, recipe)))
    return answer.plan


def cluster_of(count: int, gpu: Gpu, host: str | None, disk: str, node_gpus: int = 8) -> Cluster:
    sizes = {
        "host": gpu.ram * min(count, node_gpus) if host is None else parse_bytes(host),
        "disk": 0 if disk == "0" else parse_bytes(disk),
    }
    for name, size in sizes.items():
        if size > MOST_BYTES:
            given, most = (f"{number / 1e12:.7g}TB" for number in (size, MOST_BYTES))
            raise PlanError(f"--{name} {given} cannot be planned for: up to {most} can")
    return Cluster(count=count, gpu=gpu, node_gpus=node_gpus, **sizes)
