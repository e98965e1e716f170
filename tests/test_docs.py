"""Pages say what the program says: options, commands, output, rooms, files and functions."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from ithaca.attention.kernels import facts
from ithaca.base.errors import PlanError
from ithaca.cli import app
from ithaca.config import AUTO, RENAMED, Config
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES
from tests.models import make_model, save
from tests.nursery import Nursery
from tests.test_layers import ROOMS

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "ithaca"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
CURRENT = [name for name in PAGES if name != "LOG.md"]  # the log has the names of its day
TRAINING, PLANNING, ARCHITECTURE = (PAGES[name] for name in ("training.md", "planning.md", "architecture.md"))


def test_the_table_of_options() -> None:
    listed = dict(re.findall(r"^\| `(\w+\.\w+)` \| (\S+) \|", TRAINING, re.MULTILINE))
    config = Config()
    assert config.plan is None  # which is recipe "auto"
    sections = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    sections["plan"] = Plan()
    wanted = {}
    for section, options in sections.items():
        for name, value in vars(options).items():
            value = str(value).lower() if isinstance(value, bool) else value  # as TOML has it
            wanted[f"{section}.{name}"] = "–" if value in (None, "") else f"`{value}`"
    wanted["plan.recipe"] = f"`{AUTO}`"
    assert listed == wanted
    for old, new in RENAMED.items():
        assert f"`{old}`" in TRAINING
        assert f"`{new}`" in TRAINING


def test_every_recipe_has_its_row() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGES["plans.md"].partition("## ")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == {*RECIPES}


def planned(words: str, *more: str) -> str:
    """What `ithaca plan` says, also where it refuses."""
    outcome = CliRunner().invoke(app, ["plan", *shlex.split(words), *more])
    if isinstance(outcome.exception, PlanError):
        return f"error: {outcome.exception}\n"
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def quoted(command: str) -> list[tuple[str, str]]:
    """Every `$ ithaca command words` on a page with the output that is printed below it."""
    pattern = rf"^\$ ithaca {command} (.*?)\n(.*?)```"
    return [found for name in CURRENT for found in re.findall(pattern, PAGES[name], re.MULTILINE | re.DOTALL)]


def shows(page: str, said: str) -> bool:
    """A line of … stands for any number of lines; at the end of a line for the rest of it."""
    parts = re.split(r"(^ *…\n|…$)", page, flags=re.MULTILINE)
    kinds = {"…": ".*", "…\n": "(?:.*\n)*"}
    pattern = "".join(kinds[part.strip(" ")] if part.strip(" ") in kinds else re.escape(part) for part in parts)
    return re.fullmatch(pattern, said) is not None


def test_what_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_installed", lambda _: False)  # as the pages say, whatever is installed here
    assert len(quoted("plan")) == 9
    for words, shown in quoted("plan"):
        assert shows(shown, planned(words)), planned(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows a CPU")
def test_what_rehearse_says(nursery: Nursery, tmp_path: Path) -> None:
    ((words, shown),) = quoted("rehearse")
    end = nursery.command("rehearse", *shlex.split(words), folder=tmp_path)
    assert end.code == 0, end.err
    assert shows(shown, end.out), end.out


@pytest.mark.full
def test_what_train_says(nursery: Nursery, tmp_path: Path) -> None:
    ((words, shown),) = quoted("train")
    save(make_model("llama3.1", vocab_size=256), tmp_path / "my-model")
    (tmp_path / "books.txt").write_text("sing, muse, of the man of many turns. " * 40)
    assert nursery.command("data", "books.txt", "--out", "books.tokens", folder=tmp_path).code == 0
    end = nursery.command("train", *shlex.split(words), "--set", "train.device=cpu", folder=tmp_path)
    assert end.code == 0, end.err
    assert shows(shown, end.out), end.out


def test_hardware_as_planning_has_it(tmp_path: Path) -> None:
    (file,) = re.findall(r"```toml\n(.*?)```", PLANNING, re.DOTALL)
    (tmp_path / "gpus.toml").write_text(file, encoding="utf-8")
    said = planned("llama3-8b --gpus 8xMyGPU-96GB --tokens 64K", "--hardware", str(tmp_path / "gpus.toml"), "--verbose")
    assert "on 8xMyGPU-96GB: fits" in said
    assert "68 % of the peak, as measured on the H200-141GB" in said


@pytest.mark.parametrize("name", CURRENT)
def test_commands_exist(name: str) -> None:
    """Every `ithaca …` in a block or in backticks names a command, with options that it has."""
    page = PAGES[name].replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", page, re.DOTALL))
    inline = re.findall(r"`(ithaca [^`]*)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    lines = [*re.findall(r"\b(ithaca [a-z]+ .*)", blocks), *inline]
    commands = typer.main.get_command(app).commands
    for line in lines:
        words = line.partition("#")[0].partition(":")[0].replace("'", "").split()
        command = words[1]
        if command.startswith("-"):
            continue  # ithaca --help
        assert command in commands, line
        found = commands[command]
        for word in words[2:3] if hasattr(found, "commands") else ():  # ithaca bench ladder
            assert word in found.commands, line
            found = found.commands[word]
        options = {option for item in found.params for option in item.opts}
        assert {word for word in words if re.fullmatch(r"--[a-z-]+", word)} <= options, line


def anchors(page: str) -> set[str]:
    """The headings of a page as GitHub links them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    folder = ROOT if name == "README.md" else DOCS
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        path, _, anchor = link.partition("#")
        assert (folder / path).exists(), link
        assert not anchor or anchor in anchors(PAGES[Path(path).name if path else name]), link


@pytest.mark.parametrize("name", CURRENT)
def test_files_and_functions_exist(name: str) -> None:
    """`tape/disk.py:DiskTape`, `facts.py`, `schedule/sweep/`: below ithaca/, or below the repository's root."""
    for path, function in re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|toml))(?::(\w+))?`", PAGES[name]):
        if path in ("run.toml", "config.toml", "rates.toml"):
            continue  # a user's
        files = [file for file in (PACKAGE / path, ROOT / path) if file.exists()] or [*PACKAGE.rglob(path)]
        files = files or [*(ROOT / "tests").rglob(path)]
        assert files, path
        defined = rf"^ *(?:async )?(?:def|class) {function}\b|^{function}\b.*="
        assert not function or any(re.search(defined, file.read_text("utf-8"), re.MULTILINE) for file in files), (
            f"{path}:{function}"
        )


def test_the_rooms() -> None:
    table = ARCHITECTURE.partition("## The rooms")[2].partition("## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == ROOMS
