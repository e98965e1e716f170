"""Mutation testing: make one mistake at a time in a copy of the repository and see whether a test of `make test` fails.

    python tests/mutants/run.py                   all mutants
    python tests/mutants/run.py NAME NAME …       some of them
    python tests/mutants/run.py --check-applies   only whether every patch still applies

A mutant is a file NAME.patch beside this one: a sentence that says what is wrong, these lines, then the difference.

    caught-by:   test files or single tests; one of them must fail
    survives:    optional: why no test can tell this mutant from the code (an equivalent mutant)
    needs: gpu   optional: without a CUDA device the mutant is not tried

Prints each mutant with the test that failed. Exits with 1 if a mutant is not caught and not explained, or if a patch
does not apply.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LEFT_OUT = shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*_cache", ".hypothesis")
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that no test ran to its end
CAUGHT, EXPLAINED, NOT_TRIED, NOT_CAUGHT = "caught", "explained", "not tried", "NOT CAUGHT"


@dataclass(frozen=True)
class Mutant:
    path: Path
    sentence: str
    caught_by: tuple[str, ...]
    survives: str = ""  # the reason
    needs_gpu: bool = False

    @property
    def name(self) -> str:
        return self.path.stem


def read_mutants(names: Sequence[str] = ()) -> list[Mutant]:
    """Return those of the names, or all."""
    paths = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    return [read_mutant(path) for path in paths]


def read_mutant(path: Path) -> Mutant:
    first, *lines = path.read_text(encoding="utf-8").partition("diff --git")[0].strip().splitlines() or [""]
    given = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    tests, needs = given.pop("caught-by", "").split(), given.pop("needs", None)
    survives = given.pop("survives", "")
    if not first or not tests or given or needs not in (None, "gpu"):
        raise SystemExit(
            f"{path.name} must begin with a sentence and a line caught-by: with the tests to run; "
            "survives: with a reason and needs: gpu may follow"
        )
    return Mutant(path, first, tuple(tests), survives, needs == "gpu")


def refusal(mutant: Mutant) -> str:
    """Return why the patch does not apply to this tree; empty if it does."""
    return _git_apply(mutant, ROOT, "--check")


def _git_apply(mutant: Mutant, folder: Path, *options: str) -> str:
    command = ["git", "apply", *options, str(mutant.path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr or (f"git apply ended with {done.returncode}" if done.returncode else "")


def try_out(mutant: Mutant) -> tuple[str, str]:
    """Return the verdict on one mutant, and its reason or what pytest said."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as top:
        copy = Path(shutil.copytree(ROOT, Path(top) / "tree", ignore=LEFT_OUT))
        if problem := _git_apply(mutant, copy):
            return "DOES NOT APPLY", problem
        return judge(mutant, *_run_tests(copy, mutant.caught_by))


def judge(mutant: Mutant, code: int, said: str) -> tuple[str, str]:
    """Return the verdict on a mutant by pytest's exit code and output, and its reason."""
    # The short summary has "FAILED test - message", or "ERROR test" if a fixture failed. A file alone did not even load
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::\w+(?:\[.*?\])?)(?: - .*)?$", said, re.MULTILINE)
    if code == FAILED and failed:
        return CAUGHT, f"by {failed.group(1)}"
    if code != PASSED:
        return "TESTS DID NOT RUN", said
    return (EXPLAINED, mutant.survives) if mutant.survives else (NOT_CAUGHT, said)


def _run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants to try; all where none is named")
    parser.add_argument("--check-applies", action="store_true", help="only check that the patches apply")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at the same time")
    options = parser.parse_args()
    mutants = read_mutants(options.names)
    if options.check_applies:
        refused = {mutant.name: problem for mutant in mutants if (problem := refusal(mutant))}
        print(*(f"{name} DOES NOT APPLY\n{problem}" for name, problem in refused.items()), sep="\n", end="")
        return bool(refused)
    gpu = _has_gpu()
    tried = [mutant for mutant in mutants if gpu or not mutant.needs_gpu]
    counts = Counter({NOT_TRIED: len(mutants) - len(tried)})
    with ThreadPoolExecutor(options.workers) as pool:
        tests = sorted({test for mutant in tried for test in mutant.caught_by})
        files = [list(group) for _, group in itertools.groupby(tests, key=lambda test: test.partition("::")[0])]
        for code, said in pool.map(partial(_run_tests, ROOT), files):
            if code != PASSED:  # they would seem to catch anything
                print(said, f"the tests do not pass without a mutant (pytest ended with {code})", sep="\n")
                return 1
        for mutant, (verdict, reason) in zip(tried, pool.map(try_out, tried), strict=True):
            counts[verdict] += 1
            print(f"{verdict:10}  {mutant.name}: {mutant.sentence}", flush=True)
            print(f"            {reason if verdict in (CAUGHT, EXPLAINED) else reason[-3000:]}", flush=True)
    for mutant in (mutant for mutant in mutants if mutant not in tried):
        print(f"{NOT_TRIED:10}  {mutant.name}: {mutant.sentence}\n            no CUDA device")
    missed = len(tried) - counts[CAUGHT] - counts[EXPLAINED]
    print(
        f"{len(mutants)} mutants: {counts[CAUGHT]} caught, {counts[EXPLAINED]} explained, "
        f"{counts[NOT_TRIED]} not tried, {missed} not caught"
    )
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
