"""Each family against transformers, which is not ours: logits, loss, every gradient, and folders both ways."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ithaca
from ithaca.model.decoder import stored_name
from ithaca.parallel.sharding import whole_tensors
from tests.models import FAMILIES, make_model, relative, save


def applied(folder: Path, dtype: str = "float32", **plan: object) -> ithaca.Model:
    return ithaca.apply(ithaca.load_model(folder, dtype), ithaca.Plan(**plan))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family: str, tmp_path: Path) -> None:
    theirs = make_model(family)
    ours = applied(save(theirs, tmp_path / "in"))
    tokens = torch.randint(0, 97, (2, 75))
    wanted = theirs(tokens, labels=tokens)
    assert (ours.logits(tokens) - wanted.logits).abs().max() <= 2e-5

    loss = ours(ours.shard(tokens, tokens))
    assert abs(loss.item() - wanted.loss.item()) <= 1e-5
    loss.backward()
    wanted.loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.decoder.named_parameters():
        found = parameter.grad.full_tensor()
        assert relative(found, gradients.pop(stored_name(name))) <= 1e-4, name
    assert not gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family: str, dtype: str, tmp_path: Path) -> None:
    theirs = make_model(family, getattr(torch, dtype))
    ours = applied(save(theirs, tmp_path / "in"))
    ithaca.save_model(ours, tmp_path / "out")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)
    tokens = torch.randint(0, 97, (1, 33))
    # In float32: some CPUs announce bf16 instructions that they do not have
    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / side, dtype=torch.float32)(tokens).logits
        for side in ("in", "out")
    )
    assert torch.equal(first, second)


def test_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make_model("qwen3")
    ours = applied(save(theirs, tmp_path / "in", max_shard_size="40KB"))
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    monkeypatch.setattr("ithaca.model.save.FILE_BYTES", 50_000)
    ithaca.save_model(ours, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name


def test_a_float64_computation_stays_float64(tmp_path: Path) -> None:
    ours = applied(save(make_model("smollm3"), tmp_path / "in"), "float64")
    tokens = torch.randint(0, 97, (1, 20))
    loss = ours(ours.shard(tokens, tokens))
    assert loss.dtype == torch.float64
    assert all(tensor.dtype == torch.float64 for _, tensor in whole_tensors(ours.decoder, ours.mesh, ours.part))


def test_the_index_of_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers writes it: the bytes of all weights, and the file of each."""
    folder = save(make_model("qwen3"), tmp_path / "in", max_shard_size="40KB")
    monkeypatch.setattr("ithaca.model.save.FILE_BYTES", 50_000)
    ithaca.save_model(applied(folder), tmp_path / "out")
    theirs, ours = (
        json.loads((tmp_path / side / "model.safetensors.index.json").read_text()) for side in ("in", "out")
    )
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    for name, file in ours["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
