"""`ithaca plan` as a user types it: an answer that adds up, and one sentence for every mistake."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.attention.kernels import facts
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.cli import main
from ithaca.config import read_config
from ithaca.model.presets import PRESETS
from ithaca.plans.recipes import RECIPES
from tests.nursery import Ended
from tests.printed import settings

Say = Callable[..., Ended]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> Say:
    """Within this process, which has imported everything: there is nothing that an answer could leave behind."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ithaca", "plan", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


def answer(end: Ended) -> dict[str, Any]:
    assert end.code == 0, end.err
    assert end.err == ""
    return json.loads(end.out)


# What the design names, and what else is there
FIELDS: dict[str, type | tuple[type, ...]] = {
    "fits": bool,
    "tokens": int,
    "max_tokens": int,
    "limit": str,
    "plan": dict,
    "memory": dict,
    "host_bytes": int,
    "disk_bytes": int,
    "seconds_per_step": float,
    "tokens_per_second_per_gpu": float,
    "mfu_causal": float,
    "bare_seconds": float,
    "over_bare": float,
    "batch": dict,
    "model": str,
    "gpus": str,
    "mesh": dict,
    "kernel": str,
    "documents": int,
    "recomputed_attention_layers": int,
    "memory_by_owner": dict,
    "memory_free": int,
    "seconds_by_part": dict,
    "assumed": list,
    "alternatives": list,
    "train": str,
}


@pytest.mark.parametrize(
    "words",
    [
        ["llama3-8b", "--tokens", "5M", "--host", "1.9TB"],
        ["tiny", "--gpus", "1xRTX4090-24GB", "--tokens", "12M", "--host", "4GB", "--disk", "1TB"],
        ["llama3-70b", "--gpus", "32xH100-80GB", "--recipe", "ulysses"],
        ["tiny", "--gpus", "1xRTX4090-24GB", "--tokens", "128"],
    ],
    ids=" ".join,
)
def test_the_object(say: Say, words: list[str]) -> None:
    found = answer(say(*words, "--json"))
    assert set(found) == {*FIELDS, "lean", "kv_fetch"}
    assert found["lean"] is None
    assert found["over_bare"] == pytest.approx(found["seconds_per_step"] / found["bare_seconds"])
    assert found["over_bare"] > 1
    batch = found["batch"]
    assert (batch["sequences"], batch["passes"]) == (found["mesh"]["shard"], 1)
    for name, kind in FIELDS.items():
        assert type(found[name]) is kind, name
    assert found["fits"] is True
    assert found["limit"] in ("GPU", "host", "disk")
    assert found["max_tokens"] >= found["tokens"]
    count, name = found["gpus"].split("x", 1)
    memory = found["memory"]
    assert set(memory) == {"states", "activations", "workspace", "total"}
    assert all(type(size) is int and size > 0 for size in memory.values())
    assert memory["total"] == memory["states"] + memory["activations"] + memory["workspace"]
    assert memory["total"] == sum(found["memory_by_owner"].values())
    assert memory["total"] + found["memory_free"] < float(name.split("-")[1].removesuffix("GB")) * 1e9
    assert found["memory_free"] >= 0
    assert (found["disk_bytes"] > 0) == ("--disk" in words)
    mesh = found["mesh"]
    assert mesh["shard"] * mesh["ring"] * mesh["ulysses"] == int(count)
    rate = found["tokens"] / found["seconds_per_step"] / (mesh["ring"] * mesh["ulysses"])
    assert found["tokens_per_second_per_gpu"] == pytest.approx(rate)
    assert 0 < found["mfu_causal"] < 0.8
    assert found["seconds_per_step"] >= max(found["seconds_by_part"].values())
    config = read_config(None, settings(shlex.split(found["train"])))
    assert config.plan is not None
    assert {name: getattr(config.plan, name) for name in found["plan"]} == found["plan"]


