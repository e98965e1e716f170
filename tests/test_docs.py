"""docs/training.md lists every option with its default, and no other."""

import dataclasses
import re
from pathlib import Path

from ithaca.config import Config

PAGE = (Path(__file__).parent.parent / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_table_of_options() -> None:
    listed = dict(re.findall(r"^\| `(\w+\.\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    config = Config()
    wanted = {}
    for section in dataclasses.fields(config):
        for name, value in vars(getattr(config, section.name)).items():
            wanted[f"{section.name}.{name}"] = "–" if value in (None, "") else f"`{value}`"
    assert listed == wanted
