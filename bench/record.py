"""What every published figure carries: its command, commit and machine, in one JSON file under bench/results/."""

import argparse
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark: its own text, and where the results go."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bench/results", type=Path, metavar="FOLDER", help="for the results")
    parser.add_argument("--commit", help="of a tree that was copied without its history")
    return parser


def machine() -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of this tree, marked when the tree has changes; 'unknown' outside a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command() -> str:
    """As it can be typed anywhere: without where the results went and what commit it was."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in ("--out", "--commit"):
            next(words)
        else:
            kept.append(word)
    return shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *kept])


def record(name: str, results: list[dict[str, Any]], folder: Path, at: str | None) -> Path:
    """Write the results; `at` names the commit where the tree was copied without its history."""
    file = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    head = {"command": _command(), "commit": at or commit(), "machine": machine()}
    file.write_text(json.dumps({**head, "results": results}, indent=2) + "\n")
    return file