def test_the_object_of_a_lean_plan(say: Say) -> None:
    found = answer(say("llama3-8b", "--tokens", "2M", "--lean", "--json"))
    assert found["memory"]["total"] < found["lean"]["fastest_memory_total"]
    assert found["seconds_per_step"] >= found["lean"]["fastest_seconds_per_step"]
    fetch = found["kv_fetch"]
    assert (fetch["place"], fetch["chunk"]) == ("host", found["plan"]["chunk"])
    assert fetch["balance_chunk"] <= fetch["chunk"]
    assert fetch["fetch_seconds"] <= fetch["attend_seconds"]


def test_the_words_of_a_lean_plan_and_of_days(say: Say) -> None:
    lines = say("llama3-8b", "--tokens", "90M", "--disk", "28TB", "--lean").out.splitlines()
    assert lines[1].startswith("Lean: ")
    assert any(line.startswith("K and V: in host memory. Chunks of ") for line in lines)
    assert any(re.match(r"A step: \d+\.\d days for 1 sequence; ", line) for line in lines)


def test_the_words(say: Say) -> None:
    end = say("llama3-8b", "--tokens", "2M", "--host", "1.9TB")
    assert (end.code, end.err) == (0, "")
    lines = end.out.splitlines()
    assert lines[0] == "llama3-8b at 2M tokens on 8xH100-80GB: fits with recipe 'sweep'; 8 GPUs share each sequence"
    order = [
        r"GPU memory: .* GiB of 70.1 GiB at the peak \(.* block\)",
        r"  states +11.2 GiB  weights and optimizer moments, fp32: 8,030,261,248 parameters × 12 bytes / 8",
        r"  K and V +3 GiB  of one layer, .*: 2,097,152 tokens × 1 head × 128 × 2 × \(2 \+ 4\) bytes",
        r"Host memory: .* of 1.64 TiB",
        r"Saved block inputs: \d+ layers in host memory.*",
        r"Saved attention outputs: \d+ layers in host memory.*",
        r"Attention: runs once",
        r"A step: .* for 1 sequence; \d+ tokens/s per GPU, [0-9.]+ % causal MFU",
        r"  Computing: attention forward .*, attention backward .*, matrix products .*",
        r"  Hidden behind it: launching GPU operations .*, messages .*, copies to .* the host .*, gathering weights .*",
        r"Longest context: \d+K tokens, limited by host memory \(--host\)",
        r"  \d+K take .* a step",
        r"  Up to \d+K if attention is recomputed in backward \(slower\)",
        r"  Faster: 16xH100-80GB, .* a sequence instead of .*",
        r"  Fewer GPUs: 4xH100-80GB.*",
        r"Attention kernel: (flash4|cudnn\+flash; with flash4 a step would take .*: pip install 'ithaca\[flash4\]')",
        r"Some speeds and reserves are assumed: --verbose lists them",
        r"To train on your documents, make a token file \(ithaca data\) and name it as --documents\.",
        r"To try this Plan on Python's standard library:",
    ]
    found = [next((n for n, line in enumerate(lines) if re.fullmatch(wanted, line)), None) for wanted in order]
    assert None not in found, (order[found.index(None)], end.out)
    assert found == sorted(found, key=lambda number: number or 0)
    assert not any(line.startswith("Disk") for line in lines)
    assert len(lines) < 40
    assert lines[-1].startswith(
        "ithaca train --set model.source=llama3-8b --set train.tokens=2M --set plan.recipe=sweep"
    )
    assert lines[-1].endswith(" --ranks 8")
    read_config(None, settings(shlex.split(lines[-1])))


@pytest.mark.parametrize(
    ("gpus", "tokens", "recipe", "other"),
    [
        ("2x8xH100-80GB", "32K", "sweep", r"  With tensor parallelism \(--recipe tensor\): [\d.]+ tokens/s per GPU \("),
        (
            "2x8xH100-80GB",
            "1M",
            "sweep",
            r"\(--recipe tensor\): [\d.]+ tokens/s per GPU \(attention runs again in 80 layers, ",
        ),
        ("8xH100-80GB", "8K", "tensor", r"\(4 tensor ranks\), 2 sequences at a time"),
    ],
)
def test_tensor_parallelism_beside_it(say: Say, gpus: str, tokens: str, recipe: str, other: str) -> None:
    end = say("llama3-70b", "--gpus", gpus, "--tokens", tokens)
    assert f"fits with recipe '{recipe}'" in end.out
    assert re.search(other, end.out)
    assert "tensor" not in say("llama3.2-1b", "--gpus", "8xH100-80GB", "--tokens", "8K").out  # far off


