"""Likely mistakes of Python callers, as habits from transformers and plain PyTorch make them: one sentence each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ithaca
from ithaca.base.errors import IthacaError
from tests.models import make_model
from tests.nursery import Nursery

CALL = "but the model takes a Batch: batch = model.shard(tokens, labels=tokens), then loss = model(batch)"
STAYS = "this model stays on cpu with shards in float32: choose them before"


def cases(folder: Path) -> dict[str, tuple[Callable[[], Any], str, str]]:
    """What is called, the error's type, and how its sentence begins or what it has."""
    source, plan = ithaca.load_model("tiny"), ithaca.Plan(recipe="dense")
    model: Any = ithaca.apply(source, plan)
    ids = torch.randint(0, 256, (2, 32))
    batch, other = model.shard(ids, labels=ids), make_model("llama3", num_hidden_layers=1)
    out, optimize, any_ = str(folder / "out"), ithaca.make_optimizer, ithaca.apply
    wrong: Any = ithaca
    return {
        "ids": (lambda: model(ids), "InputError", f"a Tensor was given, {CALL}"),
        "ids and labels": (lambda: model(ids, labels=ids), "InputError", f"labels= was given, {CALL}"),
        "keywords": (lambda: model(input_ids=ids, labels=ids), "InputError", f"input_ids= was given, {CALL}"),
        "a dict": (lambda: model({"input_ids": ids}), "InputError", f"a dict was given, {CALL}"),
        "a list": (lambda: model(ids.tolist()), "InputError", f"a list was given, {CALL}"),
        "an array": (lambda: model(ids.numpy()), "InputError", f"a ndarray was given, {CALL}"),
        "a text": (lambda: model("the sea"), "InputError", f"the text 'the sea' was given, {CALL}"),
        "nothing": (lambda: model(), "InputError", f"nothing (None) was given, {CALL}"),
        "a tensor of valid tokens": (lambda: model(batch, ids), "InputError", "valid_tokens is tensor([["),
        "no labels": (lambda: model.shard(ids, labels=None), "InputError", "labels are missing: labels=tokens counts"),
        "floats": (lambda: model.shard(ids.float(), labels=ids), "InputError", "tokens are float32: whole numbers"),
        "other labels": (
            lambda: model.shard(ids, labels=ids[:1]),
            "InputError",
            "labels have shape [1, 32], tokens [2",
        ),
        "shifted": (lambda: model.shard(ids[:, :-1], labels=ids[:, 1:]), "InputError", "labels are shifted by one"),
        "meta": (lambda: model.shard(ids.to("meta"), labels=ids), "InputError", "tokens are on the meta device"),
        "meta labels": (lambda: model.shard(ids, labels=ids.to("meta")), "InputError", "labels are on the meta device"),
        "sparse": (lambda: model.shard(ids.to_sparse(), labels=ids), "InputError", "tokens are of layout sparse_coo"),
        "rows": (lambda: model.shard([[1, 2], [3]], labels=[[1, 2], [3]]), "InputError", "with rows of one length"),
        "input_ids": (
            lambda: model.shard(input_ids=ids, labels=ids),
            "InputError",
            "shard has no argument 'input_ids': tokens is its name here",
        ),
        "attention_mask": (
            lambda: model.shard(ids, labels=ids, attention_mask=ids),
            "InputError",
            "shard has no argument 'attention_mask': padding at the end needs no mask, only labels of -100",
        ),
        "generate": (
            lambda: model.generate(ids),
            "AttributeError",
            "has no 'generate': model.greedy_decode(tokens, 32) gives the likeliest next tokens; to sample, save",
        ),
        "config": (lambda: model.config, "AttributeError", "has no 'config': model.spec has the sizes"),
        "save_pretrained": (lambda: model.save_pretrained(out), "AttributeError", "ithaca.save_model(model, folder)"),
        "device": (lambda: model.device, "AttributeError", "has no 'device': model.mesh.device is its device"),
        "half": (lambda: model.half(), "InputError", STAYS),
        "to float64": (lambda: model.to(torch.float64), "InputError", STAYS),
        "to a device": (lambda: model.to("meta"), "InputError", STAYS),
        "cuda": (lambda: model.cuda(), "InputError", STAYS),
        "apply a name": (
            lambda: any_(untyped("tiny"), plan),
            "ModelError",
            "the text 'tiny' was given, but apply takes",
        ),
        "apply a model": (lambda: any_(other, plan), "ModelError", "a LlamaForCausalLM was given, but apply takes"),
        "apply again": (lambda: any_(model, plan), "ModelError", "a Model was given, but apply takes a loaded model"),
        "apply swapped": (lambda: any_(untyped(plan), untyped(source)), "ModelError", "a Plan was given"),
        "a recipe": (
            lambda: any_(source, untyped("sweep")),
            "PlanError",
            "the text 'sweep' was given, but apply takes",
        ),
        "a mesh": (lambda: any_(source, plan, untyped(8)), "PlanError", "an int was given, but apply takes a mesh"),
        "load a model": (
            lambda: ithaca.load_model(other),
            "ModelError",
            "a LlamaForCausalLM was given, but the name of",
        ),
        "load nothing": (lambda: ithaca.load_model(untyped(None)), "ModelError", "nothing (None) was given"),
        "a hub's name": (
            lambda: ithaca.load_model("meta-llama/Llama-3.2-1B"),
            "ModelError",
            "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B",
        ),
        "save swapped": (
            lambda: wrong.save_model(out, model),
            "ModelError",
            "was given, but save_model takes the model",
        ),
        "save another": (lambda: ithaca.save_model(other, out), "ModelError", "a LlamaForCausalLM was given"),
        "save nowhere": (lambda: wrong.save_model(model, None), "ModelError", "takes the name of a new folder second"),
        "optimize another": (lambda: optimize(nn.Linear(2, 2), learning_rate=1), "InputError", "a Linear was given"),  # pyrefly: ignore
        "optimize parameters": (
            lambda: optimize(model.parameters(), learning_rate=1),
            "InputError",
            "a generator was given, but make_optimizer takes the model that ithaca.apply returns",
        ),
        "lr": (
            lambda: wrong.make_optimizer(model, lr=1e-3),
            "InputError",
            "no argument 'lr': learning_rate is its name",
        ),
        "rate": (lambda: optimize(model, learning_rate=untyped("1e-3")), "InputError", "learning_rate is '1e-3': a"),
        "no rate": (lambda: optimize(model, learning_rate=untyped(None)), "InputError", "learning_rate is None: a"),
        "betas": (lambda: wrong.make_optimizer(model, learning_rate=1, betas=0.9), "InputError", "betas are 0.9: two"),
        "plan a name": (
            lambda: wrong.plan("llama3-8b", tokens="1M"),
            "ModelError",
            "but plan takes a model's Spec first",
        ),
        "plan a source": (
            lambda: wrong.plan(source, tokens="1M"),
            "ModelError",
            "a ModelSource was given, but plan takes",
        ),
        "plan a number": (lambda: wrong.plan(source.spec, 8, tokens=64), "PlanError", "as text: '8xH100-80GB'"),
        "plan a recipe": (
            lambda: ithaca.plan(source.spec, tokens="64K", recipe="sweeep"),
            "PlanError",
            "recipe 'sweeep' does not exist: did you mean 'sweep'?",
        ),
        "plan no length": (
            lambda: wrong.plan(source.spec, tokens=None),
            "ConfigError",
            "'None' is not a number of tokens",
        ),
    }


