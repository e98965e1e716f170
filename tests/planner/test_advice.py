"""What is said when a GPU runs out of memory."""

import re

import pytest

from ithaca.base.sizes import format_bytes
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.planner.answer.advice import out_of_memory
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory

GIB, M = 2**30, 2**20
SPEC = read_spec(find_config("llama3-8b")[0])


def job_of(plan: Plan, tokens: int = M) -> Job:
    return Job(spec=SPEC, plan=plan, tokens=tokens, axes=Axes(ulysses=8))


@pytest.mark.parametrize(
    ("options", "helps"),
    [
        ({"recipe": "sweep", "x": "device", "o": "device"}, {"plan.x=host", "plan.o=host"}),
        ({"recipe": "sweep", "x": "device, host*3"}, {"plan.x=host"}),
        ({"recipe": "ulysses", "checkpoint": "none"}, {"plan.recipe=sweep", "plan.checkpoint=full"}),
        ({"recipe": "untied", "x": "host"}, {"plan.recipe=sweep"}),
        ({"recipe": "fpdt", "chunks": 4, "optimizer": "host"}, {"plan.chunks=8"}),
    ],
)
def test_the_sentence(options: dict[str, str | int], helps: set[str]) -> None:
    plan = Plan(**options)  # pyrefly: ignore
    said = out_of_memory(job_of(plan), "Tried to allocate 2.00 GiB", 75 * GIB, 77 * GIB, 79 * GIB)
    assert said.startswith("out of memory (Tried to allocate 2.00 GiB): torch had allocated 75 GiB and reserved 77 GiB")
    memory = step_memory(job_of(plan))
    largest = max((size, owner) for owner, size in memory.parts.items() if owner != "allocator")
    assert f"the predicted peak is {format_bytes(memory.total)}, most of it {largest[1]}" in said
    assert all(option in said for option in helps)


def test_what_is_offered_saves_what_is_said() -> None:
    said = out_of_memory(job_of(Plan(recipe="sweep")), "…", GIB, GIB, GIB)
    offers = re.findall(r"plan\.(\w+)=(\w+) takes ([^,]*) less", said)
    assert offers
    for option, value, saved in offers:
        other = Plan(**{"recipe": "sweep", option: int(value) if value.isdigit() else value})  # pyrefly: ignore
        less = step_memory(job_of(Plan(recipe="sweep"))).total - step_memory(job_of(other)).total
        assert format_bytes(less) == saved


def test_what_saves_nothing_is_not_offered() -> None:
    """Of 128 tokens a chunk of 1024 takes no less than one of 2048."""
    small = {"chunk": 2048, "tile": 1024, "loss_tile": 1024}
    plan = Plan(recipe="sweep", kv="host", lse="host", optimizer="host", **small)
    said = out_of_memory(job_of(plan, 128), "…", GIB, GIB, GIB)
    assert said.endswith(": use fewer tokens or more GPUs")
