"""examples/longer: a model learns from scratch to look far back. Its time, its losses and what it finds at each length.

    python -m bench.longer                                     the whole example on a GPU
    python -m bench.longer --seconds 540 --folder runs/longer  at most 9 minutes; the same command goes on
    python -m bench.longer --smoke                             short sequences and few steps on a CPU, to try the script

Writes longer.json with the stages and the tasks, and the pictures of the run as longer-*.png. After the training,
harder tasks are measured once, with fewer samples, and have no limit of time. Without --folder the run is deleted at
the end. A run that was stopped for want of time is recorded as not finished.
"""

import argparse
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.record import command_line, record
from bench.shared_ranks import save_first_layers
from ithaca.base.sizes import format_tokens
from ithaca.config import Config, read_config
from ithaca.train.folder.run_folder import RunFolder

Row = dict[str, Any]
EXAMPLE = Path(__file__).parents[1] / "examples" / "longer"
HARDER = ("keys", "tracking")
SAMPLES = 10  # of a harder task at each length
SMALL = (12,)  # documents, to try the script
LEAST = 60  # seconds: less is not enough to make the documents and to start
TO_SAVE = 60  # seconds that a run may take to end a step and save, after it was asked to
PICTURES = ("loss", "needle")


def train(config: Path, folder: Path, seconds: float | None) -> Row:
    """Begin or continue the run in `folder` for at most so many seconds; return how it stands."""
    command = [sys.executable, "-m", "ithaca", "train", str(config), "--run", str(folder), "--ranks", "1"]
    process = subprocess.Popen(command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # as Ctrl-C: it ends its step, saves, and can be continued
        try:
            process.wait(TO_SAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return standing(RunFolder(folder))


def standing(run: RunFolder) -> Row:
    """What a run has done so far: stage by stage, with the scores of its tasks."""
    config, steps = run.saved_config(), run.read_metrics()
    stages = config.train.stages or ()
    measured = {row["step"]: row for row in run.read_evaluations()}
    done = [
        stage_row(config, number - 1, list(rows), measured) for number, rows in groupby(steps, lambda row: row["stage"])
    ]
    return {
        "finished": len(steps) == sum(stage.steps for stage in stages),
        "steps": len(steps),
        "seconds": sum(row["seconds"] for row in done),
        "stages": done,
    }


def stage_row(config: Config, number: int, steps: list[Row], measured: dict[int, Row]) -> Row:
    """A stage: seconds of its steps, its last losses, and the needles that are found at its end."""
    assert config.train.stages is not None
    stage = config.train.stages[number]
    losses = [step["loss"] for step in steps[-10:] if step["loss"] is not None]  # None: no answer in these tokens
    scores, lengths = measured.get(steps[-1]["step"], {}), config.evaluate.tokens or ()
    return {
        "tokens": stage.tokens,
        "steps": len(steps),
        "trained_tokens": steps[-1]["tokens"],  # since the run began
        "seconds": sum(step["seconds"] for step in steps),
        "loss": sum(losses) / len(losses) if losses else None,
        "needles": {tokens: scores[name] for tokens in lengths if (name := f"needle_greedy_{tokens}") in scores},
        "evaluation_seconds": scores.get("tasks_seconds"),
    }


def harder_tasks(folder: Path, config: Config, samples: int) -> Row:
    """What `ithaca evaluate` finds of the harder tasks, and the seconds that it takes."""
    assert config.evaluate.tokens is not None
    words = [word for task in HARDER for word in ("--task", task)]
    words += ["--tokens", ",".join(map(str, config.evaluate.tokens)), "--count", str(samples), "--ranks", "1"]
    command = [sys.executable, "-m", "ithaca", "evaluate", str(folder), *words, "--json"]
    began = time.perf_counter()
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {**json.loads(found.stdout), "seconds": time.perf_counter() - began}


def make_tokens(file: Path, *documents: int) -> None:
    """Make the example's documents, or so many, unless they are there."""
    if not file.exists():
        subprocess.run([sys.executable, str(EXAMPLE / "make_tokens.py"), str(file), *map(str, documents)], check=True)


def keep_pictures(run: Path, step: int, out: Path, name: str) -> None:
    """Copy the pictures of a run to the results."""
    for picture in PICTURES:
        file = run / f"{picture}.png"
        if not file.exists():
            file = run / "evaluation" / f"step-{step}" / f"{picture}.png"
        if file.exists():
            shutil.copy(file, out / f"{name}-{picture}.png")


def measure(folder: Path, args: argparse.Namespace) -> Row:
    """Train, evaluate, and return all that is recorded."""
    began, tokens = time.perf_counter(), folder / "longer.tokens"
    make_tokens(tokens, *(SMALL if args.smoke else ()))
    made = time.perf_counter() - began
    config = read_config(EXAMPLE / "longer.toml", [f"data.source={tokens}"])
    if args.smoke:
        if not (folder / "model").exists():
            save_first_layers(config.model.source, 1, folder / "model")
        config = smoke_config(config, folder / "model")
    (folder / "longer.toml").write_text(config.toml())
    left = None if args.seconds is None else args.seconds - made
    row = {"tokens_seconds": made, **train(folder / "longer.toml", folder / "run", left)}
    if row["finished"]:
        row["harder"] = harder_tasks(folder / "run", config, args.samples)
    return row


def smoke_config(config: Config, model: Path) -> Config:
    """The example with a smaller model, short sequences, two steps in each stage and few samples, on a CPU."""
    assert config.train.stages is not None
    stages = tuple(
        replace(stage, tokens=64 << number, steps=2, batch=2) for number, stage in enumerate(config.train.stages)
    )
    return replace(
        config,
        model=replace(config.model, source=str(model)),
        train=replace(config.train, stages=stages, device="cpu"),
        evaluate=replace(config.evaluate, tokens=(256, 512), count=5),
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--smoke", action="store_true", help="a tiny form of everything, to try the script on a CPU")
    parser.add_argument("--seconds", type=float, help="stop the training after this time; it can be continued")
    parser.add_argument("--folder", type=Path, help="keep tokens and run here, and continue what is there")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each harder task at each length")
    args = parser.parse_args()
    if args.samples < 1 or (args.seconds is not None and args.seconds < LEAST):
        parser.error(f"--samples must be 1 or more and --seconds {LEAST} or more: {args.samples}, {args.seconds}")
    try:
        run(args)
    except (subprocess.SubprocessError, OSError) as problem:
        raise SystemExit(f"error: {problem}") from None


def run(args: argparse.Namespace) -> None:
    name = "longer" + "-smoke" * args.smoke
    with tempfile.TemporaryDirectory() as top:
        folder = args.folder or Path(top)
        folder.mkdir(parents=True, exist_ok=True)
        row = measure(folder, args)
        file = record(name, [row], args.out, args.commit)
        keep_pictures(folder / "run", row["steps"], args.out, name)
    for stage in row["stages"]:
        found = ", ".join(f"{100 * share:.0f} % at {format_tokens(at)}" for at, share in stage["needles"].items())
        print(
            f"{format_tokens(stage['tokens']):>6}: {stage['steps']} steps, {stage['seconds']:.0f} s, "
            f"loss {stage['loss'] or math.nan:.3f}; needles found: {found or 'not measured'}"
        )
    print(f"{'finished' if row['finished'] else 'not finished'} after {row['steps']} steps. Results in {file}")


if __name__ == "__main__":
    main()
