"""The hardware that a Plan is made for: GPUs by name, nodes with their links, and the memory that a Plan may use.

The table of GPUs is `hardware.toml` beside this file. Every number has its source. A TOML file of the user, in the same
form, adds GPUs or replaces numbers. If the rate of a kernel was not measured on a GPU, the planner assumes the share of
the peak that the kernel reaches on the H200, and says so. Files of older releases have one `attention_forward` and one
`attention_backward` for a GPU: these were measured with `cudnn+flash`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ithaca.base.errors import PlanError, suggestion
from ithaca.base.files import read_small
from ithaca.model.spec import Spec
from ithaca.planner.relatives import suggest_gpu
from ithaca.tape.budget import KEPT_BACK
from ithaca.tape.spec import DISK_RATE, Budget

MEASURED_ON = "H200-141GB"
CPU = "CPU"  # the name of a machine without GPUs, in a table that `ithaca doctor` wrote
EXAMPLE = '["H200-141GB".attention.flash4]'
NEEDED = 'write a number and its source, as [55e9, "measured"]'
LARGEST = 1e24  # the largest number that the table may hold; larger ones would overflow later
HERE = "measured by --measure"  # the source of a number that was measured on the user's own GPU
DIRECTIONS = ("forward", "backward", "forward_64", "backward_64")
OLD_KERNEL = "cudnn+flash"  # the kernel of rates that name none
OLD_RATES = {"attention_forward": "forward", "attention_backward": "backward"}
ASSUMED_DISK = "assumed: `ithaca doctor --disk FOLDER` measures it"
DISK_NUMBERS = ("disk_read", "disk_write")
NARROW = 64  # features of a head: up to here the rates of head size 64 count
AMPERE = 8.0


@dataclass(frozen=True)
class AttentionRates:
    """FLOP/s of one attention kernel; backward has 2.5 times the FLOPs of forward."""

    kernel: str
    forward: float
    backward: float
    forward_64: float  # with heads of 64 features
    backward_64: float

    def of(self, head_size: int) -> tuple[float, float]:
        """Forward and backward."""
        forward, backward = (getattr(self, name) for name in rate_names(head_size))
        return forward, backward


def rate_names(head_size: int) -> tuple[str, ...]:
    """The names of the rates, forward and backward, for a head size."""
    return DIRECTIONS[2:] if head_size <= NARROW else DIRECTIONS[:2]


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. hardware.toml says what each number means; `sources` says where each comes from."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    inside: float
    across: float
    host: float
    ram: float
    matmul: float
    launches: float
    disk_read: float
    disk_write: float
    capability: tuple[int, int]  # CUDA compute capability
    attention: tuple[AttentionRates, ...]
    sources: Mapping[str, str] = field(compare=False)
    described: tuple[str, ...] = ()  # kernels whose rates a user's file names, so that they are where it trains

    def rates(self, kernel: str) -> AttentionRates | None:
        """The rates of an attention kernel; None if the table has none of that name."""
        return next((rates for rates in self.attention if rates.kernel == kernel), None)


NO_NUMBERS = ("name", "capability", "attention", "sources", "described")
NUMBERS = tuple(item.name for item in fields(Gpu) if item.name not in NO_NUMBERS)


def read_gpus(more: Path | None = None) -> dict[str, Gpu]:
    """All known GPUs by name: the table's, and those of another file."""
    tables, described = dict(_own_table()), {}
    for name, table in (_read(more) if more else {}).items():
        known, given = tables.get(name, {}), _attention_tables(name, table)
        attention = {**known.get("attention", {}), **given}
        described[name] = tuple(kernel for kernel, rates in given.items() if rates)
        numbers = {number: value for number, value in table.items() if number not in OLD_RATES}
        tables[name] = {**known, **numbers, "attention": attention}
    # A user's file may leave rates of the H200 out as well: they follow from our own
    measured = _gpu(MEASURED_ON, tables[MEASURED_ON], _gpu(MEASURED_ON, _own_table()[MEASURED_ON], None))
    found = {name: _gpu(name, table, measured) for name, table in tables.items()}
    return {name: replace(gpu, described=described.get(name, ())) for name, gpu in found.items()}


