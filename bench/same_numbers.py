"""Prove that a change of the code changed no number: the same training steps by two trees, compared bit by bit.

Small models with random weights are trained for two steps under many Plans, meshes, batches and dtypes, on a CPU, with
an optimizer step between them. Written down are every loss, every weight's gradient and every weight after the step, as
hashes of their bytes. Two such files of the same machine are equal only where every bit is:

    python -m bench.same_numbers --tree ../before --out before.json
    python -m bench.same_numbers --tree . --out after.json
    python -m bench.same_numbers --compare before.json after.json

`--compare` prints a line for each difference and ends with code 1 where there is one. Run a tree twice first: a machine
whose sums come in another order each time proves nothing. `--only sweep` runs what has the word in its name, `--list`
names everything.

Only public names of `ithaca` are used, so that the same file runs in both trees, whatever moves inside of them. Weights
are told apart by their values before the first step, not by their names within the model, which may change.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

SECONDS = 240  # a case that takes longer hangs
VOCABULARY = 97
RENAMED = {"gradient": "residual"}  # options of a Plan that have two spellings: the one that the tree has is used

Rows = tuple[Tensor, Tensor, Tensor | None]  # tokens, labels, documents
Record = dict[str, Any]


# Models ---------------------------------------------------------------------------------------------------------------


def _sizes(kind: str, heads: int, kv_heads: int, hidden: int, head: int, layers: int = 3, **more: Any) -> Record:
    return {
        "architectures": [{"smollm3": "SmolLM3"}.get(kind, kind.capitalize()) + "ForCausalLM"],
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **more,
    }


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# By query/kv heads: between them everything that a block can have. o is wider than x in some, narrower in others, so
# that a rebuilt x finds room on o's tapes and does not
MODELS: dict[str, Record] = {
    "8/8 bias": _sizes("llama", 8, 8, 32, 4, attention_bias=True, mlp_bias=True),
    "8/2 qk_norm": _sizes("qwen3", 8, 2, 24, 4),
    "8/1 tied": _sizes("smollm3", 8, 1, 24, 2, tie_word_embeddings=True, no_rope_layers=[1, 0, 1]),
    "14/2 tied": _sizes("qwen2", 14, 2, 56, 4, tie_word_embeddings=True, rope_scaling=YARN),
    "6/3": _sizes("llama", 6, 3, 36, 4, rope_scaling=LLAMA3_ROPE),
    "2/1": _sizes("qwen3", 2, 1, 16, 4, layers=2),
    "wide": _sizes("qwen3", 6, 2, 48, 14, layers=6),
    "narrow": _sizes("qwen3", 6, 2, 48, 6, layers=6, tie_word_embeddings=True),
}
PRESET = "tiny"  # which has 256 ids and weights of its own


def _shapes(config: Record) -> dict[str, tuple[int, ...]]:
    """Every weight of a model, by its Hugging Face name."""
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    kind = config["model_type"]
    all_bias, qkv_bias = bool(config.get("attention_bias")), kind == "qwen2" or bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, rows, columns, bias in (
            ("self_attn.q_proj", queries, hidden, qkv_bias),
            ("self_attn.k_proj", keys, hidden, qkv_bias),
            ("self_attn.v_proj", keys, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, queries, all_bias),
            ("mlp.gate_proj", wide, hidden, mlp_bias),
            ("mlp.up_proj", wide, hidden, mlp_bias),
            ("mlp.down_proj", hidden, wide, mlp_bias),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (hidden,)
        if kind == "qwen3":
            for name in ("q_norm", "k_norm"):
                shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (head,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, hidden)
    return shapes


def _write_models(top: Path) -> None:
    """A Hugging Face folder for each model; no two weights have the same values, so that each can be recognized."""
    for number, (name, config) in enumerate(MODELS.items()):
        generator = torch.Generator().manual_seed(number)
        weights = {}
        for weight, shape in _shapes(config).items():
            drawn = torch.randn(shape, generator=generator)
            is_norm = len(shape) == 1 and not weight.endswith("bias")
            weights[weight] = drawn * 0.3 + 1 if is_norm else drawn * (0.3 if len(shape) == 1 else 0.15)
        folder = _folder(top, name)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors")


def _folder(top: Path, model: str) -> Path:
    return top / model.replace("/", "-").replace(" ", "-")


# Batches --------------------------------------------------------------------------------------------------------------

# rows, tokens, documents in a row (0: not told), share of labels that are not learned; of each micro-batch of a step
BATCHES: dict[str, list[tuple[int, int, int, float]]] = {
    "row": [(1, 41, 0, 0.0)],
    "ragged": [(1, 53, 6, 0.2)],
    "many": [(1, 61, 20, 0.2)],  # documents, some of a single token
    "rows": [(4, 19, 0, 0.1)],
    "ragged-rows": [(5, 23, 4, 0.3)],
    "micro": [(1, 53, 5, 0.2), (2, 23, 0, 0.8)],
    "micro-rows": [(4, 17, 3, 0.2), (3, 29, 0, 0.7)],
    "long": [(1, 331, 4, 0.1)],
}


def _make_batches(kind: str, vocabulary: int, seed: int) -> list[Rows]:
    """The micro-batches of a step."""
    made: list[Rows] = []
    for number, (rows, length, documents, ignored) in enumerate(BATCHES[kind]):
        chance, generator = random.Random(f"{kind} {seed} {number}"), torch.Generator().manual_seed(100 * seed + number)
        tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
        labels = tokens.masked_fill(torch.rand(rows, length, generator=generator) < ignored, -100)
        labels[:, -2:] = tokens[:, -2:]
        ids = torch.zeros_like(tokens)
        for row in range(rows):
            ids[row, sorted(chance.sample(range(1, length), max(documents - 1, 0)))] = 1
        made.append((tokens, labels, ids.cumsum(1) if documents else None))
    return made


# Cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to train: on how many ranks, what, in which dtype, with which mesh, batch and Plan."""

    ranks: int
    model: str
    dtype: str
    mesh: dict[str, int]
    batch: str
    plan: dict[str, str | int]

    @property
    def name(self) -> str:
        recipe = self.plan["recipe"]
        words = [f"{self.ranks} ranks" if self.ranks > 1 else "1 rank", recipe, self.model, self.dtype, self.batch]
        words += [f"mesh.{name}={size}" for name, size in self.mesh.items()]
        words += [f"{name}={value}" for name, value in self.plan.items() if name != "recipe"]
        return " | ".join(map(str, words))


