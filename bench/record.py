"""What all benchmarks share: their options, and the JSON file in which each result has its command and machine."""

import argparse
import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.config import build
from ithaca.plans.plan import Plan


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints `doc` as its help and has the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bench/results", type=Path, metavar="FOLDER", help="folder for the results")
    parser.add_argument("--commit", help="the commit to record, if this tree is a copy without its history")
    return parser


def read_plan(text: str) -> Plan:
    """'recipe=sweep; chunk=16K; zero=2' -> the Plan with these options."""
    pairs = [[word.strip() for word in item.split("=", 1)] for item in text.split(";") if item.strip()]
    return build(Plan, {key: int(value) if value.isdigit() else value for key, value in pairs}, "plan.")


def machine() -> dict[str, Any]:
    """The device and the versions that a result depends on."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "flash4": version("flash-attn-4") if KERNEL_FACTS["flash4"].installed else None,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of this tree, marked if the tree has changes; 'unknown' outside a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command() -> str:
    """The command that was typed, without --out and --commit, which differ from place to place."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in ("--out", "--commit"):
            next(words)
        else:
            kept.append(word)
    return shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *kept])


def record(name: str, results: list[dict[str, Any]], folder: Path, at: str | None) -> Path:
    """Write the results with their command, commit and machine. `at` is the commit if this tree has no history."""
    file = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    head = {"command": _command(), "commit": at or commit(), "machine": machine()}
    file.write_text(json.dumps({**head, "results": results}, indent=2) + "\n")
    return file
