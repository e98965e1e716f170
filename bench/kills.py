"""Kill runs at random moments, start them again, and compare what they leave with what an undisturbed run leaves.

    python bench/kills.py --kills 120 --workers 12

Four activities: training on 1, 2 and 4 CPU ranks; training that saves after every step; preparing data; exporting. Each
victim has a folder of its own. SIGKILL goes to the whole process group, or to a single rank, which the launcher notices
and restarts from. The same command is then given again until it ends. Compared with an undisturbed run of the same
command: metrics.jsonl without its times, the exported model and the token file byte for byte, and the list of files.
Prints a table. If anything differs, it keeps the folder and ends with code 1.

Most victims are forked from a process that has imported torch (tests/nursery.py): a start takes a fraction of a second.
The rows called "program" are started as a user starts them.
"""

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # it may be started as a file, and tests/ is not installed

import psutil  # noqa: E402
import torch  # noqa: E402

import ithaca.data.preparation.command  # noqa: E402
from tests.nursery import Ended, Nursery, ranks_of  # noqa: E402

STEPS = {"train": 24, "save": 8}
TIMES = {"seconds", "tokens_per_second_per_rank", "mfu_causal", "host_bytes", "ring_waiting"}
OUT = {"train": "run", "save": "run", "data": "out.tokens", "export": "out"}
TRIES = 12  # victims that may be done before their kill; each is killed at an earlier moment than the one before
STARTS = 8  # of one victim after its last kill
LONGEST = 900.0  # seconds; whatever takes longer hangs
TEXT = "the wine dark sea bore us home past an island where no ship returns and cattle of the sun graze"


@dataclass(frozen=True)
class Cell:
    """A row of the table."""

    activity: str
    ranks: int
    program: bool = False  # started as a program, not forked

    @property
    def name(self) -> str:
        return f"{self.activity}-{self.ranks}{'-program' if self.program else ''}"

    @property
    def trains(self) -> bool:
        return self.activity in STEPS

    def words(self) -> list[str]:
        """The command of the victim."""
        if self.activity == "data":
            return ["data", "corpus.jsonl", "books", "--out", OUT["data"], "--tokenizer", "tokenizer.json"]
        if self.activity == "export":
            return ["export", "run", OUT["export"]]
        sets = [f"train.steps={STEPS[self.activity]}", "train.tokens=64", "train.batch=4", "train.warmup=3"]
        sets += ["model.source=tiny", "data.source=good.tokens", "train.device=cpu"]
        sets += [f"run.checkpoint_every={4 if self.activity == 'train' else 1}"]
        words = ["train", "--run", OUT[self.activity], "--ranks", str(self.ranks)]
        return words + [word for option in sets for word in ("--set", option)]


FORKED = [Cell(activity, ranks) for activity in ("train", "save", "export") for ranks in (1, 2, 4)] + [Cell("data", 1)]
PROGRAMS = [Cell("train", 2, program=True), Cell("data", 1, program=True), Cell("export", 1, program=True)]


