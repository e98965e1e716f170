"""Sections on several ranks: one that fails on a rank ends neither the others nor the sections after it."""

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from ithaca.doctor import exam as exams
from ithaca.doctor.exam import Exam, Found, Section, begin, run_sections
from ithaca.parallel.mesh import mesh
from tests.nursery import Nursery


def fail_before_a_collective(exam: Exam) -> Found:
    if exam.grid.rank == 1:
        raise ValueError("this rank fails\nin two lines")
    dist.all_reduce(torch.ones(1), group=exam.grid.group)
    return {}


def section(name: str, examine: Any, conclude: Any = lambda _, told, __: {"told": told}) -> Section:
    return Section(name, examine, conclude, lambda _: [])


def raise_in_the_end(*_: Any) -> Found:
    raise KeyError("told nothing")


def examine() -> None:
    """Print what the first of the ranks concludes."""
    exams.COLLECTIVE_SECONDS = 2.0
    grid = mesh(device="cpu")
    exam = begin(grid, True, None)
    found = run_sections(
        exam,
        (
            section("first", lambda exam: {"rank": exam.grid.rank}),
            section("ends badly", lambda _: {}, raise_in_the_end),
            section("broken", fail_before_a_collective),
            section("alone", lambda exam: {"rank": exam.grid.rank}),
            section("doubtful", lambda _: {}, lambda *_: {"problems": ["a rank is slow"]}),
            section("nothing", lambda _: {}, lambda *_: {"skipped": "nothing to do"}),
        ),
    )
    print(json.dumps(found))


def test_a_rank_that_fails_while_the_others_wait(nursery: Nursery) -> None:
    ends = nursery.job(examine, ranks=3)
    assert [end.code for end in ends] == [0, 0, 0], ends
    assert [json.loads(end.out) for end in ends[1:]] == [{}, {}]
    found = json.loads(ends[0].out)
    told = [{"rank": rank} for rank in range(3)]
    assert found["first"]["told"] == found["alone"]["told"] == told
    status = {name: section["status"] for name, section in found.items()}
    assert status == {
        "first": "right",
        "ends badly": "failed",
        "broken": "failed",
        "alone": "right",
        "doubtful": "wrong",
        "nothing": "skipped",
    }
    assert found["ends badly"]["problems"] == ["KeyError: 'told nothing'"]
    zero, one, two = found["broken"]["problems"]
    assert one == "rank 1: ValueError: this rank fails"
    assert zero.startswith("rank 0: ")
    assert two.startswith("rank 2: ")


def tell_twice() -> list[list[Found] | None]:
    grid, told = mesh(device="cpu"), []
    for number in range(2):
        exam = begin(grid, True, None)
        time.sleep(0.2 * grid.rank)  # what it told before must not be taken for this
        told.append(exam.tell("a section", {"number": number}))
    return told


def test_two_examinations_of_one_job(ranks) -> None:
    first, second = ranks(2).run(tell_twice)
    assert first == [[{"number": 0}] * 2, [{"number": 1}] * 2]
    assert second == [None, None]
