"""The page of a profile: self-contained, small, and drawn without an error by a real browser."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from ithaca.model.presets import PRESETS
from tests.nursery import Nursery
from tests.profile.browser import photograph, show

DRIVER = """<script>{
const at = (svg, type, share) => {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent(type, {
    clientX: box.left + box.width * share, clientY: box.top + 60, bubbles: true,
  }));
};
const ticks = id => [...document.querySelectorAll(`#${id} svg > text`)].map(node => node.textContent).join("|");
const note = (name, value) => { document.body.dataset[name] = value; };
for (const id of ["memory", "lanes"]) {
  at(document.querySelector(`#${id} svg`), "pointermove", 0.6);
  note(`${id}Tip`, document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent);
  note(`${id}Whole`, ticks(id));
  at(document.querySelector(`#${id} svg`), "pointerdown", 0.5);
  at(document.querySelector(`#${id} svg`), "pointermove", 0.6);
  at(document.querySelector(`#${id} svg`), "pointerup", 0.6);
  note(`${id}Zoomed`, ticks(id));
  document.querySelector(`#${id} svg`).dispatchEvent(new MouseEvent("dblclick"));
  note(`${id}Reset`, ticks(id));
}
}</script></body>"""


class Page(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts.append(data)
            self._within = ""


@pytest.fixture(scope="module")
def folder(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a step of eight layers, with a name that means something in HTML."""
    place = tmp_path_factory.mktemp("page")
    model = place / "a<b>&amp;{{data}}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**PRESETS["tiny"], "num_hidden_layers": 8}))
    words = ["--ranks", "2", "--tokens", "512", "--set", "plan.chunk=128", "--out", "out"]
    end = nursery.command("profile", model.name, *words, folder=place)
    assert end.code == 0, end.err
    return place / "out"


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "profile.html").read_text(encoding="utf-8")


def test_nothing_from_outside(folder: Path, text: str) -> None:
    page = Page(text)
    assert not re.search(r"https?://", text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & attributes.keys(), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", text)
    assert (folder / "profile.html").stat().st_size < 5e6
    policy = next(each["content"] for tag, each in page.tags if "http-equiv" in each)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_data_are_json(text: str, folder: Path) -> None:
    (data,) = (each for each in Page(text).scripts if each.startswith("{"))
    found, report = json.loads(data), json.loads((folder / "profile.json").read_text())
    assert found["timeline"] == report["timeline"]
    assert found["bars"] == report["bars"]
    assert found["bars"]["compute"]
    assert html.escape(report["model"]) in text
    for row in report["largest"]:
        assert html.escape(row["places"][0]) in text
    for label in re.findall(r'role="img" aria-label="([^"]+)"', text):
        assert len(label) > 20


def test_a_browser_draws_it(folder: Path, tmp_path: Path, text: str) -> None:
    """Charts are there, the tables too; hovering and zooming work; the page logs nothing."""
    page = tmp_path / "driven.html"
    page.write_text(text.replace("</body>", DRIVER), encoding="utf-8")
    shown, report = show(page), json.loads((folder / "profile.json").read_text())
    assert shown.console == []
    assert 'data-drawn="yes"' in shown.dom
    assert shown.dom.count('<polygon class="owner"') == len(report["timeline"]["owners"])
    assert shown.dom.count('<g class="lane"') == 4
    assert shown.dom.count("<rect") > 20
    assert len(re.findall(r'id="peak"', shown.dom)) == 1
    assert re.search(r">peak \d[\d.]* MiB<", shown.dom)
    assert shown.dom.count("<table") >= 4
    noted = {name: re.search(rf'data-{name}="([^"]*)"', shown.dom) for name in ("memory-tip", "lanes-tip")}
    assert noted["memory-tip"] is not None
    assert "states" in noted["memory-tip"][1]
    assert noted["lanes-tip"] is not None
    assert "compute" in noted["lanes-tip"][1]
    for chart in ("memory", "lanes"):
        whole, zoomed, reset = (
            re.search(rf'data-{chart}-{name}="([^"]*)"', shown.dom)[1]  # pyrefly: ignore
            for name in ("whole", "zoomed", "reset")
        )
        assert whole == reset != zoomed


def test_an_error_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><body><script>nothing.there()</script>", encoding="utf-8")
    assert any("ReferenceError" in line for line in show(page).console)


def test_light_and_dark(folder: Path, tmp_path: Path) -> None:
    corners: list[Any] = []
    for dark in (False, True):
        photograph(folder / "profile.html", tmp_path / "page.png", dark=dark)
        picture = matplotlib.image.imread(tmp_path / "page.png")
        corners.append(picture[5, 5, :3].mean())
        assert picture[:, :, :3].std() > 0.05  # something is drawn
    assert corners[0] > 0.95
    assert corners[1] < 0.2