F32, F64, B16 = "float32", "float64", "bfloat16"
CUT = {"chunk": 7, "tile": 3}
COARSE = {"chunk": 18, "tile": 5}  # with more ranks than cores every message takes its time
ON_HOST = {"kv": "host", "lse": "host", "gradient": "host"}
ON_DEVICE = {"x": "device", "o": "device", "gradient": "device"}


def _cases() -> Iterator[Case]:
    yield from _alone()
    yield from _two()
    yield from _three()
    yield from _four()
    yield from _eight()


def _alone() -> Iterator[Case]:
    def case(model: str, dtype: str, batch: str, recipe: str, **plan: str | int) -> Case:
        return Case(1, model, dtype, {}, batch, {"recipe": recipe, **plan})

    yield case("8/8 bias", F32, "row", "dense", checkpoint="none")
    yield case("8/2 qk_norm", F64, "ragged", "dense", checkpoint="none")
    yield case("14/2 tied", F32, "ragged-rows", "dense", checkpoint="selective", loss_tile=16)
    yield case("8/1 tied", F64, "micro", "dense", checkpoint="full", tile=5)
    yield case("6/3", F32, "rows", "dense", checkpoint="full", x="host", loss_tile=5)
    yield case("narrow", F64, "ragged", "dense", x="device, disk*2", tile=7)
    yield case("8/2 qk_norm", F32, "many", "dense", kernel="naive", checkpoint="selective")
    yield case("8/2 qk_norm", B16, "ragged", "dense", checkpoint="selective")
    yield case(PRESET, F32, "long", "dense")
    yield case("8/2 qk_norm", F32, "ragged", "ulysses", checkpoint="selective")
    yield case("6/3", F64, "rows", "alst", tile=6)
    yield case("narrow", F32, "ragged", "alst", x="device, disk*2", tile=7)
    yield case("8/8 bias", F64, "micro", "alst", checkpoint="selective", x="device, host*2", tile=4)
    yield case("8/2 qk_norm", F32, "ragged", "untied")
    yield case("14/2 tied", F64, "row", "untied", heads=7, tile=9)
    yield case("6/3", F32, "ragged", "ring")
    yield case("8/1 tied", F32, "row", "hybrid", checkpoint="none")
    yield case("8/2 qk_norm", F32, "long", "sweep")
    yield case("8/2 qk_norm", F32, "long", "sweep", chunk=64, tile=48)
    yield case("8/8 bias", F64, "ragged", "sweep", **CUT)
    yield case("14/2 tied", F32, "micro", "sweep", optimizer="host", loss_tile=7, **CUT)
    yield case("8/1 tied", F64, "ragged-rows", "sweep", **ON_HOST, **CUT)
    yield case("6/3", F32, "ragged", "sweep", **ON_DEVICE, **CUT)
    yield case("6/3", F64, "many", "sweep", o="recompute", **CUT)
    yield case("8/2 qk_norm", F32, "many", "sweep", kernel="naive", **CUT)
    yield case("8/2 qk_norm", B16, "ragged", "sweep", **CUT)
    yield case("wide", B16, "ragged", "sweep", x="host, rebuild*5", kv="host", **CUT)
    yield case("wide", F32, "ragged", "sweep", x="host, rebuild*5", o="host", **CUT)
    yield case("narrow", F64, "ragged", "sweep", x="host, rebuild*5", o="host*5, recompute", **CUT)
    yield case("wide", F64, "ragged", "sweep", x="device, rebuild*5", o="disk*3, host*2, device", **CUT)
    yield case("narrow", F32, "row", "sweep", x="disk*2, rebuild*2, host, rebuild", o="host, disk*2, device*3", **CUT)
    yield case(
        "wide", F32, "micro", "sweep", x="host, rebuild*2, host*2, rebuild", o="host*3, recompute, host*2", **CUT
    )
    yield case("narrow", F32, "long", "sweep", x="disk, rebuild*5", o="disk", chunk=50, tile=20, **ON_HOST)
    yield case("wide", F64, "long", "sweep", x="disk", o="disk", lse="host", chunk=100)
    yield case(PRESET, F32, "long", "sweep", chunk=128, tile=64)
    # Weights that stay gathered during a step
    yield case("8/8 bias", F32, "micro", "dense", checkpoint="none", zero=2)
    yield case("8/1 tied", F64, "micro-rows", "dense", checkpoint="none", zero=1)
    yield case("14/2 tied", F32, "micro", "dense", checkpoint="selective", zero=2)
    yield case("6/3", F64, "ragged", "dense", checkpoint="full", tile=5, zero=2)
    yield case("8/2 qk_norm", B16, "micro", "dense", checkpoint="none", zero=2)
    yield case("14/2 tied", B16, "micro", "dense", checkpoint="selective", zero=2)
    yield case("narrow", F32, "ragged", "alst", x="device, disk*2", tile=7, zero=2)
    yield case("8/8 bias", F64, "micro", "untied", tile=9, zero=1)
    yield case("6/3", F32, "micro", "sweep", zero=2, **ON_DEVICE, **CUT)
    yield case("8/1 tied", F64, "ragged-rows", "sweep", zero=2, **ON_HOST, **CUT)
    yield case("14/2 tied", F32, "micro", "sweep", optimizer="host", zero=2, **CUT)
    yield case("wide", F32, "micro", "sweep", x="host, rebuild*5", o="host", zero=2, **CUT)
    yield case("narrow", F64, "ragged", "sweep", x="host, rebuild*5", o="host*5, recompute", zero=2, **CUT)
    yield case("wide", B16, "micro", "sweep", x="host, rebuild*5", kv="host", zero=2, **CUT)
    yield case("8/1 tied", B16, "ragged", "sweep", o="recompute", zero=1, **CUT)


