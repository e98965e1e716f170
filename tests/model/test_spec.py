"""config.json against what transformers makes of it, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ithaca.base.errors import ModelError
from ithaca.model.block import output_projection, project
from ithaca.model.presets import PRESETS
from ithaca.model.rotary import Rotary
from ithaca.model.spec import FAMILIES, Heads, read_spec, runs

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
}
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_silent_keys_mean_what_transformers_means(kind: str, tmp_path: Path) -> None:
    """Only the sizes are given; whatever transformers then assumes, so do we."""
    config = {"model_type": kind, **SIZES, "sliding_window": None, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_spec(config)
    model = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")(theirs)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_size == getattr(theirs, "head_dim", 4)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied == theirs.tie_word_embeddings
    assert list(ours.rope_layers) == [bool(flag) for flag in getattr(theirs, "no_rope_layers", [1] * 5)]
    assert dict(ours.shapes()) == {name: tuple(weight.shape) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name: str) -> None:
    spec = read_spec(PRESETS[name])
    assert spec.parameters() == sum(math.prod(shape) for _, shape in spec.shapes()) == PUBLISHED[name]


def test_flops_count_the_head_and_not_the_lookup() -> None:
    spec = read_spec(PRESETS["llama3-8b"])
    matrices = spec.parameters() - 128256 * 4096
    assert spec.flops_per_token(1000) == 6 * matrices + 6 * 32 * 4096 * 1000
    tied = read_spec(PRESETS["llama3.2-1b"])
    assert tied.flops_per_token(0) == 6 * tied.parameters()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": ["llama"]}, "is not supported: supported are llama"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps as 'x': a number above 0"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads as '2': a whole number"),
        ({"head_dim": 8.0}, "head_dim as 8.0: a whole number"),
        (
            {"hidden_size": 10**30},
            "hidden_size as 1000000000000000000000000000000: a whole number from 1 to 2147483647",
        ),
        ({"layer_types": 5}, "layer_types as 5: a list is needed"),
        ({"model_type": "smollm3", "no_rope_layers": 5}, "no_rope_layers as 5: a list"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval as 0"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported: supported are llama, mistral, qwen2, qwen3, smollm3"),
        ({}, "model type None is not supported"),
        ({"hidden_size": None}, "hidden_size as None"),
        ({"model_type": "mistral"}, "sliding_window 4096 .null means none. makes a sliding window"),
        ({"model_type": "mistral", "sliding_window": 1024}, "sliding_window 1024 .* sliding window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, "use_sliding_window with"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' in layer_types makes"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported: only silu"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_key_value_heads": 5}, "32 query heads do not divide into 5 key/value heads"),
        ({"head_dim": 7}, "head size 7 is odd"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "2 entries for 5 layers"),
    ],
)
def test_refused(config: dict[str, Any], sentence: str) -> None:
    base: dict[str, Any] = {} if config == {} else {"model_type": "llama"}
    with pytest.raises(ModelError, match=sentence):
        read_spec({**base, **SIZES, **config})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 5},
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"] * 5},
        {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [1] * 5},
        {"model_type": "smollm3", "use_sliding_window": True},
        {"model_type": "qwen2", "sliding_window": 64},
        {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
    ],
)
def test_windows_as_transformers_sees_them(config: dict[str, Any]) -> None:
    theirs = transformers.AutoConfig.for_model(**SIZES, pad_token_id=None, **config)
    if set(theirs.layer_types) == {"full_attention"}:
        read_spec({**SIZES, **config})
    else:
        with pytest.raises(ModelError, match="sliding window"):
            read_spec({**SIZES, **config})


@pytest.mark.parametrize("kind", FAMILIES)
def test_trained_positions_default_as_in_transformers(kind: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = {"model_type": kind, **SIZES, "sliding_window": None, "rope_scaling": scaling}
    theirs = transformers.AutoConfig.for_model(**{**config, "rope_scaling": dict(scaling)}, pad_token_id=None)
    wanted = theirs.rope_parameters["original_max_position_embeddings"]
    assert read_spec(config).rope.trained_positions == wanted


def test_slices_of_heads_make_up_the_whole() -> None:
    """The mathematics of a block over slices of its heads, which the schedules lean on."""
    spec = read_spec({"model_type": "qwen3", **SIZES, "num_key_value_heads": 8, "head_dim": 4, "attention_bias": True})
    torch.manual_seed(0)
    w = {name: torch.randn(shape, dtype=torch.float64) for name, shape in spec.block_shapes().items()}
    x = torch.randn(7, spec.hidden, dtype=torch.float64)
    rope = Rotary(spec.rope, spec.head_size).at(torch.arange(7), torch.float64)
    whole = project(spec, w, x, rope, Heads.all(spec))
    o = torch.randn(7, spec.heads, spec.head_size, dtype=torch.float64)
    mixed = x
    for kv in (range(3), range(3, 8)):
        q = range(kv.start * spec.group, kv.stop * spec.group)
        part = project(spec, w, x, rope, Heads(q, kv))
        for found, wanted, heads in zip(part, whole, (q, kv, kv), strict=True):
            assert torch.allclose(found, wanted[:, heads.start : heads.stop], rtol=1e-12)
        mixed = output_projection(spec, w, mixed, o[:, q.start : q.stop], Heads(q, kv))
    assert torch.allclose(mixed, output_projection(spec, w, x, o, Heads.all(spec)), rtol=1e-12)


def test_runs_of_heads() -> None:
    assert runs(range(3, 7)) == [range(3, 7)]
    assert runs((0, 1, 4, 6, 7, 8)) == [range(2), range(4, 5), range(6, 9)]
    assert runs((5,)) == [range(5, 6)]
    assert runs(range(0)) == runs(()) == [range(0)]
