"""The claims: what README, the pages and the log say of a GPU, each with its command and its bounds.

Seconds are those of one H200, to plan a run. Bounds are what was promised, not what was last measured.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.claims import Claim, Figure
from ithaca.bench.peer_names import ITHACA_PLANNED, LIGER, LIGER_ALONE

Row = dict[str, Any]
Read = Callable[[list[Row]], Sequence[Figure]]
GIB = 2**30
KINDS_OF_TESTS = ("tests", "failures", "errors", "skipped")  # counts in a report of pytest
FAR_END = "recipe=sweep; lse=host; optimizer=host; chunk=32K"
ONE_GPU = "chunk=32K; tile=8K; x=rebuild*28, host; o=host; lse=host; residual=host; kv=host"


@dataclass(frozen=True)
class Printed:
    """A number that tests print: the largest of each test's report counts."""

    what: str
    pattern: str
    most: float

    def largest(self, report: ElementTree.Element) -> Figure:
        said = "\n".join(output.text or "" for output in report.iter("system-out"))
        return Figure(self.what, max(map(float, re.findall(self.pattern, said))), most=self.most)


ENDED = Printed("seconds until the other ranks had ended", r"the others ended ([0-9.]+) s later", 80)
WENT_ON = Printed("seconds until the run that was started again had ended", r"again, ended ([0-9.]+) s later", 80)


def _file(kind: str, name: str) -> str:
    return f"{kind}-" + "".join(letter if letter.isalnum() else "-" for letter in name)


def results(out: Path, name: str) -> list[Row]:
    """The results in a file of bench.record; an error of one is an error here."""
    rows = json.loads((out / f"{name}.json").read_text())["results"]
    if failed := [row["error"] for row in rows if row.get("error")]:
        raise ValueError(failed[0])
    return rows


def of_bench(name: str, module: str, words: str, file: str, seconds: float, read: Read, *needs: str) -> Claim:
    """A claim that a benchmark measures, which leaves the results `file`."""
    command = f"python -m bench.{module} {words} --out {{out}} --commit $ITHACA_COMMIT"
    return Claim(name, command, seconds, lambda out: read(results(out, file)), ("gpu", *needs))


def of_block(name: str, words: str, seconds: float, read: Read, *needs: str) -> Claim:
    """A claim about one layer, measured by bench.block; the file of results has the claim's name."""
    file = _file("block", name)
    return of_bench(name, "block", f"{words} --name {file}", file, seconds, read, *needs)


def of_tests(
    name: str, words: str, seconds: float, passed: int, *needs: str, printed: tuple[Printed, ...] = ()
) -> Claim:
    """A claim that tests pass: at least `passed` of them, so that skipping them all proves nothing."""
    file = _file("tests", name) + ".xml"

    def read(out: Path) -> list[Figure]:
        report = ElementTree.parse(out / file).getroot()
        count: Counter[str] = Counter()
        for suite in report.iter("testsuite"):
            count.update({word: int(suite.get(word, 0)) for word in KINDS_OF_TESTS})
        failed = count["failures"] + count["errors"]
        return [
            Figure("tests passed", count["tests"] - count["skipped"] - failed, least=passed),
            Figure("tests failed", failed, most=0),
            *(number.largest(report) for number in printed),
        ]

    command = f"python -m pytest -p no:cacheprovider -o junit_logging=system-out --junitxml={{out}}/{file} {words}"
    return Claim(name, command, seconds, read, ("gpu", *needs), timed=False)