def _two() -> Iterator[Case]:
    ulysses, ring, shard, copies = {"ulysses": 2}, {"ring": 2}, {"shard": 2}, {"replicate": 2}

    def case(model: str, dtype: str, mesh: dict[str, int], batch: str, recipe: str, **plan: str | int) -> Case:
        return Case(2, model, dtype, mesh, batch, {"recipe": recipe, **plan})

    yield case("8/2 qk_norm", F32, shard, "rows", "dense", zero=1)
    yield case("14/2 tied", F64, shard, "ragged-rows", "dense", zero=2, checkpoint="none")
    yield case("8/8 bias", F32, shard, "micro-rows", "dense", zero=3, checkpoint="selective", optimizer="host")
    yield case("8/1 tied", F32, shard, "micro-rows", "dense", zero=1, x="device, host*2")
    yield case("6/3", F32, copies, "ragged-rows", "dense")
    yield case("8/2 qk_norm", F32, ulysses, "ragged", "ulysses", checkpoint="none")
    yield case("8/1 tied", F64, ulysses, "micro", "ulysses", checkpoint="selective", zero=2)
    yield case("14/2 tied", F32, ulysses, "rows", "ulysses", checkpoint="full", zero=1, tile=5)
    yield case("8/8 bias", F32, ulysses, "ragged", "alst", tile=5)
    yield case("8/2 qk_norm", F64, ulysses, "many", "untied", heads=4)
    yield case("6/3", F32, ulysses, "row", "untied", tile=8)
    yield case("8/2 qk_norm", F32, ring, "ragged", "ring")
    yield case("8/8 bias", F64, ring, "row", "ring", travel="gather", checkpoint="selective")
    yield case("6/3", F32, ring, "micro", "hybrid", checkpoint="none")
    yield case("8/2 qk_norm", F32, ulysses, "ragged", "sweep", **CUT)
    yield case("8/1 tied", F64, ulysses, "micro", "sweep", o="recompute", zero=2, **CUT)
    yield case("8/1 tied", B16, ulysses, "ragged", "sweep", zero=2, **CUT)
    yield case("wide", F32, ulysses, "long", "sweep", x="host, rebuild*5", chunk=64, tile=20)
    yield case("narrow", F64, ulysses, "ragged", "sweep", x="disk, rebuild*2, host*3", o="disk*2, host", **CUT)
    yield case("14/2 tied", F32, ring, "ragged", "sweep", **ON_HOST, **CUT)
    yield case("8/8 bias", F64, ring, "row", "sweep", x="device, rebuild, host", o="host, recompute, device", **CUT)
    yield case("6/3", F32, ring, "rows", "sweep", **ON_DEVICE, **CUT)
    yield case("narrow", F32, shard, "micro-rows", "sweep", x="host*2, rebuild, device, rebuild*2", zero=1, **CUT)
    yield case("6/3", F32, copies, "ragged-rows", "sweep", optimizer="host", **CUT)