def untyped(value: Any) -> Any:
    """A value whose type no checker sees."""
    return value


def try_all(folder: Path) -> None:
    """In a process of its own: what each call raises."""
    found = {}
    for name, (call, _, _) in cases(folder).items():
        try:
            found[name] = ("", repr(call()))
        except (IthacaError, AttributeError) as error:
            found[name] = (type(error).__name__, str(error))
    (folder / "found.json").write_text(json.dumps(found))


def test_one_sentence(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(try_all, tmp_path)[0]
    assert end.code == 0, end.err
    found = json.loads((tmp_path / "found.json").read_text())
    for name, (_, kind, sentence) in cases(tmp_path).items():
        assert found[name][0] == kind, (name, found[name])
        assert sentence in found[name][1], (name, found[name])
        assert "\n" not in found[name][1], name
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]


def use(folder: Path) -> None:
    """In a process of its own: what looks like these mistakes and is none."""
    model = ithaca.apply(ithaca.load_model("tiny"), ithaca.Plan(recipe="dense"))
    ids = torch.randint(0, 256, (2, 32))
    assert model.to("cpu") is model.float() is model.to(torch.float32) is model.eval() is model
    assert not hasattr(model, "generate")
    labels = ids.clone()
    labels[:, :9] = -100
    for tokens, wanted in (
        (ids, labels),
        (ids.numpy(), ids.tolist()),
        (torch.zeros(8, dtype=int), torch.zeros(8, dtype=int)),
    ):
        model(model.shard(tokens, labels=wanted)).backward()
    assert torch.equal(model(batch=model.shard(ids, ids)), model(model.shard(ids, ids), last=True))
    (folder / "done").touch()


def test_what_is_no_mistake(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(use, tmp_path)[0]
    assert end.code == 0, end.err
    assert (tmp_path / "done").exists()
