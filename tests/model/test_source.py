"""Folders that cannot be used, each refused with one sentence, and what a load costs the host."""

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ithaca
from tests.models import make_model, save


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def truncate(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def split(folder: Path) -> list[Path]:
    """The same weights in several files."""
    (folder / "model.safetensors").unlink()
    save(make_model("llama3"), folder, max_shard_size="40KB")
    return sorted(folder.glob("*.safetensors"))


def head_apart(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights: model.safetensors or"),
    "pickled": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickled weights .* never loaded"),
    "truncated": (lambda f: truncate(f / "model.safetensors", 0.7), "truncated or not a safetensors file"),
    "empty": (lambda f: truncate(f / "model.safetensors", 0), "truncated or not a safetensors file"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 999), "truncated or not a safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config not JSON": (lambda f: truncate(f / "config.json", 0.5), "cannot be read as JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "holds a list, not a JSON object"),
    "other sizes": (
        lambda f: edit_json(f / "config.json", intermediate_size=81),
        r"shape \[80, 48\], but config.json makes it \[81, 48\]",
    ),
    "more layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=4), "lacks 9 of 39 weights"),
    "fewer layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=2), "holds 9 weights that config.json"),
    "architecture": (lambda f: edit_json(f / "config.json", model_type="mamba"), "'mamba' is not supported"),
    "a weight gone": (lambda f: edit_weights(f, lambda w: w.pop("model.norm.weight")), "lacks 1 of 30 weights"),
    "a weight more": (lambda f: edit_weights(f, lambda w: w.update(extra=torch.ones(2))), "holds 1 weights that"),
    "integers": (
        lambda f: edit_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})),
        "holds 'model.norm.weight' as I8",
    ),
    "a file gone": (lambda f: split(f)[1].unlink(), "lacks 'model-00002-of-.*', one of the"),
    "a file short": (lambda f: truncate(split(f)[2], 0.9), "00003-of-.* truncated"),
    "a weight in two files": (
        lambda f: (files := split(f)) and shutil.copy(files[0], files[1]),
        "00001-of-.* and .*00002-of-.* both hold",
    ),
    "an index of nothing": (
        lambda f: (split(f), edit_json(f / "model.safetensors.index.json", weight_map={})),
        "no weight_map",
    ),
    "tied but of other size": (
        lambda f: (
            edit_json(f / "config.json", tie_word_embeddings=True),
            edit_weights(f, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"][:90].clone()})),
        ),
        "ties head and embedding, but the files hold two different",
    ),
    "float64": (
        lambda f: edit_weights(f, lambda w: w.update({"model.norm.weight": w["model.norm.weight"].double()})),
        "holds float64 weights, which would lose bits: give dtype='float64'",
    ),
    "a weight map of nothing": (
        lambda f: (split(f), edit_json(f / "model.safetensors.index.json", weight_map=[1, None])),
        "no weight_map",
    ),
    "tied but two": (
        lambda f: (edit_json(f / "config.json", tie_word_embeddings=True), edit_weights(f, head_apart)),
        "ties head and embedding, but the files hold two different",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders(damage: str, tmp_path: Path) -> None:
    folder = save(make_model("llama3"), tmp_path / "in")
    ithaca.load_model(folder)
    break_it, sentence = DAMAGE[damage]
    break_it(folder)
    with pytest.raises(ithaca.ModelError, match=sentence) as caught:
        ithaca.load_model(folder)
    assert "\n" not in str(caught.value)


def test_weights_without_the_right_to_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes mean nothing to root, so the refusal is made here."""
    folder, opens = save(make_model("llama3"), tmp_path / "in"), Path.open

    def opened(path: Path, *how: str, **more: str) -> object:
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opens(path, *how, **more)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ithaca.ModelError, match=r"model\.safetensors' cannot be read \(Permission denied\)$"):
        ithaca.load_model(folder)


def test_names_that_are_no_model() -> None:
    with pytest.raises(ithaca.ModelError, match="neither a folder nor a preset: did you mean 'llama3-8b'"):
        ithaca.load_model("llama3-8")
    with pytest.raises(ithaca.ModelError, match="dtype 'float16' is not supported: did you mean 'bfloat16'"):
        ithaca.load_model("tiny", "float16")


def test_a_tied_head_stored_twice_is_accepted(tmp_path: Path) -> None:
    folder = save(make_model("llama3.2"), tmp_path / "in")
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    ithaca.load_model(folder)


def test_a_saved_folder_is_never_overwritten(tmp_path: Path) -> None:
    model = ithaca.apply(ithaca.load_model("tiny"), ithaca.Plan(), ithaca.mesh(device="cpu"))
    ithaca.save_model(model, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(ithaca.ModelError, match="exists already: name a new folder"):
        ithaca.save_model(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ithaca.ModelError, match="could not be written"):
        ithaca.save_model(model, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    folder = save(make_model("llama3.2"), tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tekken.json", "optimizer.pt"):
        (folder / name).write_text("{}")
    (folder / "vocab_backup").mkdir()
    ithaca.save_model(ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan()), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    wanted = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tekken.json", "generation_config.json"}
    assert wanted <= names
    assert not {"optimizer.pt", "vocab_backup"} & names


def save_on_a_full_disk(folder: Path) -> str:
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), ithaca.mesh())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        ithaca.save_model(model, folder)
    except ithaca.IthacaError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


def test_a_full_disk_is_a_sentence_on_every_rank(ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(save_on_a_full_disk, tmp_path / "out"):
        assert re.search(
            r"could not be written \(File too large; it takes [\d.]+ MiB, and .* are free on its disk\)", found
        )
    assert not list(tmp_path.iterdir())


def test_saving_through_a_link(tmp_path: Path) -> None:
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), ithaca.mesh(device="cpu"))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    ithaca.save_model(model, tmp_path / "link")
    assert (tmp_path / "elsewhere" / "model.safetensors").exists()


@pytest.mark.parametrize(("asked", "written"), [(None, "bfloat16"), ("float32", "float32")])
def test_the_dtype_that_config_names(asked: str | None, written: str, tmp_path: Path) -> None:
    """The dtype in config.json stays, whatever single weights have, unless another is asked for."""
    folder = save(make_model("llama3.2", torch.bfloat16), tmp_path / "in")
    edit_json(folder / "config.json", dtype="bfloat16", torch_dtype="bfloat16")
    edit_weights(folder, lambda w: w.update({"model.embed_tokens.weight": w["model.embed_tokens.weight"].float()}))
    ithaca.save_model(ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan()), tmp_path / "out", dtype=asked)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == (written, written)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].dtype == torch.float32
    assert weights["model.norm.weight"].dtype == getattr(torch, written)


def load_peak(folder: Path) -> tuple[int, int]:
    """(host bytes that loading took at its peak, bytes of the shards that it gave), in one rank."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

    source, mesh = ithaca.load_model(folder, "float32"), ithaca.mesh()
    ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), mesh)  # what a first call costs is not the load's
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = status("VmRSS")
    model = ithaca.apply(source, ithaca.Plan(), mesh)
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return status("VmHWM") - before, shards


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_peak_of_a_load(ranks, world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = {"vocab_size": 4000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4}
    folder = save(make_model("llama3", dtype, num_attention_heads=8, **sizes), tmp_path / "in")
    largest = 4000 * 1024 * 4
    for peak, shards in ranks(world).run(load_peak, folder):
        assert shards >= 250e6 / world * 0.9
        assert peak <= shards + largest + 8e6


@pytest.mark.parametrize(("preset", "deviation"), [("needles", 0.1), ("tiny", 0.02)])
def test_a_preset_may_have_larger_random_weights(preset: str, deviation: float) -> None:
    source = ithaca.load_model(preset)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.empty(dict(source.spec.shapes())[name])
    source.weights.read(name, range(len(weight)), weight)
    assert weight.std().item() == pytest.approx(deviation, rel=0.05)
