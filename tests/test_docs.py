"""docs/training.md lists every option with its default, and no other; docs/planning.md shows what the program says."""

import dataclasses
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from ithaca.base.errors import PlanError
from ithaca.cli import app
from ithaca.config import AUTO, Config
from ithaca.plans.plan import Plan

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PLANNING = ((DOCS / name).read_text(encoding="utf-8") for name in ("training.md", "planning.md"))


def test_the_table_of_options() -> None:
    listed = dict(re.findall(r"^\| `(\w+\.\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    config = Config()
    assert config.plan is None  # which is recipe "auto"
    sections = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    sections["plan"] = Plan()
    wanted = {}
    for section, options in sections.items():
        for name, value in vars(options).items():
            wanted[f"{section}.{name}"] = "–" if value in (None, "") else f"`{value}`"
    wanted["plan.recipe"] = f"`{AUTO}`"
    assert listed == wanted


def planned(words: str, *more: str) -> str:
    """What `ithaca plan` says, also where it refuses."""
    outcome = CliRunner().invoke(app, ["plan", *shlex.split(words), *more])
    if isinstance(outcome.exception, PlanError):
        return f"error: {outcome.exception}\n"
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_what_planning_shows() -> None:
    """A line of … stands for any number of lines; at the end of a line for the rest of it."""
    quoted = re.findall(r"^\$ ithaca plan (.*?)\n(.*?)```", PLANNING, re.MULTILINE | re.DOTALL)
    assert len(quoted) == 2
    for words, shown in quoted:
        parts = re.split(r"(^ *…\n|…$)", shown, flags=re.MULTILINE)
        kinds = {"…": ".*", "…\n": "(?:.*\n)*"}
        said = "".join(kinds[part.strip(" ")] if part.strip(" ") in kinds else re.escape(part) for part in parts)
        assert re.fullmatch(said, planned(words)), words


def test_hardware_as_planning_has_it(tmp_path: Path) -> None:
    (file,) = re.findall(r"```toml\n(.*?)```", PLANNING, re.DOTALL)
    (tmp_path / "gpus.toml").write_text(file, encoding="utf-8")
    said = planned("llama3-8b --gpus 8xMyGPU-96GB --tokens 64K", "--hardware", str(tmp_path / "gpus.toml"), "--verbose")
    assert "on 8xMyGPU-96GB: fits" in said
    assert "68 % of the peak, as measured on the H200-141GB" in said


def test_links_of_planning_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)", PLANNING):
        assert (DOCS / link).exists(), link
