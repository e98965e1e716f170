"""config.json against what transformers makes of it, and configurations that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ithaca.base.errors import ModelError
from ithaca.model.families import FAMILIES, read_spec

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
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
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0, "no"]}, "has 'no' in no_rope_layers: 1 or 0"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' in layer_types is not supported"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers as 2147483647: a whole number from 1 to 10000"),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 64}, "parameters: at most 1000000000000000 are possible"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps as 1000.*: a number above 0 and at most 1 is"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps as inf"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings as 'false': true or false is needed"),
        ({"attention_bias": "no"}, "attention_bias as 'no': true or false"),
        ({"mlp_bias": 2}, "mlp_bias as 2: true or false"),
        ({"hidden_act": "x\n\x1b[2J"}, r"hidden_act 'x\\n\\x1b\[2J' is not supported"),
        ({"hidden_act": "x" * 10**6}, "hidden_act 'xxxx"),
    ],
)
def test_refused(config: dict[str, Any], sentence: str) -> None:
    base: dict[str, Any] = {} if config == {} else {"model_type": "llama"}
    with pytest.raises(ModelError, match=sentence) as caught:
        read_spec({**base, **SIZES, **config})
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "mistral"])  # there transformers refuses it
def test_null_key_value_heads(kind: str, tmp_path: Path) -> None:
    """One for each query head, as in transformers; only a key that is left out takes the family's default."""
    config = {"model_type": kind, **SIZES, "num_attention_heads": 64, "num_key_value_heads": None, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read_spec(config).kv_heads == theirs.num_key_value_heads == 64