def test_nothing_is_installed_for_a_kernel_that_comes_with_torch(say: Say) -> None:
    """flash-attn-4 does not know heads of 16, and CUDA graphs need `flash`, though cuDNN is there."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3}
    sizes |= {"intermediate_size": 256, "vocab_size": 2000, "max_position_embeddings": 1024}
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    end = say("small", "--gpus", "1xH100-80GB", "--tokens", "1K")
    assert "Attention kernel: flash\n" in end.out
    assert "pip install" not in end.out


@pytest.mark.parametrize(("batch", "faster"), [("64", False), ("1", True)])
def test_a_slower_kernel_is_not_advised(say: Say, batch: str, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In short documents cuDNN's backward is predicted to be faster; one of them alone could be a CUDA graph."""
    monkeypatch.setattr(facts, "_installed", lambda _: False)
    end = say("needles-28m", "--gpus", "1xH200-141GB", "--tokens", "2K", "--batch", batch)
    assert ("with flash4 a step would take" in end.out) == faster, end.out


def test_assumptions_are_listed_on_demand(say: Say) -> None:
    words = ["llama3-8b", "--gpus", "16xH100-80GB", "--tokens", "2M"]
    short, full = (say(*words, *more).out for more in ([], ["--verbose"]))
    for wanted in (
        r"Assumed, or measured on another GPU:",
        r"  across 50 GB/s: assumed: a card of 400 Gbit/s for each GPU",
        r"  matmul .* TFLOP/s: measured on an H200.*",
        r"  5% of host memory kept free",
    ):
        assert re.search(f"^{wanted}$", full, re.MULTILINE), wanted
        assert not re.search(f"^{wanted}$", short, re.MULTILINE), wanted
    assert "--verbose" not in full


def test_more_gpus_than_a_node_has(say: Say) -> None:
    """The answer says how they share a sequence, and where the command is started."""
    out = say("llama3-8b", "--gpus", "16xH100-80GB", "--tokens", "5M").out
    assert "; 16 GPUs share each sequence (8 Ulysses × 2 ring ranks)" in out.splitlines()[0]
    assert ", on each of the 2 nodes (by srun or torchrun, as docs/clusters.md shows):" in out
    assert out.rstrip().endswith(" --run runs/llama3-8b-5M")  # without which srun and torchrun cannot start it
    assert re.search(r"Host memory: .* on each node", out)


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (
            ["--gpus", "8xH100-80GB", "--tokens", "3M", "--recipe", "ulysses"],
            ["Saved block inputs: 32 layers in host memory", "Attention: recomputed in backward in 32 of 32 layers"],
        ),
        (
            ["--gpus", "64xH200-141GB", "--tokens", "32K", "--recipe", "ulysses"],
            ["Saved activations: all of 32 layers on the GPU", "Attention: runs once"],
        ),
        (
            ["--gpus", "8xH200-141GB", "--tokens", "512K", "--recipe", "ulysses"],
            [
                "Saved block inputs: 32 layers on the GPU",
                "Saved attention outputs: 32 layers on the GPU",
                "Attention: runs once",
            ],
        ),
    ],
)
def test_what_blocks_save(say: Say, words: list[str], sentences: list[str]) -> None:
    lines = say("llama3-8b", *words).out.splitlines()
    assert [line for line in lines if line.startswith(("Saved", "Attention:"))] == sentences


