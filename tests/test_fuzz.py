"""The campaign of tests/fuzz: a few inputs, and with `make test-all` some of every mutator."""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.__main__ import campaign, make_toys_apart, table
from tests.fuzz.corpus import MUTATORS, inputs
from tests.fuzz.forked import import_all, left_behind
from tests.fuzz.judge import Outcome, judge
from tests.fuzz.recipe import Input, Toys
from tests.nursery import Nursery

# Which need no toys: these take longer than all the inputs
QUICK = ["usage", "plan-length", "plan-gpus", "plan-option", "gpu-value", "rehearse", "npy", "bin", "parquet", "folder"]
SAMPLE = 3 * len(MUTATORS)


def of_each(names: list[str]) -> list[Input]:
    """The first input of each of these mutators."""
    found: dict[str, Input] = {}
    for item in inputs():
        if item.mutator in names and not item.started:
            found.setdefault(item.mutator, item)
    return list(found.values())


def run_campaign(names: list[str] | None) -> None:
    """Run inputs, print the findings and the table; code 3 if there is a finding."""
    items = of_each(names) if names else inputs(count=SAMPLE)
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        toys = Toys(Path(folder)) if names else make_toys_apart(Path(folder))
        outcomes = campaign(items, toys, workers=1)
    print("\n".join(table(items, outcomes)))
    sys.exit(3 if any(outcome.findings for outcome in outcomes.values()) else 0)


def test_a_few_inputs(nursery: Nursery) -> None:
    (end,) = nursery.job(run_campaign, QUICK)
    assert end.code == 0, end.out + end.err
    assert f"{len(QUICK)}" in end.out.splitlines()[-1]


@pytest.mark.full
def test_some_of_every_mutator(nursery: Nursery) -> None:
    (end,) = nursery.job(run_campaign, None)
    assert end.code == 0, end.out + end.err


def test_there_are_a_thousand_inputs_with_names_of_their_own() -> None:
    items = inputs()
    assert len({item.name for item in items}) == len(items) >= 1000
    assert {item.mutator for item in inputs(count=SAMPLE)} == {item.mutator for item in items}
    assert [item.name for item in inputs(seed=1)] != [item.name for item in items]
    assert [item.name for item in inputs()] == [item.name for item in items]


FINDINGS = {
    "a traceback": (1, "", "Traceback (most recent call last):\nKeyError: 'a'\n", "traceback: KeyError"),
    "no sentence": (2, "", "it went wrong\n", "no sentence: 0 lines"),
    "two sentences": (2, "", "error: one\nerror: two\n", "no sentence: 2 lines"),
    "a sentence and more": (2, "", "error: one\nand more\n", "more than a sentence"),
    "an empty sentence": (2, "", "error: \n", "a sentence of 0 characters"),
    "Python's words": (2, "", "error: 'x' holds NoneType\n", "not a user's words"),
    "another code": (130, "", "error: one\n", "code 130"),
    "a signal": (-7, "", "", "code -7"),
    "accepted": (0, "", "", "accepted"),
}


@pytest.mark.parametrize("kind", FINDINGS)
def test_what_is_a_finding(kind: str) -> None:
    code, out, err, wanted = FINDINGS[kind]
    outcome = Outcome(code=code, out=out, err=err, seconds=0, peak=0)
    judge(Input("x/y", ("train",), expect="error"), outcome)
    assert any(wanted in finding for finding in outcome.findings), outcome.findings


def test_what_is_none() -> None:
    outcome = Outcome(code=2, out="", err="warning: old name\nerror: one sentence\n", seconds=0, peak=0)
    judge(Input("x/y", ("train",), expect="error"), outcome)
    assert outcome.findings == []
    plan = Outcome(code=0, out="nan tokens/s", err="", seconds=0, peak=0)
    judge(Input("x/y", ("plan", "tiny")), plan)
    assert plan.findings == ["a figure is 'nan'"]


def test_what_is_left_behind() -> None:
    file, folder = ("file", 1, "a"), ("folder", 0, "")
    train = Input("x/y", ("train", "--run", "runs/a"))
    made = {"runs": folder, "runs/a": folder, "runs/a/lock": file}
    assert left_behind(train, 0, {}, made) == []
    assert left_behind(train, 2, {}, made) == ["left behind: runs made, runs/a made, runs/a/lock made"]
    assert left_behind(train, 2, {"runs/a": folder}, {"runs/a": folder, "runs/a/lock": file}) == []
    assert left_behind(train, 0, {"model": file}, {"model": ("file", 1, "b")}) == ["left behind: model changed"]
    data = Input("x/y", ("data", "in", "--out", "out.tokens"))
    assert left_behind(data, 2, {"in": file}, {"in": file, "out.tokens.partial": file}) == []
    assert left_behind(data, 2, {"in": file}, {"out.tokens": file}) == ["left behind: in removed, out.tokens made"]
