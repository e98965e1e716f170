"""What the check of memory counts, and whether what it advises is true."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from ithaca.base.errors import PlanError
from ithaca.base.sizes import format_bytes
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.source import load_model
from ithaca.parallel.axes import Axes
from ithaca.plans.plan import Plan
from ithaca.schedule import memory_check
from ithaca.schedule.job import Job
from ithaca.schedule.memory_check import NodeTapes, check_memory
from ithaca.tape.file import shares
from ithaca.tape.spec import device_bytes, disk_bytes, host_bytes

UNEVEN = read_spec({**PRESETS["tiny"], "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64})


def test_weights_for_rebuilt_x_are_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass without gradients rebuilds no x: it fits where its tapes fit."""
    plan = Plan(recipe="sweep", chunk=64, x="host, rebuild*3")
    job = Job(spec=load_model("tiny").spec, plan=plan, tokens=256)
    evaluation = [tape for tape in job.tapes if not tape.training]
    assert job.costs.passing_bytes(job) > 0

    def check(tapes: list, free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda _: 0)
        check_memory(job, tapes, torch.device("cuda"), NodeTapes(0, 1))

    check(evaluation, device_bytes(evaluation, job.tiles))
    with pytest.raises(PlanError, match="the GPU's free memory is"):
        check(evaluation, device_bytes(evaluation, job.tiles) - 1)
    with pytest.raises(PlanError, match="the GPU's free memory is"):
        check(job.tapes, device_bytes(job.tapes, job.tiles))


@pytest.mark.parametrize("kept", ["host", "device"])
def test_a_refusal_where_no_tape_lies_on_the_gpu(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is missing is for slots, which no shorter sequence makes smaller."""
    places = {"x": kept, "o": kept, "lse": kept, "residual": kept, "kv": kept}
    job = Job(spec=load_model("tiny").spec, plan=Plan(recipe="sweep", chunk=64, **places), tokens=256)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 1000))
    wanted = "a smaller plan.chunk or plan.tile may help" if kept == "host" else "=host frees"
    with pytest.raises(PlanError, match=wanted):
        check_memory(job, job.tapes, torch.device("cuda"), NodeTapes(0, 1))


def ranks_of(job: Job) -> list[Job]:
    """Those of a node that has the whole job."""
    return [replace(job, rank=number % job.axes.by_heads) for number in range(job.axes.size)]


def node_of(job: Job) -> NodeTapes:
    """What the ranks of a job tell each other, on CPUs."""
    ranks, folders = ranks_of(job), len(job.plan.folders)
    hosted = sum(host_bytes(rank.tapes, rank.tiles, gpu=False) for rank in ranks)
    parts = [shares(disk_bytes(rank.tapes, rank.tiles), folders) for rank in ranks] if folders else []
    return NodeTapes(hosted, len(ranks), tuple(map(sum, zip(*parts, strict=True))))


def refusal(job: Job) -> str:
    """What each rank says; nothing if the tapes fit."""
    said = set()
    for rank in ranks_of(job):
        try:
            check_memory(rank, rank.tapes, torch.device("cpu"), node_of(job))
        except PlanError as error:
            said.add(str(error))
    assert len(said) < 2
    return "".join(said)


def told(job: Job, text: str) -> tuple[Job, int]:
    """The job with the tokens, and the chunk, that a refusal names."""
    found = re.search(r"(\d+) tokens would fit(?: with plan.(chunks?)=(\d+))?$", text)
    assert found, text
    tokens, cut = int(found[1]), found[2]
    changed = replace(job, tokens=tokens, plan=replace(job.plan, **({cut: int(found[3]), "tile": None} if cut else {})))
    changed.costs.layout(changed.plan, changed.axes, tokens, shorten=False)  # refuses a chunk that is too long
    return changed, tokens


@pytest.fixture
def no_limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The free bytes, which tests set."""
    free = {"host": 10**15, "disk": 10**15}
    monkeypatch.setattr(memory_check, "host_budget", lambda: (free["host"], "free memory"))
    monkeypatch.setattr(memory_check, "free_space", lambda _: free["disk"])
    monkeypatch.setattr(memory_check, "by_file_system", lambda folders: [[*range(len(folders))]])
    monkeypatch.setattr("os.path.samefile", lambda *_: False)
    return free


PLANS = [
    {"recipe": "sweep", "chunk": 64},
    {"recipe": "sweep", "chunk": 2000},
    {"recipe": "sweep"},
    {"recipe": "sweep", "chunk": 300, "kv": "disk", "o": "disk", "disk": "/a, /b"},
    {"recipe": "fpdt", "chunks": 7, "residual": "disk", "disk": "/a"},
    {"recipe": "untied", "x": "disk", "disk": "/a, /b"},
    {"recipe": "alst"},
]


@pytest.mark.parametrize("axes", [Axes(), Axes(ulysses=3, shard=2), Axes(ulysses=2)], ids=str)
@pytest.mark.parametrize("words", PLANS, ids=lambda words: " ".join(map(str, words.values())))
def test_as_many_tokens_fit_as_are_named(words: dict, axes: Axes, no_limits: dict[str, int]) -> None:
    job, named = Job(spec=UNEVEN, plan=Plan(**words), tokens=3001, axes=axes), 0
    node = node_of(job)
    for place, share in itertools.product(("host", "disk"), (0.3, 0.6, 0.97)):
        no_limits.update(host=10**15, disk=10**15)
        no_limits[place] = int(share * (node.bytes if place == "host" else sum(node.disk)))
        text = refusal(job)
        if "tokens would fit" in text:
            fitting, tokens = told(job, text)
            assert refusal(fitting) == ""
            more = replace(fitting, tokens=tokens + fitting.layout.ranks)
            more = more if "with plan.chunk=" not in text else replace(more, plan=job.plan)
            assert refusal(more) != ""
            named += 1
    assert named


def test_a_larger_number_of_chunks(no_limits: dict[str, int]) -> None:
    """The slots of a single chunk do not fit by themselves."""
    job = Job(spec=replace(UNEVEN, layers=1), plan=Plan(recipe="fpdt", chunks=1), tokens=1001)
    no_limits["host"] = 5_000_000
    assert refusal(job).endswith("are missing; a larger plan.chunks may help")
    assert refusal(replace(job, plan=replace(job.plan, chunks=40))) == ""


def test_what_moving_frees_of_uneven_ranks(no_limits: dict[str, int]) -> None:
    """Four key/value heads on three ranks: the first has two, the others one."""
    plan = Plan(recipe="fpdt", chunks=4, kv="disk", disk="/a")
    job = Job(spec=UNEVEN, plan=plan, tokens=3072, axes=Axes(ulysses=3))
    no_limits["disk"] = 3_000_000
    freed = sum(disk_bytes(rank.tapes, rank.tiles) for rank in ranks_of(job))
    assert f"plan.kv=host frees {format_bytes(freed)}, or" in refusal(job)
