"""Imports go downward only, also lazy ones and those for type checkers; some rooms never load torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ithaca"

# Lowest first. A room is a folder or a module of `ithaca/`; it imports itself and the rooms before it
ROOMS = (
    "base",
    "model",
    "attention",
    "tape",
    "parallel",
    "plans",
    "schedule",
    "optimizer",
    "assemble",
    "checkpoint",
    "data",
    "evaluate",
    "config",
    "planner",
    "rehearsal",
    "profile",
    "train",
    "doctor",
    "bench",
    "cli_errors",
    "cli",
)
TOP = ("__init__", "__main__")  # the public names and `python -m ithaca`: they may import every room

# (file, imported room): still to be removed, nothing may be added
KNOWN: set[tuple[str, str]] = set()

TORCH_FREE = ("plans", "config", "planner")
# The modules of `data` that load torch
WITH_TORCH = ("ithaca.data.sample", "ithaca.data.packing", "ithaca.data.windows")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = str(node.module)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room(name: str) -> str | None:
    """ithaca.tape.disk.Disk -> tape; None for other packages and for the public names of `ithaca`."""
    first, *rest = name.split(".")
    return rest[0] if first == "ithaca" and rest and rest[0] in ROOMS else None


def test_every_file_belongs_to_a_room() -> None:
    found = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert found == {*ROOMS, *TOP}


def test_imports_go_downward() -> None:
    upward = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        relative = file.relative_to(PACKAGE)
        own = relative.parts[0].removesuffix(".py")
        if own in TOP:
            continue
        for line, name in imported(ast.parse(file.read_text(encoding="utf-8"))):
            other = room(name)
            assert other or not name.startswith("ithaca.") or name == "ithaca.__version__", (
                f"{relative}:{line} imports {name} through the public names"
            )
            if other and ROOMS.index(other) > ROOMS.index(own):
                upward.add((str(relative), other))
    assert not upward - KNOWN


def without_torch(program: str) -> None:
    end = "\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{program}{end}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["plan", "--help"],
        ["bench", "ladder", "--help"],
        ["plan", "tiny", "--gpus", "1xH100-80GB", "--tokens", "64K", "--json"],
    ],
)
def test_commands_that_answer_without_torch(words: list[str]) -> None:
    without_torch(f"from ithaca.cli import app\napp({words}, standalone_mode=False)")


def test_a_benchmark_is_predicted_without_torch(tmp_path: Path) -> None:
    words = ["bench", "ladder", "--predict", "--commit", "none", "--out", str(tmp_path / "out")]
    page = ["bench", "report", str(tmp_path / "out"), "--out", str(tmp_path / "results.md")]
    without_torch(f"from ithaca.cli import app\nfor words in {words}, {page}:\n    app(words, standalone_mode=False)")


def test_rooms_without_torch() -> None:
    names = [
        ".".join(("ithaca", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for file in sorted(PACKAGE.rglob("*.py"))
    ]
    free = [name for name in names if room(f"{name}.") in TORCH_FREE or room(f"{name}.") == "data"]
    assert len(free) > len(TORCH_FREE)
    without_torch("\n".join(f"import {name}" for name in ("ithaca", "ithaca.cli", *free) if name not in WITH_TORCH))
