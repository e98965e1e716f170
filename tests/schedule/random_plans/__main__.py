"""A campaign of random Plans.

    python -m tests.schedule.random_plans --count 200 --seed 0 [--only RECIPE]

Prints each finding with its case, and a table at the end. Ends with code 1 if there was a finding. A case comes from
its seed alone: `--count 1 --seed 17` runs that of seed 17 again.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
import torch._dynamo  # FSDP2 imports it at its first use: once here, instead of in every forked rank
import transformers

from ithaca.plans.recipes import RECIPES
from tests.ranks import Ranks
from tests.schedule.random_plans.cases import Case, make_case
from tests.schedule.random_plans.judge import Verdict, judge

SECONDS = 60  # a case that takes longer hangs
WORLDS = range(1, 9)


class Jobs:
    """A job of each world size, forked when it is first needed and again after a case that it did not survive."""

    def __init__(self) -> None:
        self._jobs: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        if world not in self._jobs:
            self._jobs[world] = Ranks(world, SECONDS)
        return self._jobs[world]

    def forget(self, world: int) -> None:
        if world in self._jobs:
            self._jobs.pop(world).stop()


def try_case(case: Case, jobs: Jobs) -> Verdict:
    """Judge a case. A rank that dies or hangs is a finding."""
    with tempfile.TemporaryDirectory(prefix="ithaca-random-plan-") as top:
        try:
            verdict = judge(case, jobs(1), jobs(case.world), Path(top))
        except (AssertionError, ChildProcessError, TimeoutError) as problem:
            verdict = Verdict(findings=(str(problem),))
    if verdict.findings:  # its ranks may be in the middle of a message
        jobs.forget(case.world)
    return verdict


def cases(seed: int, only: str | None) -> Iterator[Case]:
    """The cases from a seed on, those of one recipe if `only` names it."""
    return (case for case in map(make_case, count(seed)) if only in (None, case.recipe))


def report(case: Case, verdict: Verdict, refusals: bool) -> None:
    for finding in verdict.findings:
        print(f"FINDING {case}\n    {finding}", flush=True)
    if refusals and verdict.refused:
        print(f"refused, seed {case.seed}: {verdict.refused}: {verdict.sentence}", flush=True)


def table(verdicts: list[tuple[Case, Verdict]]) -> list[str]:
    """Cases by recipe and world, and how many were refused or are findings."""
    lines = [
        f"{'recipe':10}" + "".join(f"{world:>6}" for world in WORLDS) + f"{'all':>6}{'refused':>9}{'findings':>10}"
    ]
    for recipe in (*RECIPES, "all"):
        of = [(case, verdict) for case, verdict in verdicts if recipe in ("all", case.recipe)]
        worlds = Counter(case.world for case, _ in of)
        refused, found = sum(bool(v.refused) for _, v in of), sum(bool(v.findings) for _, v in of)
        numbers = "".join(f"{worlds[world]:>6}" for world in WORLDS)
        lines.append(f"{recipe:10}{numbers}{len(of):>6}{refused:>9}{found:>10}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="cases to run")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--only", choices=list(RECIPES), help="cases of this recipe alone")
    parser.add_argument("--refusals", action="store_true", help="also print the sentences of refused cases")
    args = parser.parse_args()
    jobs = Jobs()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no rank is left behind
    torch.set_num_threads(1)  # before any rank is forked
    transformers.logging.disable_progress_bar()
    verdicts, start = [], time.monotonic()
    try:
        for case in islice(cases(args.seed, args.only), args.count):
            verdict = try_case(case, jobs)
            verdicts.append((case, verdict))
            report(case, verdict, args.refusals)
    finally:  # also after Ctrl-C
        print("\n".join(table(verdicts)))
        print(f"{len(verdicts)} cases in {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(any(verdict.findings for _, verdict in verdicts))


if __name__ == "__main__":
    main()