def _three() -> Iterator[Case]:
    def case(model: str, dtype: str, mesh: dict[str, int], batch: str, recipe: str, **plan: str | int) -> Case:
        return Case(3, model, dtype, mesh, batch, {"recipe": recipe, **plan})

    yield case("8/1 tied", F32, {"shard": 3}, "ragged-rows", "dense", zero=2)
    yield case("14/2 tied", F32, {"ulysses": 3}, "ragged", "ulysses", checkpoint="selective")
    yield case("8/2 qk_norm", F64, {"ulysses": 3}, "row", "untied")
    yield case("6/3", F32, {"ulysses": 3}, "many", "alst", tile=4)
    yield case("8/8 bias", F32, {"ring": 3}, "ragged", "ring", travel="gather")
    yield case("8/2 qk_norm", F32, {"ulysses": 3}, "ragged", "sweep", **CUT)
    yield case("6/3", F64, {"ulysses": 3}, "micro", "sweep", x="host, rebuild*2", zero=2, **COARSE)
    yield case("2/1", F32, {"ring": 3}, "ragged", "sweep", kv="host", **COARSE)


def _four() -> Iterator[Case]:
    both, two_each, copies = {"ulysses": 2, "ring": 2}, {"shard": 2, "ulysses": 2}, {"replicate": 2, "ulysses": 2}

    def case(model: str, dtype: str, mesh: dict[str, int], batch: str, recipe: str, **plan: str | int) -> Case:
        return Case(4, model, dtype, mesh, batch, {"recipe": recipe, **plan})

    yield case("8/2 qk_norm", F32, {"replicate": 2, "shard": 2}, "rows", "dense", zero=3)
    yield case("8/1 tied", F64, {"replicate": 2, "shard": 2}, "ragged-rows", "dense", zero=1, checkpoint="none")
    yield case("8/2 qk_norm", F32, {"ulysses": 4}, "ragged", "ulysses", checkpoint="full")
    yield case("6/3", F64, {"ulysses": 4}, "ragged", "alst", checkpoint="selective", tile=5)
    yield case("14/2 tied", F32, {"ulysses": 4}, "micro", "untied", heads=4)
    yield case("2/1", F32, {"ring": 4}, "ragged", "ring")
    yield case("8/2 qk_norm", F32, both, "ragged", "hybrid", checkpoint="selective", x="host")
    yield case("8/1 tied", F64, both, "row", "hybrid", travel="gather")
    yield case("8/2 qk_norm", F32, {"ulysses": 4}, "ragged", "sweep", **COARSE)
    yield case("wide", F32, both, "ragged", "sweep", x="host, rebuild*5", **ON_HOST, **COARSE)
    yield case("8/8 bias", F64, both, "micro", "sweep", o="recompute", zero=1, **COARSE)
    yield case("14/2 tied", F32, two_each, "ragged-rows", "sweep", zero=2, **COARSE)
    yield case("6/3", F32, copies, "rows", "sweep", x="host, rebuild*2", **COARSE)


