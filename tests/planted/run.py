"""Plant mistakes, one at a time, in a copy of the repository and see whether the tests of `make test` notice.

    python tests/planted/run.py                   all mistakes
    python tests/planted/run.py NAME NAME …       some of them
    python tests/planted/run.py --check-applies   only whether every patch still applies

A mistake is a file NAME.patch beside this one: a sentence that says what is wrong, a line `caught-by:` with test files
or single tests, then the difference. Exits with 1 if a mistake is not caught or a patch does not apply.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LEFT_OUT = shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*_cache", ".hypothesis")
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that no test ran to its end


@dataclass(frozen=True)
class Mistake:
    path: Path
    sentence: str
    caught_by: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def read_mistakes(names: Sequence[str] = ()) -> list[Mistake]:
    """Those of the names, or all."""
    paths = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    return [_read(path) for path in paths]


def _read(path: Path) -> Mistake:
    head = path.read_text(encoding="utf-8").partition("diff --git")[0].splitlines()
    tests = next((line.removeprefix("caught-by:").split() for line in head if line.startswith("caught-by:")), [])
    if not head or not tests:
        raise SystemExit(f"{path.name} must begin with a sentence and a line caught-by: with the tests to run")
    return Mistake(path, head[0], tuple(tests))


def refusal(mistake: Mistake) -> str:
    """Why the patch does not apply to this tree; empty where it does."""
    return _git_apply(mistake, ROOT, "--check")


def _git_apply(mistake: Mistake, folder: Path, *options: str) -> str:
    command = ["git", "apply", *options, str(mistake.path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr or (f"git apply ended with {done.returncode}" if done.returncode else "")


def try_out(mistake: Mistake) -> tuple[str, str]:
    """The verdict on one mistake, and what pytest said."""
    with tempfile.TemporaryDirectory(prefix="planted-") as top:
        copy = Path(shutil.copytree(ROOT, Path(top) / "tree", ignore=LEFT_OUT))
        if problem := _git_apply(mistake, copy):
            return "DOES NOT APPLY", problem
        code, said = _run_tests(copy, mistake.caught_by)
    return {FAILED: "caught", PASSED: "NOT CAUGHT"}.get(code, "TESTS DID NOT RUN"), said


def _run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mistakes to plant; all where none is named")
    parser.add_argument("--check-applies", action="store_true", help="only check that the patches apply")
    parser.add_argument("--workers", type=int, default=2, help="mistakes tried at the same time")
    options = parser.parse_args()
    mistakes = read_mistakes(options.names)
    if options.check_applies:
        refused = {mistake.name: problem for mistake in mistakes if (problem := refusal(mistake))}
        print(*(f"{name} DOES NOT APPLY\n{problem}" for name, problem in refused.items()), sep="\n", end="")
        return bool(refused)
    tests = sorted({test for mistake in mistakes for test in mistake.caught_by})
    code, said = _run_tests(ROOT, tests)
    if code != PASSED:  # they would seem to catch anything
        print(said, f"the tests do not pass without a mistake (pytest ended with {code})", sep="\n")
        return 1
    with ThreadPoolExecutor(options.workers) as pool:
        verdicts = []
        for mistake, (verdict, said) in zip(mistakes, pool.map(try_out, mistakes), strict=True):
            verdicts.append(verdict)
            print(f"{verdict:10}  {mistake.name}: {mistake.sentence}", flush=True)
            if verdict != "caught":
                print(said[-3000:], flush=True)
    caught = verdicts.count("caught")
    print(f"{caught} of {len(mistakes)} mistakes caught")
    return caught != len(mistakes)


if __name__ == "__main__":
    sys.exit(main())
