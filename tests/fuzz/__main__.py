"""The whole campaign, or a part of it.

    python -m tests.fuzz --count 1200 --workers 2 --out findings.jsonl

Prints each finding as it comes and a table at the end; ends with code 1 if there was a finding.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.corpus import inputs
from tests.fuzz.forked import PEAK_BYTES, SECONDS, adopt_orphans, import_all, run
from tests.fuzz.judge import Outcome
from tests.fuzz.recipe import Input, Toys
from tests.fuzz.toys import make_toys

COMMANDS = ("train", "plan", "rehearse", "data", "export")


def make_toys_apart(folder: Path) -> Toys:
    """The toys, made in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_make_toys, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0, "the toys could not be made"
    return Toys(folder)


def _make_toys(folder: Path) -> None:
    os.chdir(folder)
    make_toys(folder)


def _work(items: list[Input], toys: Toys, keep: Path | None, pipe: Any) -> None:
    adopt_orphans()
    try:
        for item in items:
            pipe.put((item.name, run(item, toys, keep)))
    finally:
        pipe.put(None)


def campaign(items: list[Input], toys: Toys, workers: int, keep: Path | None = None) -> dict[str, Outcome]:
    """Run all inputs, some at a time."""
    fork = multiprocessing.get_context("fork")
    pipe = fork.SimpleQueue()
    busy = [fork.Process(target=_work, args=(items[n::workers], toys, keep, pipe)) for n in range(workers)]
    for process in busy:
        process.start()
    named, outcomes, left = {item.name: item for item in items}, {}, workers
    while left:
        answer = pipe.get()
        if answer is None:
            left -= 1
            continue
        name, outcome = answer
        outcomes[name] = outcome
        for finding in outcome.findings:
            print(f"{name}\n    {' '.join(map(_short, named[name].words))}\n    {finding}", flush=True)
    for process in busy:
        process.join()
    return outcomes


def _short(word: str) -> str:
    return ascii(word)[1:-1][:60]


def table(items: list[Input], outcomes: dict[str, Outcome]) -> list[str]:
    counts: dict[str, Counter[str]] = {command: Counter() for command in (*COMMANDS, "other")}
    for item in items:
        outcome = outcomes[item.name]
        row = counts[item.command if item.command in COMMANDS else "other"]
        row["inputs"] += 1
        row["ok" if outcome.code == 0 else "refused"] += 1
        row["findings"] += bool(outcome.findings)
    rows = [*counts.items(), ("all", sum(counts.values(), Counter()))]
    columns = ("inputs", "ok", "refused", "findings")
    lines = [f"{'command':10}" + "".join(f"{column:>10}" for column in columns)]
    return lines + [f"{name:10}" + "".join(f"{row[column]:>10}" for column in columns) for name, row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="inputs to run; default: all")
    parser.add_argument("--skip", type=int, default=0, help="inputs to leave out at the beginning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="", help="inputs whose name contains this")
    parser.add_argument("--out", type=Path, help="a JSON object for each input goes here")
    parser.add_argument("--keep", type=Path, help="folders of findings go here")
    args = parser.parse_args()
    items = [item for item in inputs(args.seed, args.count)[args.skip :] if args.only in item.name]
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    import_all()
    with tempfile.TemporaryDirectory(prefix="ithaca-fuzz-toys-") as folder:
        outcomes = campaign(items, make_toys_apart(Path(folder)), args.workers, args.keep)
    if args.out is not None:
        with args.out.open("w") as out:
            for item in items:
                told = vars(outcomes[item.name]) | {"name": item.name, "words": [w[:200] for w in item.words]}
                out.write(json.dumps(told) + "\n")
    print("\n".join(table(items, outcomes)))
    longest = max(outcomes.values(), key=lambda outcome: outcome.seconds)
    largest = max(outcome.peak for outcome in outcomes.values())
    print(f"the longest took {longest.seconds:.1f} s of {SECONDS:.0f}")
    print(f"the largest peak was {largest / 2**30:.2f} GiB of {PEAK_BYTES / 2**30:.0f}")
    sys.exit(any(outcome.findings for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