def _eight() -> Iterator[Case]:
    yield Case(
        8,
        "6/3",
        F32,
        {"shard": 2, "ulysses": 2, "ring": 2},
        "ragged-rows",
        {"recipe": "sweep", "x": "host, rebuild*2", **COARSE},
    )
    yield Case(8, "8/1 tied", F32, {"ulysses": 8}, "ragged", {"recipe": "untied"})
    yield Case(8, "8/2 qk_norm", F64, {"replicate": 2, "ulysses": 2, "ring": 2}, "rows", {"recipe": "hybrid"})


# A case, as one rank runs it ------------------------------------------------------------------------------------------


def _digest(tensor: Tensor) -> str:
    """Of dtype, shape and every byte."""
    whole = tensor.detach().contiguous().cpu()
    head = f"{whole.dtype} {list(whole.shape)} ".encode()
    return hashlib.sha256(head + whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:20]


def _whole(tensor: Any) -> Tensor:
    """All of a tensor that ranks hold a part of each. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _recognized(model: Any, weights: dict[str, Tensor]) -> list[str]:
    """Hugging Face names of the parameters, in their order, by their values; several names where these are equal."""
    by_value: dict[str, list[str]] = {}
    for name, weight in weights.items():
        by_value.setdefault(_digest(weight.double()), []).append(name)
    names = []
    for name, parameter in model.named_parameters():
        found = by_value.get(_digest(_whole(parameter).double()))
        if found is None:
            raise AssertionError(f"parameter {name} has not the values of any weight in the folder")
        names.append(" or ".join(found))
    if set(names) != {" or ".join(found) for found in by_value.values()}:
        raise AssertionError("some weights of the folder are no parameters of the model")
    return names


def _digests(names: list[str], tensors: list[Any]) -> dict[str, str]:
    """By name, whatever their order; where weights cannot be told apart, of all of them together."""
    found: dict[str, list[str]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        found.setdefault(name, []).append("none" if tensor is None else _digest(_whole(tensor)))
    return {name: " ".join(sorted(some)) for name, some in sorted(found.items())}


def _plan(ithaca: Any, options: dict[str, str | int], disk: Path) -> Any:
    known = {option.name for option in dataclasses.fields(ithaca.Plan)}
    spelled = {RENAMED[name] if RENAMED.get(name) in known else name: value for name, value in options.items()}
    if any("disk" in str(options.get(name, "")) for name in ("x", "o")):
        spelled["disk"] = str(disk)
    return ithaca.Plan(**spelled)


def _pass(model: Any, batches: list[Rows]) -> str:
    """Forward and backward over the micro-batches of a step; gives the loss."""
    parts = [model.shard(*batch) for batch in batches]
    valid, loss = sum(part.valid_tokens for part in parts), 0.0
    for number, part in enumerate(parts, start=1):
        # One batch is run as the README does it
        micro = model(part) if len(parts) == 1 else model(part, valid_tokens=valid, last=number == len(parts))
        micro.backward()
        loss += micro.item()
    return loss.hex()


def _run_case(case: Case, top: Path) -> Record:
    import ithaca

    preset = case.model == PRESET
    vocabulary = 256 if preset else VOCABULARY
    source = ithaca.load_model(case.model if preset else _folder(top, case.model), case.dtype, seed=3)
    model = ithaca.apply(source, _plan(ithaca, case.plan, top), ithaca.mesh(**case.mesh, device="cpu"))  # pyrefly: ignore
    if preset:
        folder = _agreed_folder(top)
        ithaca.save_model(model, folder)
    else:
        folder = _folder(top, case.model)
    dist.barrier()
    names = _recognized(model, load_file(folder / "model.safetensors"))
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-2)
    record: Record = {}
    for step in (1, 2):
        record[f"loss of step {step}"] = _pass(model, _make_batches(case.batch, vocabulary, seed=step))
        gradients = [parameter.grad for _, parameter in model.named_parameters()]
        record[f"gradients of step {step}"] = _digests(names, gradients)
        if step == 1:
            optimizer.step()
            record["weights after step 1"] = _digests(names, [weight for _, weight in model.named_parameters()])
        model.zero_grad()
    with torch.no_grad():
        batches = _make_batches(case.batch, vocabulary, seed=3)
        record["evaluated"] = [model(model.shard(*batch)).item().hex() for batch in batches]
        tokens, _, documents = batches[0]
        record["logits"] = _digest(model.logits(tokens[:1], None if documents is None else documents[:1]))
    folder = _agreed_folder(top)
    ithaca.save_model(model, folder)
    dist.barrier()
    record["saved"] = {
        name: _digest(weight) for name, weight in sorted(load_file(folder / "model.safetensors").items())
    }
    record["saved config"] = json.loads((folder / "config.json").read_text())
    return record


def _agreed_folder(top: Path) -> Path:
    """A new name for a folder, the same on all ranks."""
    names = [str(top / f"saved-{uuid.uuid4().hex}")]
    dist.broadcast_object_list(names)
    return Path(names[0])


# Ranks ----------------------------------------------------------------------------------------------------------------


class Ranks:
    """Processes of one gloo job that are forked once and run one case after the other."""

    def __init__(self, world: int, top: Path):
        self.world, fork = world, multiprocessing.get_context("fork")
        store = str(top / f"store-{uuid.uuid4().hex}")
        pipes = [fork.Pipe() for _ in range(world)]
        self._pipes = [here for here, _ in pipes]
        self._processes = [
            fork.Process(target=_serve, args=(rank, world, store, top, pipes[rank][1]), daemon=True)
            for rank in range(world)
        ]
        for process in self._processes:
            process.start()

    def run(self, case: Case) -> Record | None:
        """What the case gave; an error where one rank had one. None: the job is lost, and others need a new one."""
        for pipe in self._pipes:
            pipe.send(case)
        answers: dict[int, Record] = {}
        until = time.monotonic() + SECONDS
        while len(answers) < self.world:
            missing = {self._pipes[rank]: rank for rank in range(self.world) if rank not in answers}
            wait([*missing, *(process.sentinel for process in self._processes)], max(until - time.monotonic(), 0))
            answers |= {rank: pipe.recv() for pipe, rank in missing.items() if pipe.poll()}
            dead = any(process.exitcode is not None for process in self._processes)
            if len(answers) < self.world and (dead or time.monotonic() > until):
                self.stop()
                return None
            if any("error" in answer for answer in answers.values()):
                until = min(until, time.monotonic() + 20)  # the others may be waiting for it
        first = answers[0]
        errors = [answer for _, answer in sorted(answers.items()) if "error" in answer]
        if errors:
            return errors[0]
        if any(answer != first for answer in answers.values()):
            return {"ranks differ": True, **{f"rank {rank}": answer for rank, answer in sorted(answers.items())}}
        return first

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world: int, store: str, top: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)  # before the first operation: a forked child would wait for the parent's threads
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        case = pipe.recv()
        try:
            answer = _run_case(case, top)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        pipe.send(answer)


# The command line -----------------------------------------------------------------------------------------------------


def _import_tree(tree: Path) -> str:
    """Have `ithaca` come from this tree; gives its version."""
    sys.path.insert(0, str(tree.resolve()))
    import ithaca

    found = Path(ithaca.__file__).resolve()
    if not found.is_relative_to(tree.resolve()):
        raise SystemExit(f"ithaca was imported from {found}, not from {tree}: does it hold a folder ithaca?")
    for name in ("load_model", "Plan", "apply", "mesh", "make_optimizer", "save_model"):
        getattr(ithaca, name)  # before forking: once for all ranks
    importlib.import_module("torch._dynamo")  # which torch would import in each of them, in seconds
    return ithaca.__version__


def run(tree: Path, out: Path, only: str) -> int:
    version, begun = _import_tree(tree), time.monotonic()
    torch.set_num_threads(1)
    cases = [case for case in _cases() if only in case.name]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have the same name"
    found: dict[str, Record] = {}
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as folder:
        top = Path(folder)
        _write_models(top)
        job: Ranks | None = None
        for number, case in enumerate(cases, start=1):
            if job is not None and job.world != case.ranks:
                job.stop()
                job = None
            job, since = job or Ranks(case.ranks, top), time.monotonic()
            answer = job.run(case)
            if answer is None or "error" in answer:
                job.stop()  # whose ranks may be at different places
                job = None
            found[case.name] = answer or {"error": "a rank died or hung"}
            trouble = next((word for word in ("error", "ranks differ") if word in found[case.name]), "")
            said = f": {trouble} {str(found[case.name][trouble]).splitlines()[0]}" if trouble else ""
            print(f"{number}/{len(cases)} {time.monotonic() - since:.1f} s {case.name}{said}", flush=True)
        if job is not None:
            job.stop()
    about = {"ithaca": version, "torch": torch.__version__, "python": platform.python_version(), "machine": _machine()}
    out.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")
    failed = sum("error" in record or "ranks differ" in record for record in found.values())
    print(f"{len(found)} combinations in {time.monotonic() - begun:.0f} s, {failed} failed: {out}")
    return 1 if failed else 0


def _machine() -> str:
    """What decides which kernels torch takes."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _differences(before: Any, after: Any, path: str) -> Iterator[str]:
    """One line for each loss, and for each group of tensors: how many of them differ, and the first."""
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted(before.keys() | after.keys())
        differing = [name for name in names if before.get(name) != after.get(name)]
        if all(isinstance(value, str) for value in (*before.values(), *after.values())) and "error" not in differing:
            first = differing[0]
            yield (
                f"{path}: {len(differing)} of {len(names)} differ, first {first}: "
                f"{before.get(first, 'missing')} → {after.get(first, 'missing')}"
            )
            return
        for name in differing:
            if name != "traceback":
                yield from _differences(before.get(name, "missing"), after.get(name, "missing"), f"{path}: {name}")
        return
    yield f"{path}: {_short(before)} → {_short(after)}"


