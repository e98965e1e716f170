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


def yarn(**keys: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **keys}}


def llama3(low: float, high: float) -> dict[str, Any]:
    given = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_scaling": given}


odd = st.one_of(
    st.floats(), st.integers(-3, 10**6), st.sampled_from([0, 1, 1.0, 1e-300, 1e300, 10**400, None, True, "1", [], {}])
)
KEYS = [
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "attention_factor", "original_max_position_embeddings", "truncate"),
]


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    keys=st.dictionaries(st.sampled_from(KEYS), odd, max_size=4),
    size=st.sampled_from([2, 64, 128]),
)
def test_odd_numbers_are_refused_or_finite(kind: str, keys: dict[str, Any], size: int) -> None:
    """Whatever a config.json says: a sentence, or angles that can be computed at any position."""
    base = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    try:
        rope = read_rope({"max_position_embeddings": 4096, "rope_parameters": {**base, **keys}}, 10000.0, 2048)
    except ModelError:
        return
    angles = inverse_frequencies(rope, size).double() * 2**33
    assert (angles.cos() * rope.attention_factor).isfinite().all()


@pytest.mark.parametrize("theta", [1.0, 1.0000001, 1e30])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_the_least_and_the_largest_base(kind: str, theta: float) -> None:
    if kind == "yarn" and theta == 1:
        return
    given = {"rope_type": kind, "factor": 1e9, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": theta}
    inverse = inverse_frequencies(read_rope({"rope_parameters": given}, 10000.0, 2048), 128)
    assert inverse.isfinite().all()


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
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor as 0: a number of at least 1 and at most"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor as '4': a number of at least 1"),
        ({"rope_theta": "a"}, "rope_theta as 'a'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"rope_theta": 0.5}, "rope_theta as 0.5: a number of at least 1 and at most 1e\\+30"),
        ({"rope_theta": 1e31}, "rope_theta as 1e\\+31: a number of at least 1"),
        ({"rope_theta": 10**400}, "rope_theta as 1000.*: a number of at least 1"),
        ({"rope_theta": float("nan")}, "rope_theta as nan"),
        ({"rope_theta": True}, "rope_theta as True"),
        (yarn(rope_theta=1.0), "rope_theta as 1.0: rope type 'yarn' needs a number above 1"),
        (yarn(beta_fast=1e308), "beta_fast as 1e\\+308: a number of at least 0.001 and at most 1e\\+06"),
        (yarn(beta_slow=1e-320), "beta_slow as 1e-320"),
        (yarn(beta_slow="1"), "beta_slow as '1'"),
        (yarn(beta_fast=1, beta_slow=2), "beta_fast as 1.0 and beta_slow as 2.0: the first must be larger"),
        (yarn(factor=0.5), "factor as 0.5: a number of at least 1"),
        (yarn(truncate="false"), "truncate as 'false': true or false is needed"),
        (yarn(mscale="1"), "mscale as '1': a number above 0 and at most 1000"),
        (yarn(mscale_all_dim=[]), "mscale_all_dim as \\[\\]"),
        (yarn(mscale=-1), "mscale as -1: a number above 0"),
        (yarn(attention_factor=1e300), "attention_factor as 1e\\+300: a number above 0 and at most 1000"),
        (yarn(original_max_position_embeddings=4096.5), "original_max_position_embeddings as 4096.5: a whole number"),
        (llama3(4.0, 4.0), "low_freq_factor as 4.0 and high_freq_factor as 4.0: the second must be larger"),
        (llama3(4, 1), "the second must be larger"),
        (llama3(1e-320, 4), "low_freq_factor as 1e-320"),
    ],
)
def test_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_rope({"max_position_embeddings": 4096, **config}, 10000.0, 2048)
