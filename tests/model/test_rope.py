"""The rope of a config.json: the inverse frequencies of transformers, bit for bit, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ithaca.base.errors import ModelError
from ithaca.model.rope import read_rope
from ithaca.model.rotary import inverse_frequencies

factors = st.floats(1.0, 40.0)
lengths = st.sampled_from([64, 2048, 8192, 32768])
scalings = st.one_of(
    st.just({}),
    st.builds(lambda f: {"rope_type": "linear", "factor": f}, factors),
    st.builds(
        lambda f, low, more, n: {
            "rope_type": "llama3",
            "factor": f,
            "low_freq_factor": low,
            "high_freq_factor": low + more,
            "original_max_position_embeddings": n,
        },
        factors,
        st.floats(0.5, 2.0),
        st.floats(0.5, 6.0),
        lengths,
    ),
    st.builds(
        lambda f, n, more: {"rope_type": "yarn", "factor": f, "original_max_position_embeddings": n, **more},
        factors,
        lengths,
        st.fixed_dictionaries(
            {},
            optional={
                "beta_fast": st.floats(8.0, 64.0),
                "beta_slow": st.floats(0.5, 4.0),
                "truncate": st.booleans(),
                "attention_factor": st.floats(0.5, 1.5),
                "mscale": st.sampled_from([0.707, 1.0]),
                "mscale_all_dim": st.sampled_from([0.707, 1.0]),
            },
        ),
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    scaling=scalings,
    theta=st.sampled_from([1e4, 5e5, 1e6, 2e6]),
    size=st.sampled_from([2, 64, 80, 128]),
    old=st.booleans(),
)
def test_same_frequencies_as_transformers(scaling: dict[str, Any], theta: float, size: int, old: bool) -> None:
    if old:
        config: dict[str, Any] = {"rope_theta": theta, "rope_scaling": dict(scaling) or None}
    else:
        config = {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta}}
    config |= {"max_position_embeddings": 65536, "head_dim": size, "hidden_size": 4 * size, "num_attention_heads": 4}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}))
    ours = read_rope(config, 10000.0, 2048)
    assert torch.equal(inverse_frequencies(ours, size), theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported: supported are default, linear",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor and high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling as 'linear': an object is needed"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor as 0: a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor as '4': a number above 0"),
        ({"rope_theta": "a"}, "rope_theta as 'a'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
    ],
)
def test_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_rope({"max_position_embeddings": 4096, **config}, 10000.0, 2048)