def shares(name: str, words: str, seconds: float, passed: int, of: int, *needs: str, **more: Any) -> list[Claim]:
    """Claims that tests pass which take long: each runs a share of them, at the same time."""
    return [
        of_tests(f"{name}, {number} of {of}", f"{words} --share {number}/{of}", seconds, passed // of, *needs, **more)
        for number in range(1, of + 1)
    ]


def of_rehearsal(name: str, words: str, seconds: float, read: Callable[[Row], Sequence[Figure]]) -> Claim:
    """A claim that `ithaca rehearse` or `ithaca profile` measures."""
    file = _file("rehearsal", name) + ".json"
    command = f"python -m ithaca {words} --json > {{out}}/{file}"
    return Claim(name, command, seconds, lambda out: read(json.loads((out / file).read_text())), ("gpu",))


def of_doctor(ranks: int, words: str, seconds: float, compared: int, *needs: str) -> Claim:
    """A claim that the doctor finds nothing wrong, with at least this many comparisons of recipes."""
    file = f"doctor-{ranks}-ranks.txt"

    def read(out: Path) -> list[Figure]:
        lines = (out / file).read_text().splitlines()
        right = sum(bool(re.search(r"\d  right$", line)) for line in lines)
        return [
            Figure("recipes compared", right, least=compared),
            Figure("lines with something wrong", sum("wrong" in line.lower() for line in lines), most=0),
        ]

    command = f"python -m ithaca doctor --quick --ranks {ranks} {words} > {{out}}/{file}"
    return Claim(
        f"ithaca doctor on {ranks} rank{'s' * (ranks > 1)} of one GPU", command, seconds, read, ("gpu", *needs)
    )


def peak(row: Row, most: float) -> Figure:
    return Figure("peak, GiB", row["peak_bytes"] / GIB, most=most)


def over_bare(row: Row, most: float) -> Figure:
    return Figure("forward and backward over bare kernels", row["over_bare"], most=most)


def predicted(row: Row, percent: float) -> Figure:
    error = 100 * abs(row["peak_bytes_predicted"] / row["peak_bytes"] - 1)
    return Figure("error of the predicted peak, %", error, most=percent)


def kv_on_the_host(rows: list[Row]) -> list[Figure]:
    host, device = ([row for row in rows if row["plan"]["kv"] == place] for place in ("host", "device"))
    return [
        Figure("growth of the peak from 1M to 2M, d", host[1]["slope_d"], most=0.3),
        Figure("speed of K and V on the host, 2M", device[1]["seconds"] / host[1]["seconds"], least=0.97),
    ]


def chunk_curve(rows: list[Row]) -> list[Figure]:
    best = {recipe: min(row["seconds"] for row in rows if row["recipe"] == recipe) for recipe in ("sweep", "fpdt")}
    return [
        Figure("points of the curve", len(rows), least=12),
        Figure("speed of sweep over fpdt, each with its best chunk", best["fpdt"] / best["sweep"], least=1.2),
    ]


def kernels_of_steps(ratio: float, mfu: float | None = None) -> Callable[[list[Row]], list[Figure]]:
    def read(rows: list[Row]) -> list[Figure]:
        flash, other = rows[:2]
        figures = [Figure("speed over cuDNN", other["seconds"] / flash["seconds"], least=ratio)]
        shown = None if mfu is None else mfu / 100
        return [*figures, Figure("causal MFU", flash["mfu_causal"], least=shown)]

    return read


def rank_of_8(rows: list[Row]) -> list[Figure]:
    flash, other = (row for row in rows if row["tokens"] == 2**21)
    return [
        Figure("speed over cuDNN, 2M", other["seconds"] / flash["seconds"], least=1.10),
        over_bare(flash, 1.04),
    ]


def documents(rows: list[Row]) -> list[Figure]:
    return [
        figure
        for row in rows
        if "ratios" in row and ("64 documents" in row["point"] or "five odd" in row["point"])
        for figure in (
            Figure(f"{row['point']}: speed over before", row["ratios"]["before"], least=1.1),
            Figure(f"{row['point']}: of one call over the walk", row["ratios"]["walk"], least=0.95),
        )
    ]


def kernel_errors(rows: list[Row]) -> list[Figure]:
    worst = max(max(row["over"].values()) for row in rows if row.get("over"))
    return [Figure("largest error over that of cuDNN", worst, most=1.2)]


def small_steps(rows: list[Row]) -> list[Figure]:
    sweep, planned = rows
    return [
        Figure("sweep, seconds", sweep["seconds"], most=0.45),
        Figure("sweep, GPU operations", sweep["operations"], most=6000),
        Figure("sweep, stream synchronisations", sweep["stream_synchronisations"], most=0),
        Figure("the planned Plan, tokens/s", planned["tokens_per_second"], least=200_000),
    ]


def picked_plans(rows: list[Row]) -> list[Figure]:
    picked = [one for row in rows for one in row["candidates"] if one["name"] == row["picked"]]
    return [
        Figure("points", len(picked), least=8),
        Figure("picked over best, seconds", max(row["picked_over_best"] for row in rows), most=1.05),
        Figure("error of predicted steps, %", 100 * max(abs(one["step_error"]) for one in picked), most=12),
        Figure("error of predicted peaks, %", 100 * max(abs(one["peak_error"]) for one in picked), most=5),
    ]


def disk(rows: list[Row]) -> list[Figure]:
    (row,) = rows
    return [
        Figure("error of the predicted slowdown, %", 100 * abs(row["prediction_error"]), most=20),
        Figure("first losses differ", 0 if row["same_first_loss"] else 1, most=0),
    ]


def losses_of_ranks(rows: list[Row]) -> list[Figure]:
    (row,) = rows
    losses = row["several"]["losses"]
    return [
        Figure("steps", len(losses), least=20),
        Figure("loss, last over first", losses[-1] / losses[0], most=0.9),
        Figure("largest difference of a loss", row["largest_difference"], most=0.01),
    ]


def looks_far(rows: list[Row]) -> list[Figure]:
    """Needles at the end of the training, at the best of the lengths of 32K and more."""
    (row,) = rows
    far = [share for tokens, share in row["stages"][-1]["needles"].items() if int(tokens) >= 2**15]
    return [
        Figure("the training came to its end", int(row["finished"]), least=1),
        Figure("needles found at 32K tokens or more", max(far, default=0.0), least=0.9),
    ]


def over_training(row: Row) -> float:
    """The peak of an evaluation over the one that is predicted for a training step with the same layers."""
    return row["peak_bytes"] / row["training_peak_bytes_predicted"]


def of_liger(model: str, layers: int) -> Claim:
    """A claim that short contexts take no longer than with `transformers` and Liger, in the same run.

    Theirs is the faster of Liger with checkpointing and without, where the memory suffices for that. The results have a
    folder of their own: a user's are in a file of the same name.
    """
    lengths = ("8K", "32K", "64K")
    words = f"{model} --layers {layers} --tokens {','.join(lengths)} --rounds 1"
    sides = f"--only '{ITHACA_PLANNED}' --only '{LIGER}'"  # all sides with Liger: they have this in their names
    folder = f"liger-{model}"

    def read(out: Path) -> list[Figure]:
        rows = json.loads((out / folder / f"peers-{model}-{layers}-layers-best.json").read_text())["rows"]
        answers = {row["name"]: row["answer"] for row in rows}

        def fastest(tokens: str, *sides: str) -> float:
            found = [answers[f"{tokens} round 1: {side}"] for side in sides]
            return min(answer["seconds"] for answer in found if answer["ran"])

        return [
            Figure(
                f"{tokens}: seconds with Liger over Ithaca's",
                fastest(tokens, LIGER, LIGER_ALONE) / fastest(tokens, ITHACA_PLANNED),
                least=1.0,
            )
            for tokens in lengths
        ]

    command = f"python -m ithaca bench peers {words} {sides} --out {{out}}/{folder} --commit $ITHACA_COMMIT"
    name = f"short contexts beside Liger, {layers} layers of {model}"
    return Claim(name, command, 270, read, ("gpu", "flash4", "liger"))


def tensor_rungs(out: Path) -> list[Figure]:
    """Of a folder of its own, since the ladder's other rows are in a file of the same name."""
    rows = json.loads((out / "tensor" / "ladder-llama3-8b-8x80GB.json").read_text())["rows"]
    answers = [row["answer"] for row in rows if row["name"].startswith("Tensor") and row["answer"]]
    errors = {
        name: max(100 * abs(answer[f"{name}_predicted"] / answer[name] - 1) for answer in answers)
        for name in ("peak_bytes", "seconds")
    }
    return [
        Figure("rungs", len(answers), least=3),
        Figure("error of predicted peaks, %", errors["peak_bytes"], most=5),
        Figure("error of predicted steps, %", errors["seconds"], most=12),
    ]


CLAIMS: list[Claim] = [
    # Numbers are right
    of_tests("tests of kernels against float64", "-m gpu tests/attention/test_kernels.py", 120, 100),
    *shares("tests of flash4 against float64", "-m gpu tests/attention/test_flash4.py", 140, 93, 4, "flash4"),
    *shares("tests of recipes on a GPU", "-m gpu tests/test_gpu.py tests/test_gpu_ranks.py", 300, 300, 2),
    of_tests("tests of CUDA graphs", "-m gpu tests/test_gpu_graph.py", 120, 4),
    of_tests(
        "tests of loss, optimizer, disk and doctor on a GPU",
        "-m gpu tests/schedule/test_loss.py tests/optimizer tests/tape/test_disk.py tests/doctor",
        120,
        10,
    ),
    of_tests("tests of recipes over NCCL, 2 ranks", "-m nccl -k 2-ranks tests/test_nccl.py", 110, 48, "shared"),
    of_tests("tests of recipes over NCCL, 4 ranks", "-m nccl -k 4-ranks tests/test_nccl.py", 110, 48, "shared"),
    of_tests("tests of recipes over NCCL, 8 ranks", "-m nccl -k 8-ranks tests/test_nccl.py", 70, 4, "shared"),
    *shares(
        "tests of lost ranks over NCCL",
        "-m nccl tests/train/test_nccl.py",
        270,
        6,
        3,
        "shared",
        printed=(ENDED, WENT_ON),
    ),
    of_bench(
        "training on 4 NCCL ranks, and on one",
        "shared_ranks",
        "",
        "shared-ranks",
        110,
        losses_of_ranks,
        "shared",
    ),
    of_doctor(1, "", 135, 10),
    of_doctor(4, "--share-gpus", 70, 20, "shared"),
    # The far end
    of_block(
        "5M tokens, K and V on the device",
        f"--tokens 5M --ranks 8 --once --hold --repeats 1 --plan '{FAR_END}'",
        230,
        lambda rows: [peak(rows[0], 26), over_bare(rows[0], 1.03)],
    ),
    of_block(
        "5M tokens, K and V in host memory",
        f"--tokens 5M --ranks 8 --once --hold --repeats 1 --plan '{FAR_END}; kv=host'",
        230,
        lambda rows: [peak(rows[0], 20), over_bare(rows[0], 1.03)],
    ),
    of_block(
        "llama2-7b, 4M tokens by head rounds",
        "--model llama2-7b --tokens 4M --ranks 8 --once --hold --repeats 1 --plan 'recipe=sweep; lse=host; heads=8'",
        150,
        lambda rows: [peak(rows[0], 25), over_bare(rows[0], 1.05)],
    ),
    of_block(
        "2M tokens, K and V in host memory and on the device",
        "--tokens 1M,2M --ranks 8 --once --no-bare --repeats 1 --plan 'recipe=sweep; kv=host' --plan recipe=sweep",
        100,
        kv_on_the_host,
    ),
    of_block(
        "1M tokens on one GPU, one layer",
        f"--tokens 1M --ranks 1 --once --hold --repeats 1 --plan 'recipe=sweep; {ONE_GPU}'",
        90,
        lambda rows: [over_bare(rows[0], 1.03)],
    ),
    of_bench("chunks of 8K to 256K", "chunks", "", "chunks-llama3-8b-1M-8", 180, chunk_curve),
    of_bench("o on disk, 256K", "disk", "--repeats 1 --size 2GiB", "disk", 150, disk),
    of_rehearsal(
        "5952K tokens on one GPU, memory",
        "rehearse llama3-8b --ranks 1 --tokens 5952K --memory-only --layers 2 --set plan.recipe=sweep "
        "--set plan.chunk=32K --set plan.tile=8K --set 'plan.x=rebuild*28, host' --set plan.o=host "
        "--set plan.lse=host --set plan.residual=host --set plan.kv=host",
        60,
        lambda row: [predicted(row, 5)],
    ),
    of_rehearsal(
        "60 sequences of 128K on a rank of 8, memory",
        "rehearse llama3-8b --ranks 8 --tokens 7680K --documents 60x128K --memory-only --layers 2 --cap 80GB "
        "--set plan.chunk=64K --set plan.tile=8K --set 'plan.x=rebuild*28, host' --set 'plan.o=host*29, device*3' "
        "--set plan.lse=device --set plan.residual=device --set plan.kv=device",
        45,
        lambda row: [predicted(row, 5)],
    ),
    # Fast kernels
    of_bench(
        "errors of flash4 beside those of cuDNN",
        "kernels",
        "--tables errors",
        "kernels-errors",
        90,
        kernel_errors,
        "flash4",
    ),
    of_bench(
        "attention in documents",
        "kernels",
        "--tables rates --only documents --limit 60 --name documents",
        "kernels-rates-documents",
        70,
        documents,
        "flash4",
    ),
    of_bench(
        "one layer of 8B, 512K tokens",
        "step",
        "--layers 1 --model llama3-8b --tokens 512K --warm 128K --plan recipe=sweep --kernels flash4,cudnn+flash",
        "step-llama3-8b-1-layers-512K",
        70,
        kernels_of_steps(1.05, 53),
        "flash4",
    ),
    of_bench(
        "one layer of 8B, 1M tokens",
        "step",
        "--layers 1 --model llama3-8b --tokens 1M --warm 128K --plan recipe=sweep --kernels flash4,cudnn+flash",
        "step-llama3-8b-1-layers-1M",
        160,
        kernels_of_steps(1.05, 53),
        "flash4",
    ),
    of_block(
        "a rank of 8, 2M tokens, flash4 and cuDNN",
        "--ranks 8 --tokens 256K,2M --once --repeats 1 --plan 'recipe=sweep; kernel=flash4' "
        "--plan 'recipe=sweep; kernel=cudnn+flash'",
        150,
        rank_of_8,
        "flash4",
    ),
    of_bench(
        "Llama3-8B, 128K tokens",
        "step",
        "--model llama3-8b --tokens 128K --warm 32K --kernels flash4,cudnn+flash "
        "--plan 'recipe=sweep; chunk=16K; x=host, rebuild*17, host, rebuild*7, host, rebuild*3, host, rebuild'",
        "step-llama3-8b-128K",
        180,
        kernels_of_steps(1.06),
        "flash4",
    ),
    of_bench(
        "Llama3.2-3B, 256K tokens",
        "step",
        "--model llama3.2-3b --tokens 256K --warm 16K --kernels flash4,cudnn+flash "
        "--plan 'recipe=sweep; zero=2; residual=device; x=device*21, host*7; o=device*21, host*7' --name kernels",
        "step-llama3.2-3b-256K-kernels",
        150,
        kernels_of_steps(1.07),
        "flash4",
    ),
    of_bench(
        "Llama3.2-1B, 512K tokens",
        "step",
        "--model llama3.2-1b --tokens 512K --warm 32K --kernels flash4,cudnn+flash "
        "--plan 'recipe=sweep; zero=2; x=device; o=device; residual=device' --name kernels",
        "step-llama3.2-1b-512K-kernels",
        230,
        kernels_of_steps(1.16),
        "flash4",
    ),
    # Small work
    of_bench(
        "Llama3.2-1B, 32K tokens, nothing checkpointed",
        "step",
        "--model llama3.2-1b --tokens 32K --plan 'recipe=dense; checkpoint=none; zero=2; kernel=flash4' --name short",
        "step-llama3.2-1b-32K-short",
        25,
        lambda rows: [Figure("causal MFU", rows[0]["mfu_causal"], least=0.44)],
        "flash4",
    ),
    of_liger("llama3.2-1b", 16),
    of_liger("llama3-8b", 4),
    of_bench(
        "SmolLM2-135M, 64K tokens in documents",
        "operations",
        "--documents packed",
        "operations-smollm2-135m-64K",
        45,
        small_steps,
        "flash4",
    ),
    of_bench(
        "Plans of small steps, as predicted and as measured",
        "recipes",
        "--points graphs-again --name graphs-again --limit 150",
        "recipes-graphs-again",
        150,
        picked_plans,
        "flash4",
    ),
    # Where time and memory go
    of_rehearsal(
        "idle share of the GPU at 1M tokens, a rank of 8",
        "profile llama3-8b --ranks 8 --tokens 1M --layers 1 --out {out}/profile-1M",
        90,
        lambda row: [Figure("idle share of the GPU", row["lanes"]["device"]["idle_share"], most=0.03)],
    ),
    of_rehearsal(
        "evaluating 1M tokens, a rank of 8",
        "rehearse llama3-8b --ranks 8 --tokens 1M --layers 2 --evaluate",
        60,
        lambda row: [predicted(row, 5), Figure("peak over training's", over_training(row), most=1.0)],
    ),
    of_bench("a model that learns to look far", "longer", "--seconds 540", "longer", 590, looks_far),
    Claim(
        "tensor ranks: the first rungs of the ladder",
        "python -m ithaca bench ladder llama3-8b --only Tensor --out {out}/tensor --commit $ITHACA_COMMIT",
        130,
        tensor_rungs,
        ("gpu",),
    ),
]