def test_nodes_within_the_number_of_gpus(say: Say) -> None:
    """Nodes × GPUs on each; the option that said the same still works, with a notice."""
    words = ["llama3-8b", "--tokens", "64K", "--json"]
    new = answer(say(*words, "--gpus", "4x4xH100-80GB"))
    old = say(*words, "--gpus", "16xH100-80GB", "--node-gpus", "4")
    assert old.err == "--node-gpus is now part of --gpus, as 4x8xH100-80GB: the old option still works\n"
    assert json.loads(old.out) == new
    assert new["gpus"] == "4x4xH100-80GB"
    assert new != answer(say(*words, "--gpus", "16xH100-80GB"))
    both = say(*words, "--gpus", "4x4xH100-80GB", "--node-gpus", "8")
    assert both.code == 2
    assert "--gpus 4x4xH100-80GB has 4 GPUs on a node, but --node-gpus is 8" in both.err


@pytest.mark.parametrize(("model", "tokens"), [("llama3.2-1b", "64K"), ("llama3-70b", "8M")])
def test_numbers_are_written_out(say: Say, model: str, tokens: str) -> None:
    """Thousands of tokens a second, thousands of hours, 1010 GiB: none of them as 1.01e+03."""
    end = say(model, "--gpus", "64xH100-80GB", "--tokens", tokens)
    assert end.code == 0, end.err
    assert not re.search(r"\de\+\d", end.out)


def test_the_longest_is_planned_for_when_no_length_is_given(say: Say) -> None:
    """One that is longer fits only where attention runs again, and the words say so."""
    found = answer(say("llama3-8b", "--host", "1.9TB", "--json"))
    longest = found["tokens"]
    assert longest == found["max_tokens"] >= 5.5 * 2**20
    assert (found["limit"], found["recomputed_attention_layers"]) == ("host", 0)
    tokens = str(int(longest * 1.05))
    end = say("llama3-8b", "--host", "1.9TB", "--tokens", tokens)
    assert f"Longest context if attention runs once: {format_tokens(longest)} tokens" in end.out
    assert re.search(r"Attention: recomputed in backward in \d+ of 32 layers", end.out)


def test_what_fits_is_no_longer_than_the_longest(say: Say) -> None:
    words = ["llama3.2-1b", "--gpus", "1xRTX4090-24GB", "--host", "64GB", "--tokens"]
    found = [answer(say(*words, tokens, "--json")) for tokens in ("640K", "656K", "704K")]
    assert [other["recomputed_attention_layers"] > 0 for other in found] == [False, False, True]
    # Found in steps of 64K, for attention that runs once
    assert [other["max_tokens"] for other in found] == [640 * 1024, 656 * 1024, 640 * 1024]


def test_faster_is_faster(say: Say, tmp_path: Path) -> None:
    """Nothing is gained by another GPU at the end of a slow link."""
    (tmp_path / "slow.toml").write_text('["RTX4090-24GB"]\ninside = [1e6, "a slow link"]\n')
    words = ["smollm2-135m", "--gpus", "1xRTX4090-24GB", "--tokens", "64K", "--json"]
    found = answer(say(*words))
    assert any(text.startswith("Faster") for text in found["alternatives"])
    found = answer(say(*words, "--hardware", str(tmp_path / "slow.toml")))
    assert not any(text.startswith("Faster") for text in found["alternatives"])


def test_the_most_gpus(say: Say) -> None:
    """Twice as many, which might be faster, cannot be planned for."""
    found = answer(say("llama3-8b", "--gpus", "1048576xH100-80GB", "--tokens", "1M", "--json"))
    assert found["fits"]
    assert not any(text.startswith("Faster") for text in found["alternatives"])


def test_a_folder_is_a_model(say: Say, tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(PRESETS["tiny"])))
    found = answer(say(str(folder), "--gpus", "1xL40S-48GB", "--tokens", "4K", "--json"))
    assert read_config(None, settings(shlex.split(found["train"]))).model.source == str(folder)
    assert f", once '{folder}' has its weights:" in say(str(folder), "--gpus", "1xL40S-48GB", "--tokens", "4K").out


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in ("dense", "untied") else pytest.mark.full) for name in RECIPES]
)
def test_every_recipe(say: Say, recipe: str) -> None:
    found = answer(say("llama3.2-1b", "--gpus", "2xA100-80GB", "--tokens", "64K", "--recipe", recipe, "--json"))
    assert found["plan"]["recipe"] == recipe


