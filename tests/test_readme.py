"""The README's program runs as it stands, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=400)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^make (\S+)", README, flags=re.MULTILINE))
    assert targets == {"train", "test"}
    for target in targets:
        subprocess.run(["make", "-n", target], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_links_lead_somewhere() -> None:
    for page in (README, (ROOT / "docs/architecture.md").read_text(encoding="utf-8")):
        for link in re.findall(r"\]\(([^)#]+)\)", page):
            assert (ROOT / link).exists(), link
