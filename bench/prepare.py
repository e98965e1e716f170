"""Prepare gigabytes of text and one huge document: memory, rate, and the same bytes after kills.

    python bench/prepare.py --folder /tmp/prepare --text 2GB --document 500MB --cores 2

The text is Python's standard library again and again, the lines of each file in another order, with some words that
occur once: JSON lines for --text, one file for --document. The tokenizer is a byte-level BPE of 32,000 trained on the
library. `ithaca data` runs undisturbed, then again into another file with a SIGKILL to all its processes, one to a
single worker, and the command given again until it ends. Compares the bytes. Memory is the largest sum of the resident
memory of all its processes, sampled ten times a second: pages that they share count several times.
"""

import argparse
import filecmp
import json
import os
import random
import resource
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ithaca.base.sizes import format_bytes, format_seconds, parse_bytes

ROOT = Path(__file__).resolve().parent.parent


def library() -> list[str]:
    """Return the source files of the standard library."""
    top = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(top.rglob("*.py")) if "site-packages" not in file.parts]
    return [text for file in files if len(text := file.read_text(errors="replace")) > 200]


def variations(texts: list[str]) -> Iterator[str]:
    """Yield the texts again and again, each time with their lines in another order and some new words."""
    for turn in range(1_000_000):
        chance = random.Random(turn)
        for text in texts:
            lines = text.splitlines(keepends=True)
            chance.shuffle(lines)
            for at in range(0, len(lines), 20):
                lines[at] = f"word_{chance.randrange(10**9):x} {lines[at]}"
            yield "".join(lines)


def make_tokenizer(texts: list[str], folder: Path) -> Path:
    """Train a BPE of 32,000 that begins a text as Llama 3 does, and write it to a folder."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def make_input(path: Path, size: int, texts: list[str]) -> Path:
    """Write about `size` bytes of text: JSON lines, or one text file."""
    if path.exists():
        return path
    with path.open("w", encoding="utf-8") as file:
        written = 0
        for text in variations(texts):
            file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)
            written += len(text)
            if written >= size:
                return path
    raise AssertionError("there is always one more variation")


class Run:
    """One `ithaca data` in a process group of its own, on some cores."""

    def __init__(self, source: Path, out: Path, tokenizer: Path, cores: int):
        command = [sys.executable, "-m", "ithaca", "data", str(source), "--out", str(out)]
        allowed = sorted(os.sched_getaffinity(0))[:cores]
        self._job = subprocess.Popen(
            [*command, "--tokenizer", str(tokenizer), "--workers", str(cores)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )
        self._began, self.peak = time.monotonic(), 0
        self._partial = out.with_name(out.name + ".partial")

    def wait(self, most_bytes: float = float("inf")) -> bool:
        """Wait until it ends, or has written so many bytes; return whether it has ended. Notes the peak of memory."""
        while self._job.poll() is None:
            self.peak = max(self.peak, self._resident())
            if self._partial.exists() and self._partial.stat().st_size >= most_bytes:
                return False
            time.sleep(0.1)
        return True

    def _resident(self) -> int:
        total = 0
        try:
            leader = psutil.Process(self._job.pid)
            for process in (leader, *leader.children(recursive=True)):
                total += process.memory_info().rss
        except psutil.Error:
            pass
        return total

    def kill_all(self) -> None:
        os.killpg(self._job.pid, signal.SIGKILL)
        self._job.communicate()

    def kill_worker(self) -> tuple[int, str]:
        """Kill one worker; return the code of the run and its last line."""
        psutil.Process(self._job.pid).children()[0].kill()
        _, errors = self._job.communicate(timeout=120)
        return self._job.returncode, errors.strip().splitlines()[-1]

    def result(self) -> tuple[float, str]:
        """Return the seconds that it took, and what it said."""
        said, errors = self._job.communicate()
        assert self._job.returncode == 0, errors
        return time.monotonic() - self._began, said


def measure(source: Path, tokenizer: Path, folder: Path, cores: int) -> bool:
    """Run undisturbed and killed; print the figures. Return whether the bytes are the same."""
    good, killed = (folder / f"{source.stem}.{name}.tokens" for name in ("good", "killed"))
    for file in folder.glob(f"{source.stem}.*.tokens*"):
        file.unlink()
    busy = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = busy.ru_utime + busy.ru_stime
    run = Run(source, good, tokenizer, cores)
    run.wait()
    seconds, said = run.result()
    size, made = source.stat().st_size, good.stat().st_size
    busy = resource.getrusage(resource.RUSAGE_CHILDREN)
    first = next(line for line in said.splitlines() if str(good) in line)
    rate = f"{format_bytes(size / seconds)}/s"
    print(f"{source.name}: {format_bytes(size)} in {format_seconds(seconds)}, {rate}, on {cores} cores", flush=True)
    cpu = busy.ru_utime + busy.ru_stime - before
    print(f"  processor time: {format_seconds(cpu)}, {format_bytes(size / cpu)} for each second of a core", flush=True)
    print(f"  {first}\n  memory of all processes, at most: {format_bytes(run.peak)}", flush=True)
    run = Run(source, killed, tokenizer, cores)
    if not run.wait(0.25 * made):
        run.kill_all()
    run = Run(source, killed, tokenizer, cores)
    if not run.wait(0.5 * made):
        code, line = run.kill_worker()
        print(f"  a worker killed: code {code}, {line}", flush=True)
    run = Run(source, killed, tokenizer, cores)
    run.wait()
    _, said = run.result()
    print(f"  {said.splitlines()[0]}", flush=True)
    same = filecmp.cmp(good, killed, shallow=False)
    print(f"  after two kills: {'the same bytes' if same else 'OTHER BYTES'}", flush=True)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where everything is written")
    parser.add_argument("--text", default="2GB")
    parser.add_argument("--document", default="500MB")
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    texts = library()
    tokenizer = options.folder / "tokenizer"
    if not tokenizer.exists():
        make_tokenizer(texts, tokenizer)
    sources = {"document.txt": parse_bytes(options.document), "text.jsonl": parse_bytes(options.text)}
    made = [make_input(options.folder / name, size, texts) for name, size in sources.items() if size]
    same = [measure(source, tokenizer, options.folder, options.cores) for source in made]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