def _attention_tables(name: str, table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rates of each attention kernel in a user's table, also if it is of an older release."""
    tables = table.get("attention", {})
    if not isinstance(tables, dict):
        raise PlanError(f"attention of GPU '{name}' is {tables}: write a table for each kernel, as {EXAMPLE}")
    measured = _own_table()[MEASURED_ON]["attention"]
    for kernel, rates in tables.items():
        if kernel not in measured:
            raise PlanError(f"GPU '{name}' has rates of an unknown kernel '{kernel}': {suggestion(kernel, measured)}")
        if not isinstance(rates, dict):
            raise PlanError(f"attention.{kernel} of GPU '{name}' is {rates}: write a table, as {EXAMPLE}")
    old = {}
    for number in OLD_RATES.keys() & table.keys():
        figure, source = _figure(name, number, table[number])
        old[OLD_RATES[number]] = [figure, f"{source}; the file names no kernel, so it is that of {OLD_KERNEL}"]
    return {**({OLD_KERNEL: old} if old else {}), **tables}


def parse_gpus(text: str, known: Mapping[str, Gpu]) -> tuple[int, Gpu]:
    """'8xH100-80GB' -> (8, that GPU). Without a number it is one GPU; 'H100' is enough if there is only one H100."""
    found = re.fullmatch(r"(?:(\d+)\s*[xX×]\s*)?(.+)", text.strip())
    # Twenty digits are enough to be refused
    count, name = (int((found[1] or "1")[:20]), found[2]) if found else (1, text)
    if count < 1:
        raise PlanError(f"--gpus {text} has {count} GPUs: give 1 or more, as 8x{name}")
    matches = [gpu for other, gpu in known.items() if name.upper() in (other.upper(), _stem(other))]
    if len(matches) > 1:
        raise PlanError(
            f"--gpus {text}: GPU '{name}' could be {' or '.join(gpu.name for gpu in matches)}: name one of them"
        )
    if not matches:
        memory = {other: gpu.memory for other, gpu in known.items()}
        if re.fullmatch(r"\d{1,3}", text.strip()):  # names of GPUs have four digits
            raise PlanError(f"--gpus {text} names no GPU: write which, as {name}xH100-80GB")
        raise PlanError(f"--gpus {text}: GPU '{name}' is not known: {suggest_gpu(name, count, memory)}")
    return count, matches[0]


def _stem(name: str) -> str:
    """The name without the memory: 'H100' of 'H100-80GB'."""
    return name.upper().split("-")[0]


def nearest(name: str, memory: int, known: Mapping[str, Gpu]) -> Gpu:
    """The known GPU that a driver reports by this name and with this memory."""
    letters = name.upper().replace(" ", "")
    matches = [gpu for gpu in known.values() if _stem(gpu.name) in letters]
    if not matches:
        raise PlanError(f"'{name}' is not a known GPU: describe it in a file (--hardware), as hardware.toml does")
    longest = max(len(_stem(gpu.name)) for gpu in matches)  # 'GH200' also contains 'H200'
    return min((gpu for gpu in matches if len(_stem(gpu.name)) == longest), key=lambda gpu: abs(gpu.memory - memory))


def find_gpu(name: str, memory: int, known: Mapping[str, Gpu]) -> Gpu | None:
    """The GPU that `nearest` finds; None if no table describes it."""
    try:
        return nearest(name, memory, known)
    except PlanError:
        return None


def peak_flops(name: str, memory: int) -> float | None:
    """Return the peak FLOP/s of a GPU (dense bf16) that MFU is measured against; None if no table describes it."""
    gpu = find_gpu(name, memory, read_gpus())
    return gpu.flops if gpu else None


def causal_mfu(spec: Spec, attended: float, tokens_per_second: float, peak: float) -> float:
    """Causal MFU: FLOPs that a GPU needs for its tokens per second, without recomputation, as a share of its peak.

    `attended`: tokens of the sequence, or Σ length² / tokens for several documents (`Spec.flops_per_token`).
    """
    return tokens_per_second * spec.flops_per_token(attended) / peak


def _gpu(name: str, table: Mapping[str, Any], measured: Gpu | None) -> Gpu:
    """The GPU of a table; `measured`: the one from which missing rates are derived, None if none is missing."""
    numbers: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for number in NUMBERS:
        if number in table:
            numbers[number], sources[number] = _figure(name, number, table[number])
        elif number == "matmul" and "flops" in numbers and measured:
            numbers[number] = numbers["flops"] * measured.matmul / measured.flops
            sources[number] = _assumed(measured.matmul / measured.flops)
        elif number == "launches" and measured:
            numbers[number], sources[number] = measured.launches, f"assumed: the host of the {MEASURED_ON}"
        elif number in DISK_NUMBERS:
            numbers[number], sources[number] = DISK_RATE, ASSUMED_DISK
        else:
            raise PlanError(f"GPU '{name}' has no {number}: {NEEDED}")
    known = (*NUMBERS, "capability", "attention")
    unknown = [word for word in table if word not in known]
    if unknown:
        raise PlanError(f"GPU '{name}' has an unknown number '{unknown[0]}': {suggestion(unknown[0], known)}")
    capability, sources["capability"] = _figure(name, "capability", table.get("capability", [AMPERE, "assumed"]))
    major, minor = f"{capability:.1f}".split(".")
    attention = []
    given = table.get("attention", {})
    for kernel in [rates.kernel for rates in measured.attention] if measured else given:
        rates, found = _kernel_rates(name, kernel, given.get(kernel, {}), numbers["flops"], measured)
        attention.append(rates)
        sources |= {f"attention.{kernel}.{number}": source for number, source in found.items()}
    return Gpu(name, **numbers, capability=(int(major), int(minor)), attention=tuple(attention), sources=sources)


def _kernel_rates(
    name: str, kernel: str, given: Mapping[str, Any], flops: float, measured: Gpu | None
) -> tuple[AttentionRates, dict[str, str]]:
    """The rates of one kernel and their sources.

    A missing one of head size 64 follows from that of 128. If neither is given, both follow from this GPU's peak.
    """
    unknown = [word for word in given if word not in DIRECTIONS]
    if unknown:
        hint = suggestion(unknown[0], DIRECTIONS)
        raise PlanError(f"attention.{kernel} of GPU '{name}' has an unknown rate '{unknown[0]}': {hint}")
    rates: dict[str, float] = {}
    sources: dict[str, str] = {}
    for number in DIRECTIONS:
        wide = number.removesuffix("_64")
        if number in given:
            rates[number], sources[number] = _figure(name, f"attention.{kernel}.{number}", given[number])
            continue
        assert measured is not None
        there = measured.rates(kernel)
        if wide in given:
            ratio = getattr(there, number) / getattr(there, wide)
            rates[number] = ratio * rates[wide]
            sources[number] = f"assumed: {100 * ratio:.0f} % of head size 128, as measured on the {MEASURED_ON}"
        else:
            share = getattr(there, number) / measured.flops
            rates[number], sources[number] = share * flops, _assumed(share)
    return AttentionRates(kernel, **rates), sources


def _assumed(share: float) -> str:
    return f"assumed: {100 * share:.0f} % of the peak, as measured on the {MEASURED_ON}"


def _figure(name: str, number: str, value: Any) -> tuple[float, str]:
    """One entry of a table, checked: the number and its source."""
    match value:
        case [int() | float() as figure, str() as source] if not isinstance(figure, bool) and 1 <= figure <= LARGEST:
            return float(figure), source
        case [int() | float() as figure, str()] if figure > LARGEST:
            raise PlanError(f"{number} of GPU '{name}' is too large: give at most {LARGEST:g}")
    raise PlanError(f"{number} of GPU '{name}' is {value}: {NEEDED}")


@lru_cache
def _own_table() -> dict[str, Any]:
    return tomllib.loads((files("ithaca.planner") / "hardware.toml").read_text(encoding="utf-8"))


def _read(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(read_small(path).decode())
    except OSError as problem:
        raise PlanError(f"'{path}' cannot be read ({problem.strerror}): name a file as `--measure` writes it") from None
    except (ValueError, RecursionError) as problem:
        raise PlanError(f"'{path}' cannot be read as TOML ({problem})") from None
    wrong = [name for name, table in tables.items() if not isinstance(table, dict)]
    if wrong:
        raise PlanError(
            f"'{wrong[0]}' in '{path}' is not a GPU: write a table of numbers, as in ithaca/planner/hardware.toml"
        )
    return tables


# Nodes and links

MOST_GPUS = 2**20  # in a job
MOST_ON_A_NODE = 576  # the largest NVLink domain that has been announced


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of GPUs and the speeds of their links. The defaults suit H100 and H200 (SXM) and are not measured."""

    nodes: int
    gpus: int  # on each node
    inside: float = 450e9  # bytes/s from a GPU to the others of its node: NVLink 4, one direction, data sheet
    across: float = 50e9  # bytes/s from a GPU to other nodes: one network card of 400 Gbit/s per GPU

    def __post_init__(self) -> None:
        for name, most in (("nodes", MOST_GPUS), ("gpus", MOST_ON_A_NODE)):
            count = getattr(self, name)
            if type(count) is not int or not 1 <= count <= most:
                raise PlanError(f"--{name} {count} is out of range: give 1 to {most}")
        if self.ranks > MOST_GPUS:
            raise PlanError(f"{self.nodes} nodes of {self.gpus} GPUs are {self.ranks} GPUs: give at most {MOST_GPUS}")

    @property
    def ranks(self) -> int:
        """GPUs on all nodes."""
        return self.nodes * self.gpus

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.gpus


RUNTIME = 1_500_000_000  # bytes of a GPU that the driver and NCCL take: assumed
MARGIN = 0.04  # share of a GPU's memory kept free for errors of prediction (bench/results/rehearsals-fresh.json)


NODE = 8  # GPUs on a node, unless the user says otherwise


@dataclass(frozen=True)
class Cluster:
    """The GPUs that a Plan is made for, with the memory and disk of their nodes."""

    count: int  # GPUs on all nodes
    gpu: Gpu
    host: float  # bytes of memory of each node
    disk: float = 0.0  # bytes of disk of each node
    node_gpus: int = NODE  # GPUs on each node; a job on part of one node has fewer
    copies: int = 1  # copies of the parameters in the job, each on this many GPUs
    passes: int = 1  # of a step, one after the other (micro-batches)
    kernels: tuple[str, ...] | None = None  # that attention can run with, the preferred first; None: as their facts say
    kernel: str = "auto"  # the attention kernel that the Plan must have
    usual: bool = False  # the host's memory was not given: it is the usual one for the GPUs on a node

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_GPUS:
            raise PlanError(f"--gpus {self.count}x{self.gpu.name} is out of range: give 1 to {MOST_GPUS} GPUs")
        if self.count > self.node_gpus and self.count % self.node_gpus:
            below = self.count - self.count % self.node_gpus
            raise PlanError(
                f"--gpus {self.count}x{self.gpu.name} does not fill nodes of {self.node_gpus} GPUs: use {below} or "
                f"{below + self.node_gpus}, or give nodes and GPUs per node, as {self._nodes_example()}"
            )

    def _nodes_example(self) -> str:
        """The same GPUs as nodes × GPUs per node, of as many as fit on a node."""
        gpus = max(size for size in range(1, self.node_gpus) if self.count % size == 0)
        return f"{self.count // gpus}x{gpus}x{self.gpu.name}"

    @property
    def gpus(self) -> str:
        """The GPUs as --gpus takes them: '16xH100-80GB', or '4x4xH100-80GB' if the nodes do not have 8."""
        nodes, on_each = self.machine.nodes, self.machine.gpus
        plain = self.node_gpus == NODE or self.count <= min(self.node_gpus, NODE)
        return f"{self.count}x{self.gpu.name}" if plain else f"{nodes}x{on_each}x{self.gpu.name}"

    @property
    def machine(self) -> Machine:
        """The nodes that the GPUs fill, with the links of this kind of GPU."""
        nodes = max(self.count // self.node_gpus, 1)
        return Machine(nodes=nodes, gpus=self.count // nodes, inside=self.gpu.inside, across=self.gpu.across)

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that a Plan may use, by prediction."""
        return max(int((1 - MARGIN) * self.gpu.memory) - RUNTIME, 0)

    @property
    def budget(self) -> Budget:
        """Bytes that a rank may use of its GPU, and as its share of the node's memory and disk."""
        host = int((1 - KEPT_BACK) * self.host / self.machine.gpus)
        return Budget(self.capacity, host, int(self.disk / self.machine.gpus), self.passes)

    def limited(self, capacity: int) -> "Cluster":
        """This cluster with GPUs of which a Plan may use `capacity` bytes."""
        memory = (capacity + RUNTIME + 1) / (1 - MARGIN)
        return replace(self, gpu=replace(self.gpu, memory=memory))

    def resized(self, count: int) -> "Cluster":
        """This cluster with `count` GPUs. Memory and disk of a node stay as they were given, as --host and --disk."""
        share = min(count, self.node_gpus) / self.machine.gpus if self.usual else 1.0
        return replace(self, count=count, host=self.host * share)

    def sharing(self) -> list[int]:
        """The numbers of GPUs that can share a sequence: the divisors of their count."""
        return [size for size in range(1, self.count + 1) if self.count % size == 0]
