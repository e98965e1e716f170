"""Run one input in a forked process that has imported everything, and say what is wrong with how it ended.

A start of `ithaca` takes seconds, a fork some milliseconds. Ranks are forked too (tests/nursery.py), except for inputs
that say `started`.
"""

import contextlib
import ctypes
import gc
import hashlib
import importlib
import itertools
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from fnmatch import fnmatch
from pathlib import Path

from tests.fuzz.judge import Outcome, judge
from tests.fuzz.recipe import Input, Toys

SECONDS = 120.0  # a command of the campaign that takes longer hangs
PEAK_BYTES = 2 << 30  # what a process may hold at its peak; torch and the rest take about 0.5 GiB of it
ADDRESS_BYTES = 12 << 30  # so that an allocation without bounds fails instead of taking the machine
FILE_BYTES = 1 << 30
GRACE_SECONDS = 5.0  # in which processes that a command started may still end
BUILD_FAILED = 77
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER

Tree = dict[str, tuple[str, int, str]]


def import_all() -> None:
    """Import and draw once what every command would import and draw again."""
    from tests.nursery import _do_once

    importlib.import_module("torch._dynamo")  # as FSDP2 does at its first use
    _do_once()
    gc.collect()
    gc.freeze()


def adopt_orphans() -> None:
    """Become the parent of what commands leave running, so that it is found and ended."""
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def tree(folder: Path) -> Tree:
    """Every path below a folder, with its kind, size and content."""
    found: Tree = {}
    for root, names, files in os.walk(folder):
        for name in [*names, *files]:
            path = Path(root) / name
            inside = os.path.relpath(path, folder)
            if path.is_symlink():
                found[inside] = ("link", 0, os.readlink(path))
            elif path.is_dir():
                found[inside] = ("folder", 0, "")
            elif path.is_file():
                found[inside] = ("file", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
            else:
                found[inside] = ("special", 0, "")
    return found


def in_this_process(words: tuple[str, ...]) -> int:
    """Call the command line here, with the current folder as it is."""
    from ithaca.cli import main
    from tests.nursery import fork_ranks

    fork_ranks()
    sys.argv = ["ithaca", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def run(item: Input, toys: Toys, keep: Path | None = None) -> Outcome:
    """Build the input, run its command, and judge; the folder of a finding goes to `keep`."""
    place = Path(tempfile.mkdtemp(prefix="ithaca-fuzz-"))
    try:
        outcome = _run(item, toys, place)
        if keep is not None and outcome.findings:
            subprocess.run(["cp", "-a", place, keep / re.sub(r"\W+", "-", item.name)[:100]], check=False)
        return outcome
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(item: Input, toys: Toys, place: Path) -> Outcome:
    for name in ("work", "tmp", "home", "matplotlib"):
        (place / name).mkdir()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(item, toys, place)
    status, peak, hung = _wait(child, item)
    code = os.waitstatus_to_exitcode(status)
    out, err = ((place / name).read_text("utf-8", "replace") for name in ("out", "err"))
    if code == BUILD_FAILED and not (place / "before").exists():
        raise AssertionError(f"{item.name} cannot be built:\n{err}")
    outcome = Outcome(code=code, out=out, err=err, seconds=time.monotonic() - began, peak=peak)
    if hung:
        outcome.findings.append(f"hang: longer than {SECONDS:.0f} s")
    outcome.findings += [f"left running: {left}" for left in _orphans()]
    if peak > PEAK_BYTES:
        outcome.findings.append(f"memory: {peak / 2**30:.1f} GiB at the peak")
    before: Tree = pickle.loads((place / "before").read_bytes())
    outcome.findings += left_behind(item, code, before, tree(place / "work"))
    for name in ("tmp", "home"):
        if left := list(tree(place / name)):
            outcome.findings.append(f"left behind in {name}: {', '.join(left)}")
    judge(item, outcome)
    if code == 0 and item.check is not None and (problem := item.check(place / "work", toys)):
        outcome.findings.append(f"wrong result: {problem}")
    return outcome


def _child(item: Input, toys: Toys, place: Path) -> None:
    """Never returns."""
    code, streams = BUILD_FAILED, (sys.stdout, sys.stderr)  # held: at their end they might close 1 and 2
    try:
        os.setsid()
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")  # as Python's own
        import torch

        torch.set_num_threads(1)
        item.build(place / "work", toys)
        (place / "before").write_bytes(pickle.dumps(tree(place / "work")))
        code = 1
        os.environ.update(TMPDIR=str(place / "tmp"), HOME=str(place / "home"), COLUMNS="200", NO_COLOR="1")
        os.environ["MPLCONFIGDIR"] = str(place / "matplotlib")  # its fonts are listed there at the first start
        tempfile.tempdir = None
        os.chdir(place / "work")
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _started(item.words) if item.started else in_this_process(item.words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        del streams
        os._exit(code)


def _started(words: tuple[str, ...]) -> int:
    return subprocess.run([sys.executable, "-m", "ithaca", *words], check=False).returncode


def _wait(child: int, item: Input) -> tuple[int, int, bool]:
    """The child's status, its peak in bytes, and whether it had to be killed."""
    until = time.monotonic() + SECONDS
    hung = False
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage.ru_maxrss * 1024, hung
        if not hung and time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            hung = True
        time.sleep(0.1 if item.started else 0.005)


def _orphans() -> list[str]:
    """What still runs some seconds after the command, which is ended here."""
    import psutil

    until = time.monotonic() + GRACE_SECONDS
    left: list[psutil.Process] = []
    while True:
        left = psutil.Process().children()
        gone, left = [one for one in left if _reap(one.pid)], [one for one in left if psutil.pid_exists(one.pid)]
        if not left or (time.monotonic() > until and not gone):
            break
        time.sleep(0.02)
    said = [" ".join(one.cmdline())[-60:] for one in left]
    for one in left:
        one.kill()
        os.waitpid(one.pid, 0)
    return said


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def left_behind(item: Input, code: int, before: Tree, after: Tree) -> list[str]:
    """Paths that the command made, changed or removed, and that it does not name."""
    named = may_change(item.words, code, before)
    named += [str(parent) for path in named for parent in Path(path).parents]
    touched = [
        (path, "made" if path not in before else "removed" if path not in after else "changed")
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]
    left = [f"{path} {how}" for path, how in touched if not any(fnmatch(path, one) for one in named)]
    return [f"left behind: {', '.join(left)}"] if left else []


def may_change(words: tuple[str, ...], code: int, before: Tree) -> list[str]:
    """Patterns of what a command may change: what it names if it succeeds, and little if it does not."""

    def value(option: str, default: str = "") -> str:
        found = [after for one, after in itertools.pairwise(words) if one == option]
        return os.path.normpath(found[-1]) if found else default

    command, named = (words[0] if words else ""), []
    if command == "train":
        run = value("--run", "runs")
        if code != 2 or run in before:  # a mistake leaves no new run folder
            named = [run, f"{run}/*"]
        if "--fresh" in words:
            named.append(f"{run}*")
        named += [f"{word.partition('=')[2]}.index" for word in words if word.startswith("data.source=")]
    elif command == "data" and "--stats" in words:
        named = [value("--picture", f"{words[1]}.png"), f"{words[1]}.index"] if code == 0 else []
    elif command == "data":
        out = value("--out")
        named = [out, f"{out}.partial*"] if code == 0 else [f"{out}.partial*"]
    elif command == "export" and code == 0:
        named = [pattern for word in map(os.path.normpath, words[2:3]) for pattern in (word, f"{word}/*")]
    elif command == "plan" and code == 0:
        named = [value("--picture"), value("--measure")]
    return named
