"""Check what Ithaca claims of a GPU, all in one state of the code: commands, the figures they give, and their bounds.

    python -m bench.claims --list                         claims, what they need, how long they take; runs nothing
    python -m bench.claims --limit 570 --out results      begin what ends within this time, the next call goes on
    python -m bench.claims --only kv --again              the claims whose names contain "kv", also those that have run

A claim holds if its command ends well and every figure is within its bound. It is stored at once in claims.json, with
the commit, the machine and the command, next to the results of the command itself. It holds for the code that it was
seen with (bench/digest.py): a change of pages, tests or comments leaves it, and it is not run again. Tests run several
at a time, since nothing in them is timed; measurements have the GPU to themselves. A claim whose package or NCCL is
missing is not run, and the output says so (docs/ranks.md: many ranks on one GPU).
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.digest import changed_since, digest
from bench.record import commit
from ithaca.attention.kernels.facts import KERNEL_FACTS

ROOT = Path(__file__).parents[1]
TOGETHER = 8  # test processes that share the GPU
LAST_LINES = 15  # of a command that failed
NOT_ENDED = "not at its end after"
SHOWN = 5  # files that changed since a claim was seen


@dataclass(frozen=True)
class Figure:
    """A number that was found, and what it must be."""

    what: str
    value: float
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        # Written so that a value that is not a number does not hold
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def bound(self) -> str:
        return " ".join(
            f"{sign} {limit:g}" for sign, limit in (("≥", self.least), ("≤", self.most)) if limit is not None
        )


@dataclass(frozen=True)
class Claim:
    """A command, and the figures that its results must show. `{out}` in the command is the folder for results."""

    name: str
    command: str
    seconds: float  # on an H200, to plan a run
    read: Callable[[Path], Sequence[Figure]]  # from the folder of results
    needs: tuple[str, ...] = ()  # of NEEDS
    timed: bool = True  # False: it may share the GPU with others


@dataclass(frozen=True)
class Found:
    """A claim that was run."""

    name: str
    command: str
    commit: str
    code: str  # the digest of the code that it was seen with
    machine: str
    seconds: float
    figures: list[dict[str, Any]]
    error: str | None  # the end of what a command printed that failed

    @property
    def cut(self) -> bool:
        """Whether the time of this call ended it, so that nothing was found."""
        return self.error is not None and self.error.startswith(NOT_ENDED)

    @property
    def holds(self) -> bool:
        return self.error is None and bool(self.figures) and all(Figure(**each).holds for each in self.figures)

    def answers(self, claim: Claim, code: str) -> bool:
        """Whether it is what this claim's command gives with this code."""
        return (self.command, self.code) == (claim.command, code)


def missing(needs: Iterable[str]) -> str | None:
    """Why a claim cannot run here; None if it can."""
    for need in needs:
        if reason := NEEDS[need]():
            return reason
    return None


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _no_flash4() -> str | None:
    return None if KERNEL_FACTS["flash4"].installed else "flash-attn-4 is not installed"


def _no_shared_gpu() -> str | None:
    from tests.nccl import no_shared_gpu

    return no_shared_gpu()


def _no_liger() -> str | None:
    return (
        None if find_spec("liger_kernel") else "Liger is not here (pip install liger-kernel, or a folder on PYTHONPATH)"
    )


NEEDS: dict[str, Callable[[], str | None]] = {
    "gpu": _no_gpu,
    "flash4": _no_flash4,
    "liger": _no_liger,
    "shared": _no_shared_gpu,
}