@dataclass(frozen=True)
class Reference:
    """What an undisturbed victim left, and how long it took."""

    folder: Path
    seconds: float


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL at a random moment to the group of a victim, or to one of its ranks; note what was hit."""

    folder: Path
    cell: Cell
    seconds: float  # that the victim takes undisturbed
    seed: str

    def __call__(self, launchers: list[int]) -> None:
        chance = random.Random(self.seed)
        launcher = psutil.Process(launchers[0])
        self._wait(chance, launcher)
        alone = self.cell.trains and self.cell.ranks > 1 and chance.random() < 0.5
        ranks = []
        with contextlib.suppress(psutil.Error):  # it ends at this very moment
            ranks = ranks_of(launcher.pid) if alone else []
            if ranks:
                chance.choice(ranks).kill()
        if not _runs(launcher):
            return
        if not ranks:
            try:
                os.killpg(launcher.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet
                launcher.kill()
        note = {"one rank": bool(ranks), "half-made": half_made(self.folder, self.cell)}
        with (self.folder.parent / f"{self.folder.name}.kills").open("a") as notes:
            notes.write(json.dumps(note) + "\n")

    def _wait(self, chance: random.Random, launcher: psutil.Process) -> None:
        """Until a random step and a random part of the next, or for a random part of the time."""
        longest = self.seconds
        if self.cell.trains:
            steps = STEPS[self.cell.activity]
            begun = len(lines(self.folder / "run" / "metrics.jsonl"))
            step = chance.randrange(begun, steps + 1)
            _wait_until(lambda: len(lines(self.folder / "run" / "metrics.jsonl")) >= step, launcher)
            longest = self.seconds if step == begun else 2 * self.seconds / steps
        if self.cell.activity in ("save", "export") and chance.random() < 0.7:
            _wait_until(lambda: half_made(self.folder, self.cell), launcher)
            longest = self.seconds / 40
        time.sleep(chance.uniform(0, longest))


def _wait_until(reached: Callable[[], bool], launcher: psutil.Process) -> None:
    until = time.monotonic() + LONGEST
    while not reached() and _runs(launcher) and time.monotonic() < until:
        time.sleep(0.001)


def nobody(_: list[int]) -> None:
    """Disturb nothing."""


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def half_made(folder: Path, cell: Cell) -> bool:
    """Return whether the victim was killed while it wrote: a checkpoint, a token file or a model without its name."""
    if cell.trains:
        names = [path.name for path in (folder / "run" / "checkpoints").glob("*")]
        return any(not re.fullmatch(r"step-\d{8}", name) for name in names)
    return any("partial" in path.name for path in folder.iterdir())


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def metrics(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines(run / "metrics.jsonl")]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def difference(found: Path, wanted: Path, cell: Cell) -> str | None:
    """Say how what a victim left differs from the reference."""
    ours, theirs = files(found), files(wanted)
    if ours.keys() != theirs.keys():
        return f"other files: {sorted(ours.keys() ^ theirs.keys())}"
    if cell.trains and metrics(found / "run") != metrics(wanted / "run"):
        return "other metrics"
    # Logs, times and pictures differ, and checkpoints are compared as the models that are exported from them
    same = r"(?!run/)|run/(config\.toml|model/)" if cell.trains else ""
    other = [name for name, data in ours.items() if re.match(same, name) and data != theirs[name]]
    return f"other bytes: {other}" if other else None


class Stage:
    """Where victims run: a folder with what they need, and a process to fork them from."""

    def __init__(self, folder: Path, nursery: Nursery):
        self.folder, self._nursery = folder, nursery

    def start(self, cell: Cell, folder: Path, words: list[str], disturb: Callable[[list[int]], None]) -> Ended:
        if not cell.program:
            return self._nursery.commands((words, {}), folder=folder, disturb=disturb)[0]
        with (folder.parent / f"{folder.name}.said").open("w+") as said:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                [sys.executable, "-m", "ithaca", *words],
                cwd=folder,
                env=environment,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            disturb([process.pid])
            code = process.wait(LONGEST)
            said.seek(0)
            return Ended(code, "", said.read())

    def prepare(self, cell: Cell, name: str) -> Path:
        """A folder for a victim, with what its command reads."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for needed in {"data": ("corpus.jsonl", "books", "tokenizer.json"), "export": ()}.get(
            cell.activity, ("good.tokens",)
        ):
            (folder / needed).symlink_to(self.folder / "inputs" / needed)
        if cell.activity == "export":
            shutil.copytree(self.folder / "inputs" / f"run-{cell.ranks}", folder / "run")
        return folder

    def finish(self, cell: Cell, folder: Path, ended: Ended) -> str | None:
        """Start a victim until it ends; say why it does not. A trained model is exported: its weights are compared."""
        for _ in range(STARTS):
            # A victim may be killed after its file has got its name, before it ends: there is nothing left to do
            if ended.code == 0 or (not cell.trains and (folder / OUT[cell.activity]).exists()):
                return self.export(cell, folder)
            ended = self.start(cell, folder, cell.words(), nobody)
        return f"code {ended.code} after {STARTS} starts: {ended.err[-2000:]}"

    def export(self, cell: Cell, folder: Path) -> str | None:
        if not cell.trains:
            return None
        ended = self.start(Cell("export", 1), folder, ["export", "run", "model"], nobody)
        return None if ended.code == 0 else f"the run cannot be exported: {ended.err[-2000:]}"

    def reference(self, cell: Cell) -> Reference:
        folder = self.prepare(cell, f"reference-{cell.name}")
        began = time.monotonic()
        ended = self.start(cell, folder, cell.words(), nobody)
        assert ended.code == 0, ended.err
        seconds = time.monotonic() - began
        assert self.export(cell, folder) is None
        return Reference(folder, seconds)

    def victim(self, cell: Cell, number: int, kills: int, seed: int, wanted: Reference) -> dict[str, Any]:
        """Kill a victim some times, let it end, and compare. If it ends before, another takes its place."""
        name, problem, restarts = f"{cell.name}-{number}", None, 0
        notes, folder = self.folder / f"{name}.kills", self.folder / name
        for life in range(TRIES):
            if len(lines(notes)) >= kills or problem:
                break
            self.prepare(cell, name)
            ended = Ended(-1, "", "")
            while ended.code != 0 and len(lines(notes)) < kills:
                moment = f"{seed} {name} {life} {len(lines(notes))}"
                ended = self.start(cell, folder, cell.words(), Kill(folder, cell, wanted.seconds * 0.7**life, moment))
                restarts += ended.code != 0 or ended.err.count("Restarting from the last checkpoint")
            problem = self.finish(cell, folder, ended) or difference(folder, wanted.folder, cell)
        if problem is None:
            shutil.rmtree(folder)
        hits = [json.loads(line) for line in lines(notes)]
        return {"hits": hits, "restarts": restarts, "problem": problem, "folder": str(folder)}