# Mistakes
def refused(end: Ended) -> str:
    assert end.code == 2, (end.out, end.err)
    assert len(end.err.strip().splitlines()) == 1, end.err
    assert end.err.startswith("error: ")
    assert "Traceback" not in end.out + end.err
    return end.err.strip()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["llama3-8b", "--gpus", "8xH10-80GB"], "GPU 'H10-80GB' is not known: did you mean 'H100-80GB'?"),
        (["llama3-8b", "--gpus", "8"], "--gpus 8 names no GPU: write which, as 8xH100-80GB"),
        (["llama3-8b", "--host", "0"], "--host: '0' is not a number of bytes"),
        (["llama3-8b", "--disk", "1.9"], "--disk 1.9 is less than 1MB: give a size with its unit, e.g. --disk 64GB"),
        (["llama3-8b", "--documents", "nope.tokens"], "--documents: 'nope.tokens' cannot be read as a token file"),
        (
            ["llama3-8b", "--gpus", "8xA100"],
            "--gpus 8xA100: GPU 'A100' could be A100-40GB or A100-80GB: name one of them",
        ),
        (["llama3-8b", "--gpus", " "], "GPU ' ' is not known: known are A100-40GB"),
        (["llama3-9b"], "'llama3-9b' is neither a folder nor a preset: did you mean 'llama3-8b'?"),
        (["llama3-8b", "--recipe", "sweeep"], "recipe 'sweeep' does not exist: did you mean 'sweep'?"),
        (["llama3-8b", "--gpus", "0xH100-80GB"], "--gpus 0xH100-80GB has 0 GPUs: give 1 or more, as 8xH100-80GB"),
        (["llama3-8b", "--gpus", "-3xH100-80GB"], "GPU '-3xH100-80GB' is not known"),
        (["llama3-8b", "--gpus", f"{10**7}xH100-80GB"], "is out of range: give 1 to 1048576 GPUs"),
        (["llama3-8b", "--gpus", f"{9999 * '9'}xH100-80GB"], "is out of range: give 1 to 1048576 GPUs"),
        (
            ["llama3-8b", "--gpus", "12xH100-80GB"],
            "--gpus 12xH100-80GB does not fill nodes of 8 GPUs: use 8 or 16, or give nodes and GPUs per node, as "
            "2x6xH100-80GB",
        ),
        (["llama3-8b", "--gpus", "1x0xH100-80GB"], "0 GPUs on a node are out of range: give 1 to 576"),
        (
            ["llama3-8b", "--tokens", "127"],
            "--tokens 127 is out of range: give 128 (a tile of attention) to 4096M",
        ),
        (
            ["llama3-8b", "--tokens", "4097M"],
            "--tokens 4097M is out of range: give 128 (a tile of attention) to 4096M",
        ),
        (
            ["llama3-8b", "--tokens", "999999999G"],
            "--tokens 999999999G is out of range: give 128 (a tile of attention) to 4096M",
        ),
        (["llama3-8b", "--tokens", "0"], "--tokens: '0' is not a number of tokens: write 4096, 64K or 5M"),
        (["llama3-8b", "--tokens", "many"], "--tokens: 'many' is not a number of tokens: write 4096, 64K or 5M"),
        (["llama3-8b", "--host", "lots"], "--host: 'lots' is not a number of bytes: write 80GB, 1.9TB or 64GiB"),
        (["llama3-8b", "--host", ""], "--host: '' is not a number of bytes: write 80GB, 1.9TB or 64GiB"),
        (["llama3-8b", "--recipe", ""], "recipe '' does not exist: known are sweep, dense, ulysses"),
        (["tiny", "--host", f"17{290 * '0'}TB"], "--host 1.7e+291TB is out of range: give at most 1000000TB"),
        (["tiny", "--disk", "1000001TB"], "--disk 1000001TB is out of range: give at most 1000000TB"),
        (["llama3-8b", "--disk", "some"], "--disk: 'some' is not a number of bytes: write 80GB, 1.9TB or 64GiB"),
        (
            ["tiny", "--picture", "x.jpeg"],
            "--picture x.jpeg cannot be drawn: use a name that ends with .png, .svg or .pdf",
        ),
        (["tiny", "--picture", "x"], "--picture x cannot be drawn: use a name that ends with .png, .svg or .pdf"),
        (
            ["tiny", "--hardware", "none.toml"],
            "'none.toml' cannot be read (No such file or directory): name a file",
        ),
        (
            ["tiny", "--meshes", "--picture", "x.png"],
            "--picture x.png and --meshes cannot be combined: give one of them",
        ),
        (["tiny", "--hardware", "."], "'.' cannot be read (Is a directory): name a file"),
        (["tiny", "--batch", "8"], "--batch 8 needs the length of a sequence: give it, as --tokens 128K"),
        (["tiny", "--batch", "max", "--tokens", "max"], "--batch max needs the length of a sequence: give it"),
        (
            ["tiny", "--tokens", "8K", "--host", "64"],
            "--host 64 is less than 1MB: give a size with its unit, e.g. --host 64GB",
        ),
        (["tiny", "--tokens", "8K", "--batch", "0"], "--batch 0 is not a number of sequences: write 32 (sequences)"),
        (
            ["tiny", "--tokens", "8K", "--batch", "all"],
            "--batch all is not a number of sequences: write 32 (sequences)",
        ),
        (["tiny", "--tokens", "8K", "--batch", "4M"], "--batch 4M could be sequences or tokens: write 4M-tokens for"),
        (
            ["tiny", "--tokens", "8K", "--batch", "xtokens"],
            "--batch xtokens is not a number of tokens: write 4M-tokens",
        ),
        (
            ["llama3-8b", "--tokens", "8K", "--batch", "1", "--recipe", "dense"],
            "a step of 1 sequence of 8K tokens of llama3-8b is too small for 8xH100-80GB: recipe 'dense' cannot share "
            "one among GPUs, so a step needs at least 8 sequences; --batch 8 fits",
        ),
        (
            ["llama3-8b", "--gpus", "64xH100-80GB", "--tokens", "8K", "--batch", "1", "--recipe", "ulysses"],
            "recipe 'ulysses' shares one among at most 32 GPUs, so a step needs at least 2 sequences; --batch 2 fits",
        ),
        (
            ["qwen3-8b", "--gpus", "1xH100-80GB", "--tokens", "5000", "--batch", "216"],
            "216 sequences of 5000 tokens of qwen3-8b on 1xH100-80GB do not fit: from the second pass on, gradients "
            "take memory beside a pass; --batch 108 fits in one pass",
        ),
        (["tiny", "--tokens", "3K", "--batch", "8K-tokens"], "sequences of 3K tokens: 9K-tokens (3 of them) works"),
        (["tiny", "--tokens", "8K", "--batch", "2000000"], "out of range for sequences of 8K tokens: give at most"),
        (
            ["tiny", "--tokens", "8K", "--batch", "8", "--lean"],
            "--lean asks for the least memory, --batch 8 for the fastest step: give one of them",
        ),
        (
            ["tiny", "--lean", "--meshes"],
            "--meshes compares Plans for one sequence and cannot be combined with --lean: give one of them",
        ),
        (
            ["tiny", "--lean", "--picture", "x.png"],
            "--picture x.png compares Plans for one sequence and cannot be combined with --lean: give one of them",
        ),
        (
            ["tiny", "--tokens", "8K", "--batch", "max", "--meshes"],
            "--meshes compares Plans for one sequence and cannot be combined with --batch max: give one of them",
        ),
        (
            ["llama3-8b", "--tokens", "40M", "--host", "200GB", "--lean"],
            "40M tokens of llama3-8b on 8xH100-80GB do not fit: --tokens",
        ),
        (
            ["llama3-8b", "--tokens", "40M", "--host", "200GB", "--batch", "2"],
            "40M tokens of llama3-8b on 8xH100-80GB do not fit: --tokens",
        ),
        (
            ["llama3-8b", "--tokens", "40M", "--host", "200GB"],
            "40M tokens of llama3-8b on 8xH100-80GB do not fit: --tokens",
        ),
    ],
    ids=lambda item: " ".join(item)[:60] if isinstance(item, list) else "",
)
def test_mistakes(say: Say, words: list[str], sentence: str) -> None:
    assert sentence in refused(say(*words))


