"""Debian's Chromium without a window: the DOM of a page after its script has run, what it logged, a screenshot."""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
)
SECONDS = 180  # on a machine that does other things as well


@dataclass(frozen=True)
class Shown:
    dom: str
    console: list[str]  # lines that the page logged, its errors among them


def find_browser() -> str:
    """Return Chromium's path. Without it a test is skipped; where CI runs, that is a failure."""
    found = shutil.which("chromium")
    if found is None and os.environ.get("CI"):
        pytest.fail("no chromium in CI: .ci/run installs it")
    if found is None:
        pytest.skip("no chromium here: apt-get install chromium")
    return found


def run(page: Path, *words: str, dark: bool = False) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as profile:
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        command = [find_browser(), *FLAGS, f"--user-data-dir={profile}", *scheme, *words, page.absolute().as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)


def show(page: Path) -> Shown:
    """Load a page and return what it became."""
    ended = run(page, "--dump-dom")
    return Shown(ended.stdout, re.findall(r"CONSOLE.*", ended.stderr))


def photograph(page: Path, file: Path, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
    run(page, f"--screenshot={file.absolute()}", f"--window-size={width},{height}", dark=dark)