def run_claim(claim: Claim, out: Path, at: str, code: str, machine: str, limit: float) -> Found:
    """Run a claim's command for at most `limit` seconds, read its figures and keep its results in `out`.

    The command writes to an empty folder, so that it neither reads nor continues what an older run of it has left.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        found = _run_in(Path(folder), claim, at, code, machine, limit)
        if found.error is None:
            keep(Path(folder), out)
        else:
            keep(Path(folder), out / "failed")
    return found


def keep(folder: Path, into: Path) -> None:
    """Move all that is in a folder, in place of older files and folders of these names."""
    into.mkdir(parents=True, exist_ok=True)
    for item in folder.iterdir():
        place = into / item.name
        if place.is_dir():
            shutil.rmtree(place)
        item.replace(place)


def _run_in(out: Path, claim: Claim, at: str, code: str, machine: str, limit: float) -> Found:
    command = claim.command.format(out=shlex.quote(str(out)))
    began = time.perf_counter()
    # In a session of its own, so that a command that takes too long ends with all its processes
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "ITHACA_COMMIT": at, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
        error = None if process.returncode == 0 else f"exit code {process.returncode}\n{_last(said)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        error = f"{NOT_ENDED} {limit:.0f} s: run it again with more time\n{_last(said)}"
    seconds, figures = time.perf_counter() - began, []
    if error is None:
        try:
            figures = [asdict(figure) for figure in claim.read(out)]
        except (OSError, LookupError, TypeError, ValueError) as problem:  # the results are not those expected
            error = f"its results cannot be read: {type(problem).__name__}: {problem}\n{_last(said)}"
    return Found(claim.name, claim.command, at, code, machine, seconds, figures, error)


def _last(said: str) -> str:
    return "\n".join(said.strip().splitlines()[-LAST_LINES:])


class Store:
    """claims.json: what was found, a claim each."""

    def __init__(self, folder: Path):
        self.file = folder / "claims.json"
        self._lock = threading.Lock()
        rows = json.loads(self.file.read_text()) if self.file.exists() else []
        self.found = {row["name"]: Found(**row) for row in rows}

    def answers(self, claim: Claim, code: str) -> bool:
        """Whether this claim was run with this code."""
        return claim.name in self.found and self.found[claim.name].answers(claim, code)

    def add(self, found: Found) -> None:
        """Store a claim in place of an older run of it."""
        with self._lock:
            self.found[found.name] = found
            self.file.parent.mkdir(parents=True, exist_ok=True)
            half = self.file.with_suffix(".tmp")
            half.write_text(json.dumps([asdict(each) for each in self.found.values()], indent=2) + "\n")
            half.replace(self.file)


def run_claims(
    claims: Sequence[Claim], store: Store, out: Path, at: str, code: str, machine: str, limit: float
) -> None:
    """Run claims in turn, those that are not timed several at a time. Begin none that would end after the limit."""
    stop = time.perf_counter() + limit

    def run(claim: Claim) -> None:
        if (reason := missing(claim.needs)) is not None:
            _say(f"{claim.name}: not run, {reason}")
            return
        left = stop - time.perf_counter()
        if left < claim.seconds:
            _say(f"{claim.name}: not run, it takes about {claim.seconds:.0f} s and {max(left, 0):.0f} s are left")
            return
        found = run_claim(claim, out, at, code, machine, left)
        if not found.cut:
            store.add(found)
        _say("\n".join(lines(found)))

    shared = [claim for claim in claims if not claim.timed]
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(run, sorted(shared, key=lambda claim: -claim.seconds)))
    for claim in claims:
        if claim.timed:
            run(claim)


def _say(text: str) -> None:
    print(text + "\n", end="", flush=True)  # in one piece, since threads print at the same time


def lines(found: Found) -> list[str]:
    """What was found of a claim, a line for each figure."""
    verdict = "holds" if found.holds else "not stored" if found.cut else "DOES NOT HOLD"
    said = [f"{found.name}: {verdict} ({found.seconds:.0f} s, commit {found.commit})"]
    for each in found.figures:
        figure = Figure(**each)
        mark = "" if figure.holds else "   <- outside"
        said.append(f"    {figure.what:50} {figure.value:>12.5g}  {figure.bound}{mark}")
    if found.error is not None:
        said += [f"    {line}" for line in found.error.splitlines()]
    return said


def _what_changed(since: str) -> str:
    """': data/reader.py, tape/file.py', so that a reader can tell whether the claim's command runs them."""
    files = changed_since(ROOT / "ithaca", since) or []  # nothing is known of a tree with changes
    return f": {', '.join(files[:SHOWN])}{f' and {len(files) - SHOWN} more' * (len(files) > SHOWN)}" if files else ""


def main() -> None:
    from bench.claims_table import CLAIMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bench/results", type=Path, metavar="FOLDER", help="folder for the results")
    parser.add_argument("--commit", help="the commit to record, if this tree is a copy without its history")
    parser.add_argument("--list", action="store_true", help="print the claims and run nothing")
    parser.add_argument("--only", action="append", metavar="TEXT", help="claims with this in their names; repeatable")
    parser.add_argument("--again", action="store_true", help="run also what was seen with this code")
    parser.add_argument("--limit", default=float("inf"), type=float, metavar="SECONDS")
    args = parser.parse_args()
    out, at, code = args.out.resolve(), args.commit or commit(), digest(ROOT / "ithaca")
    store = Store(out)
    claims = [claim for claim in CLAIMS if not args.only or any(text in claim.name for text in args.only)]
    if not claims:
        raise SystemExit(f"no claim has {' or '.join(args.only)} in its name: --list shows them")
    if args.list:
        for claim in claims:
            seen = store.found.get(claim.name)
            state = "not run" if seen is None else f"{'holds' if seen.holds else 'DOES NOT HOLD'} at {seen.commit}"
            if seen is not None and not seen.answers(claim, code):
                state += ", with other code" + _what_changed(seen.commit)
            print(f"{claim.name:60} {claim.seconds:4.0f} s  {' '.join(claim.needs):14} {state}\n    {claim.command}")
        print(f"{len(claims)} claims, about {sum(claim.seconds for claim in claims):.0f} s one after the other")
        return
    if not args.again:
        claims = [claim for claim in claims if not store.answers(claim, code)]
    import torch

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    run_claims(claims, store, out, at, code, machine, args.limit)
    here = [store.found[claim.name] for claim in CLAIMS if store.answers(claim, code)]
    held = sum(found.holds for found in here)
    print(f"{held} of {len(CLAIMS)} claims hold with this code ({code}); {store.file}")
    if held < len(here):
        sys.exit(1)


if __name__ == "__main__":
    main()