def test_nothing_to_measure(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--measure measures a GPU, and there is none here: leave it out" in refused(
        say("tiny", "--measure", "m.toml")
    )
    assert not (tmp_path / "m.toml").exists()
    both = ["tiny", "--measure", "m.toml", "--hardware", "h.toml"]
    assert "--measure m.toml and --hardware h.toml both name rates: give one of them" in refused(say(*both))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[", "cannot be read as TOML"),
        ("x = 1", "is not a GPU: write a table of numbers"),
        ('["H100-80GB"]\nmemory = "80GB"', "memory of GPU 'H100-80GB' is 80GB: write a number and its source"),
        ('["Mine-1GB"]\nmemory = [1e9, "me"]', "GPU 'Mine-1GB' has no flops: write a number and its source"),
        ('["H100-80GB"]\nram = [1e24, "me"]', "--host 8e+12TB is out of range: give at most 1000000TB"),
        (
            '["H100-80GB"]\nmemory = [1e9, "me"]',
            "weights and gradients alone take 2.75 MiB of each GPU, even with the moments in host memory, and 0 B can",
        ),
    ],
)
def test_hardware_that_cannot_be_used(say: Say, tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "mine.toml").write_text(content)
    assert sentence in refused(say("tiny", "--hardware", "mine.toml"))