def make_inputs(folder: Path, nursery: Nursery) -> None:
    """Documents, a tokenizer, a token file, and a run of each number of ranks."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    chance, words = random.Random(0), TEXT.split()
    folder.mkdir()
    (folder / "books").mkdir()
    for number in range(40):
        text = " ".join(chance.choices(words, k=2000))
        (folder / "books" / f"{number:02d}.txt").write_text(text)
    with (folder / "corpus.jsonl").open("w") as out:
        for _ in range(2000):
            prompt, text = (" ".join(chance.choices(words, k=size)) for size in (5, 200))
            out.write(json.dumps({"prompt": prompt, "completion": text}) + "\n")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    inner.save(str(folder / "tokenizer.json"))
    ended = nursery.command("data", "books", "--out", "good.tokens", folder=folder)
    assert ended.code == 0, ended.err
    for ranks in (1, 2, 4):
        command = Cell("save", ranks).words()
        command[command.index("--run") + 1] = f"run-{ranks}"
        ended = nursery.commands((command, {}), folder=folder, disturb=nobody)[0]
        assert ended.code == 0, ended.err


def _serve(folder: Path, tasks: Any, answers: Any) -> None:
    """A worker: does tasks until there is none."""
    torch.set_num_threads(1)
    stage = Stage(folder, Nursery())
    while (task := tasks.get()) is not None:
        method, *args = task
        try:
            answers.put((task, getattr(stage, method)(*args)))
        except Exception as error:
            answers.put((task, {"problem": repr(error), "hits": [], "restarts": 0, "folder": str(folder)}))
    stage._nursery.stop()


def campaign(folder: Path, kills: int, seed: int, workers: int, only: str) -> bool:
    """Return whether every victim was identical."""
    # Journals of `ithaca data` are two seconds apart, and a victim takes one: forked ones write theirs more often
    often = functools.partial(ithaca.data.preparation.command.prepare, journal_seconds=0.02)
    ithaca.data.preparation.command.prepare = often  # pyrefly: ignore
    nursery = Nursery()
    make_inputs(folder / "inputs", nursery)
    nursery.stop()
    fork = multiprocessing.get_context("fork")
    tasks, answers = fork.Queue(), fork.Queue()
    servers = [fork.Process(target=_serve, args=(folder, tasks, answers)) for _ in range(workers)]
    for server in servers:
        server.start()
    cells = [cell for cell in (*FORKED, *PROGRAMS) if only in cell.name]
    assert cells, f"no row is called {only}"
    for cell in cells:
        tasks.put(("reference", cell))
    found = {cell: reference for (_, cell), reference in (answers.get() for _ in cells)}
    references: dict[Cell, Reference] = {cell: found[cell] for cell in cells}
    chance, victims, left = random.Random(seed), 0, kills
    chance.shuffle(cells)
    for number, cell in enumerate(itertools.cycle(cells)):
        if not left:
            break
        share = min(chance.choice([1, 1, 2, 3]), left)
        tasks.put(("victim", cell, number, share, seed, references[cell]))
        left, victims = left - share, victims + 1
    counts: dict[Cell, Counter[str]] = {cell: Counter() for cell in references}
    for done in range(1, victims + 1):
        (_, cell, *_), found = answers.get()
        count(counts[cell], found)
        print(f"{done} of {victims} victims, {len(found['hits'])} kills: {cell.name}", file=sys.stderr, flush=True)
        if found["problem"]:
            print(f"{cell.name}: {found['problem']}\n    kept: {found['folder']}", flush=True)
    for _ in servers:
        tasks.put(None)
    for server in servers:
        server.join()
    print_table(counts)
    return all(row["victims"] == row["identical"] for row in counts.values())


def count(row: Counter[str], found: dict[str, Any]) -> None:
    row["victims"] += 1
    row["kills"] += len(found["hits"])
    row["one rank"] += sum(hit["one rank"] for hit in found["hits"])
    row["half-made"] += sum(hit["half-made"] for hit in found["hits"])
    row["identical"] += found["problem"] is None
    row["restarts"] += found["restarts"]


def print_table(counts: dict[Cell, Counter[str]]) -> None:
    columns = ("kills", "one rank", "half-made", "restarts", "victims", "identical")
    print(f"{'activity':10}{'ranks':>6}{'started as':>12}" + "".join(f"{column:>11}" for column in columns))
    rows = [
        (cell.activity, str(cell.ranks), "program" if cell.program else "fork", row) for cell, row in counts.items()
    ]
    rows.append(("all", "", "", sum(counts.values(), Counter())))
    for activity, ranks, kind, row in rows:
        print(f"{activity:10}{ranks:>6}{kind:>12}" + "".join(f"{row[column]:>11}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="rows whose name contains this, as save-2 or data-1-program")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ithaca-kills-"))
    began = time.monotonic()
    fine = campaign(folder, args.kills, args.seed, args.workers, args.only)
    print(f"{time.monotonic() - began:.0f} s, seed {args.seed}; torch {torch.__version__}")
    if fine:
        shutil.rmtree(folder)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