def _short(value: Any) -> str:
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return f"{value} ({float.fromhex(value):.9g})"
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "…"


def compare(first: Path, second: Path) -> int:
    before, after = (json.loads(file.read_text()) for file in (first, second))
    for name in ("torch", "python", "machine"):
        if before["about"][name] != after["about"][name]:
            print(f"note: {name} was {before['about'][name]} and is {after['about'][name]}")
    differing = 0
    for name in dict.fromkeys((*before["cases"], *after["cases"])):
        lines = list(_differences(before["cases"].get(name, "missing"), after["cases"].get(name, "missing"), name))
        differing += bool(lines)
        for line in lines:
            print(line)
    broken = {name: record for name, record in before["cases"].items() if {"error", "ranks differ"} & record.keys()}
    for name, record in broken.items():
        print(f"{name}: failed already before, which proves nothing: {record.get('error', 'ranks differ')}")
    count = len(before["cases"].keys() | after["cases"].keys())
    if differing or broken or not count:
        print(f"{count} combinations: {differing} differ, {len(broken)} failed already before")
        return 1
    print(f"{count} combinations: identical")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(), metavar="DIR", help="whose ithaca is run; this folder's")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument("--only", default="", metavar="WORD", help="combinations with this in their name")
    parser.add_argument("--list", action="store_true", help="name the combinations and run none")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="two files of results")
    options = parser.parse_args()
    if options.compare:
        first, second = options.compare
        return compare(first, second)
    if options.list:
        print("\n".join(case.name for case in _cases() if options.only in case.name))
        return 0
    if options.out is None:
        parser.error("--out FILE is needed, for the results")
    return run(options.tree, options.out, options.only)


if __name__ == "__main__":
    sys.exit(main())