def test_hardware_of_one_s_own(say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('["H100-80GB"]\nmatmul = [1e12, "measured by --measure"]\n')
    words = ["tiny", "--gpus", "1xH100-80GB", "--tokens", "8K", "--json"]
    slow, fast = answer(say(*words, "--hardware", "mine.toml")), answer(say(*words))
    assert slow["seconds_by_part"]["linear"] > 10 * fast["seconds_by_part"]["linear"]
    assert not any("matmul" in text for text in slow["assumed"])
    assert any("matmul" in text for text in fast["assumed"])


@pytest.mark.parametrize(
    ("model", "count", "gpu"),
    [
        pytest.param("llama3-70b", 8, "A100-40GB", marks=pytest.mark.full),
        ("llama3-8b", 1, "RTX4090-24GB"),
        ("llama3-8b", 3, "RTX4090-24GB"),
        pytest.param("llama3-70b", 5, "A100-80GB", marks=pytest.mark.full),  # ten would not fill their nodes
    ],
)
def test_states_that_do_not_fit(say: Say, model: str, count: int, gpu: str) -> None:
    """The number of GPUs that is named does hold them, and no smaller one does: ask again."""
    text = refused(say(model, "--gpus", f"{count}x{gpu}"))
    found = re.search(r"does not fit.*: use (\d+)x", text)
    assert found, text
    enough = int(found[1])
    assert enough > count
    assert answer(say(model, "--gpus", f"{enough}x{gpu}", "--json"))["fits"]
    for fewer in range(count + 1, enough):
        if fewer <= 8 or fewer % 8 == 0:
            refused(say(model, "--gpus", f"{fewer}x{gpu}"))


def test_states_are_named_if_no_plan_makes_them_smaller(say: Say) -> None:
    """Moments may be in host memory: 8 bytes a parameter stay. Three GPUs hold these, but nothing beside them."""
    text = refused(say("llama3-8b", "--gpus", "2xRTX4090-24GB"))
    assert "weights and gradients alone take 29.9 GiB of each GPU, even with the moments in host memory, and" in text
    assert "does not fit at any length with 20.1 GiB on each GPU" in refused(
        say("llama3-8b", "--gpus", "3xRTX4090-24GB")
    )


def test_the_length_counts_for_the_number_of_gpus(say: Say) -> None:
    found = re.search(r": use (\d+)x", refused(say("llama3-8b", "--gpus", "1xRTX4090-24GB", "--tokens", "1M")))
    assert found
    enough = int(found[1])
    assert answer(say("llama3-8b", "--gpus", f"{enough}xRTX4090-24GB", "--tokens", "1M", "--json"))["fits"]
    refused(say("llama3-8b", "--gpus", f"{enough - 1}xRTX4090-24GB", "--tokens", "1M"))


def test_a_length_that_does_not_fit(say: Say) -> None:
    """Both lengths that are named do: ask again. The memory is that of the other answers."""
    end = say("llama3-8b", "--tokens", "40M", "--host", "1.2TB", "--json")
    found = json.loads(end.out)
    assert (found["fits"], found["tokens"]) == (False, 40 * 2**20)
    assert (end.code, end.err) == (2, "")  # whoever reads JSON reads it there
    named = re.search(
        r"--tokens (\w+) is the longest if attention runs once, (\w+) if it is recomputed; "
        r"limited by 1.04 TiB of usable host memory \(--host\)",
        found["why"],
    )
    assert named, found["why"]
    shorter, longer = (say("llama3-8b", "--tokens", tokens, "--host", "1.2TB") for tokens in named.groups())
    assert shorter.code == longer.code == 0
    assert all("of 1.04 TiB" in end.out for end in (shorter, longer))
    assert f"Longest context: {named[1]} tokens" in shorter.out
    assert parse_tokens(named[1]) == found["max_tokens"] < parse_tokens(named[2])


def test_recomputing_where_it_is_faster(say: Say, tmp_path: Path) -> None:
    """Hidden states of 64 features take longer to copy than attention to run again."""
    (tmp_path / "m").mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 256, "vocab_size": 2000, "max_position_embeddings": 1024}
    (tmp_path / "m" / "config.json").write_text(json.dumps(PRESETS["smollm2-135m"] | sizes))
    end = say("m")
    assert end.code == 0, end.err
    why = "  faster here than saving the outputs of every layer, which also fits"
    assert f"\nAttention: recomputed in backward in 2 of 2 layers\n{why}\n" in end.out
    longest = re.match(r"m at (\w+) tokens", end.out)
    assert longest
    assert f"\nLongest context if attention runs once: {longest[1]} tokens" in end.out
    assert re.search(r"\n  Up to \w+ if attention is recomputed in backward\n", end.out)


