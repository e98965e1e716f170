"""The campaign of tests/schedule/random_plans: a few cases, dozens with `make test-all`. Its judge can fail."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ithaca.plans.recipes import RECIPES
from ithaca.schedule.costs import Copies
from tests.schedule.counting import Copied, Sent
from tests.schedule.random_plans import judge as judging
from tests.schedule.random_plans.__main__ import WORLDS, table
from tests.schedule.random_plans.cases import Case, make_case
from tests.schedule.random_plans.judge import Verdict, judge, prepare, run_case

FEW = (4, 8, 11, 14, 24, 30, 34, 53)  # seeds of small cases: of most recipes, on 1 to 8 ranks
MORE = range(60)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed in FEW else pytest.mark.full) for seed in MORE])
def test_random_plan(ranks, tmp_path: Path, seed: int) -> None:
    case = make_case(seed)
    verdict = judge(case, ranks(1), ranks(case.world), tmp_path)
    assert not verdict.findings, "\n".join((str(case), *verdict.findings))


def test_a_seed_makes_one_case_and_many_make_all_kinds() -> None:
    cases = [make_case(seed) for seed in range(400)]
    assert cases == [make_case(seed) for seed in range(400)]
    assert {case.recipe for case in cases} == set(RECIPES)
    assert {case.world for case in cases} == set(WORLDS)
    assert {len(case.batches) for case in cases} == {1, 2, 3}


def test_the_table_counts_everything() -> None:
    case = make_case(0)
    lines = table([(case, Verdict()), (case, Verdict("PlanError", "no")), (case, Verdict(findings=("a", "b")))])
    assert lines[-1].split() == ["all", *("3" if world == case.world else "0" for world in WORLDS), "3", "1", "1"]


def copying_case() -> Case:
    """The first case of two ranks that share a sequence, with copies of tapes and no frozen weight."""
    return next(
        case
        for case in map(make_case, count())
        if case.recipe == "sweep" and case.axes == {"ulysses": 2} and case.plan.get("x") == "host" and not case.frozen
    )


def a_gradient(patch: pytest.MonkeyPatch) -> None:
    """One element is off by a millionth."""
    whole = judging.whole_tensors

    def disturbed(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        (name, first), *others = whole(*args, **kwargs)
        first.view(-1)[first.abs().argmax()] *= 1 + 1e-6
        yield from ((name, first), *others)

    patch.setattr(judging, "whole_tensors", disturbed)


def a_norm(patch: pytest.MonkeyPatch) -> None:
    norm = judging.clip
    patch.setattr(judging, "clip", lambda *args: norm(*args) * (1 + 1e-9))


def a_byte_sent(patch: pytest.MonkeyPatch) -> None:
    add = Sent.add
    patch.setattr(Sent, "add", lambda sent, leaving: add(sent, leaving + 1))


def a_byte_copied(patch: pytest.MonkeyPatch) -> None:
    take = Copied.take
    patch.setattr(Copied, "take", lambda copied: take(copied) + Copies(into=1))


def a_byte_of_a_slot(patch: pytest.MonkeyPatch) -> None:
    stated = judging.device_bytes
    patch.setattr(judging, "device_bytes", lambda *args: stated(*args) - 1)


PLANTED = {
    a_gradient: "not the naive twin's",
    a_norm: "the gradients have norm",
    a_byte_sent: "bytes sent, and",
    a_byte_copied: "bytes into the device, and",
    a_byte_of_a_slot: "of tapes, and",
}


def mistaken(case: Case, top: Path, mistake: Callable[[pytest.MonkeyPatch], None]) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        return run_case(case, top)


def test_the_judge_finds_what_is_planted(ranks, tmp_path: Path) -> None:
    case = copying_case()
    ranks(1).run(prepare, case, tmp_path)
    for mistake, sentence in PLANTED.items():
        for verdict in ranks(2).run(mistaken, case, tmp_path, mistake):
            assert any(sentence in finding for finding in verdict.findings), mistake.__name__