# Beside the answer
def test_a_picture(say: Say, tmp_path: Path) -> None:
    end = say("tiny", "--gpus", "1xRTX4090-24GB", "--tokens", "64K", "--host", "4GB", "--picture", "x.png")
    assert end.code == 0, end.err
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert end.out.startswith("tiny at 64K tokens")
    assert "--picture nowhere/x.png cannot be written (No such file or directory)" in refused(
        say("tiny", "--gpus", "1xRTX4090-24GB", "--host", "4GB", "--picture", "nowhere/x.png")
    )


def test_it_needs_no_torch() -> None:
    asked = "from ithaca.cli import app; app(['plan', 'tiny', '--tokens', '64K'], standalone_mode=False)"
    program = f"import sys; {asked}; assert not {{'torch', 'matplotlib'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_a_context_beyond_a_folders_model_is_said(say: Say, tmp_path: Path) -> None:
    """A preset has no trained weights, and positions count within documents."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(PRESETS["smollm2-135m"]))
    wide = ("--gpus", "1xH100-80GB", "--tokens", "16K", "--recipe", "dense", "--json")
    end = say("in", *wide)
    assert end.err.startswith("Warning: the context has 16,384 tokens, but the model's rope is made for 8,192 (max_")
    assert end.err.endswith("new to it: the command below extends it\n")
    assert json.loads(end.out)["tokens"] == 16384
    assert "--set model.rope=auto " in json.loads(end.out)["train"]
    packed = say("in", *wide, "--documents", "9K+7K").err
    assert packed.startswith("Warning: the longest document has 9,216 tokens, but the model's rope is made for 8,192 (")
    meshes = say("in", *wide[:-1], "--meshes").err  # no command is below
    assert meshes.endswith("new to it: ithaca train extends it with --set model.rope=auto\n")
    assert answer(say("in", "--documents", "2x8K", *wide))["tokens"] == 16384
    assert answer(say("smollm2-135m", *wide))["tokens"] == 16384
