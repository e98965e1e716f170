"""Context extension: what transformers computes with the saved config.json, the rules as arithmetic, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ithaca
from ithaca.base.errors import IthacaError, ModelError
from ithaca.model.extend import METHODS, ORIGINAL, beyond_context, context_length, extend_rope, parse_rope
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.rotary import inverse_frequencies
from tests.models import make_model, save

OLD, NEW = 32, 160  # context lengths
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 16}
YARN = {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 16}
LINEAR = {"rope_type": "linear", "factor": 2.0}

# A model family with settings of its config.json, model.rope, and the rope type that is saved
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("llama3", {}, "theta", "default"),
    ("llama3", {}, "yarn", "yarn"),
    ("qwen2", {}, "linear", "linear"),
    ("qwen3", {}, "yarn", "yarn"),
    ("mistral", {}, "llama3", "llama3"),
    ("smollm2", {}, "auto", "default"),
    ("llama3.1", {"rope_scaling": LLAMA3}, "auto", "llama3"),
    ("qwen2.5-yarn", {"rope_scaling": YARN}, "auto", "yarn"),
]
MORE = [
    *((family, {}, method, "default" if method in ("theta", "auto") else method)
      for family in ("llama2", "llama3", "mistral", "qwen2", "qwen3", "smollm2", "smollm3") for method in METHODS),
    ("llama-linear", {"rope_scaling": LINEAR}, "auto", "linear"),
    ("llama-linear", {"rope_scaling": LINEAR}, "linear, factor=16", "linear"),
    ("llama3.1", {"rope_scaling": LLAMA3}, "llama3, high_freq_factor=8", "llama3"),
    ("qwen2.5-yarn", {"rope_scaling": YARN | {"attention_factor": 1.5}}, "yarn, beta_fast=8, beta_slow=2", "yarn"),
    ("qwen3", {}, "yarn, factor=6, attention_factor=1.25, rope_theta=2e6", "yarn"),
    ("smollm2", {}, "theta, factor=20", "default"),
    ("smollm2", {}, "theta, rope_theta=8e6", "default"),
    ("mistral", {}, "llama3, factor=3, low_freq_factor=2, original_max_position_embeddings=24", "llama3"),
]  # fmt: skip
SCENES = [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]


def applied(folder: Path, **more: Any) -> ithaca.Model:
    return ithaca.apply(ithaca.load_model(folder, "float32", **more), ithaca.Plan())


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(("family", "keys", "rope", "kind"), SCENES)
def test_transformers_computes_the_same(
    family: str, keys: dict[str, Any], rope: str, kind: str, tmp_path: Path
) -> None:
    """Logits at positions beyond the old length; frequencies and attention factor; after a second load, too."""
    original = make_model(family, max_position_embeddings=OLD, **keys)
    save(original, tmp_path / "in")
    extended = applied(tmp_path / "in", rope=rope, tokens=NEW)
    ithaca.save_model(extended, tmp_path / "out")
    ithaca.save_model(applied(tmp_path / "out"), tmp_path / "again")

    tokens = torch.randint(0, 97, (1, NEW))
    loaded = theirs(tmp_path / "out")
    assert loaded.config.max_position_embeddings >= NEW
    wanted = loaded(tokens).logits
    assert (extended.logits(tokens) - wanted).abs().max() <= 2e-5
    assert (applied(tmp_path / "again").logits(tokens) - wanted).abs().max() <= 2e-5
    assert torch.equal(theirs(tmp_path / "again")(tokens).logits, wanted)
    # The extension does something, and the weights alone do not do it
    assert (original(tokens).logits - wanted)[:, OLD:].abs().max() > 1e-3

    assert loaded.config.rope_parameters["rope_type"] == kind
    frequencies, attention_factor = their_rope(loaded.config)
    assert torch.equal(inverse_frequencies(extended.spec.rope, extended.spec.head_size), frequencies)
    assert extended.spec.rope.attention_factor == attention_factor


def their_rope(config: Any) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and attention factor by the functions of transformers."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


@settings(max_examples=100, deadline=None)
@given(
    rope=st.sampled_from(["theta", "linear", "yarn", "llama3", "auto", "yarn, beta_fast=20.5", "theta, factor=300"]),
    preset=st.sampled_from(["smollm2-135m", "llama3-8b", "qwen3-8b", "llama2-7b"]),
    tokens=st.integers(40961, 10**7),
    old=st.booleans(),
)
def test_both_spellings_say_the_same(rope: str, preset: str, tokens: int, old: bool) -> None:
    """transformers 4 and its readers know rope_theta and rope_scaling, transformers 5 writes rope_parameters."""
    try:
        config = dict(extend_rope(PRESETS[preset], rope, tokens)[0])
    except ModelError:
        assert rope == "theta, factor=300"
        return
    left_out = ["rope_parameters"] if old else ["rope_theta", "rope_scaling"]
    half = {name: value for name, value in config.items() if name not in left_out}
    assert read_spec(half) == read_spec(config)
    assert read_spec(config).max_position_embeddings >= tokens
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(half)))
    assert torch.equal(inverse_frequencies(read_spec(config).rope, read_spec(config).head_size), their_rope(theirs)[0])


# The rules, by hand
def plain(theta: float = 1e5, length: int = 8192, size: int = 64, **more: Any) -> dict[str, Any]:
    return PRESETS["smollm2-135m"] | {
        "rope_theta": theta,
        "max_position_embeddings": length,
        "head_dim": size,
        **more,
    }


@pytest.mark.parametrize(("factor", "size"), [(2, 64), (8, 64), (3.5, 128), (1000, 4)])
def test_theta_by_the_ntk_rule(factor: float, size: int) -> None:
    """The slowest pair rotates as far over the new length as over the old one; the fastest is as before."""
    before = plain(size=size)
    after, line = extend_rope(before, "theta", int(8192 * factor))
    slow, fast = -1, 0
    old, new = (inverse_frequencies(read_spec(config).rope, size).double() for config in (before, after))
    assert math.isclose(new[slow] * 8192 * factor, old[slow] * 8192, rel_tol=1e-6)
    assert new[fast] == old[fast]
    assert f"100000 × {factor:g}^({size}/{size - 2})" in line


def scaled(kind: str, factor: float, length: int, **more: Any) -> dict[str, Any]:
    return plain(length=length, rope_scaling={"type": kind, "factor": factor, **more})


def yarn(**more: Any) -> dict[str, Any]:
    """A model of 8192 tokens that yarn has extended to 32768."""
    return scaled("yarn", 4.0, 32768, **{ORIGINAL: 8192}, **more)


@pytest.mark.parametrize(
    ("config", "rope", "tokens", "settings"),
    [
        (plain(), "linear", 65536, {"factor": 8.0}),
        (plain(), "yarn", 81920, {"factor": 10.0, ORIGINAL: 8192}),
        (plain(), "yarn, original_max_position_embeddings=4K", 65536, {"factor": 16.0, ORIGINAL: 4096}),
        (plain(), "llama3", 65536, {"factor": 8.0, ORIGINAL: 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        (plain(), "yarn, factor=16", 65536, {"factor": 16.0, ORIGINAL: 8192}),
        # A length that is within the model's, prepared for a longer one
        (plain(), "yarn, factor=4", 4096, {"factor": 4.0, ORIGINAL: 8192}),
        # Llama 3.1 itself: factor 8 for 16 times the length
        (plain(), "llama3, factor=8", 131072, {"factor": 8.0}),
        # Scaled models: the factor grows with the length, and the other settings stay
        (scaled("linear", 4.0, 32768), "auto", 65536, {"factor": 8.0}),
        (PRESETS["llama3.2-1b"], "auto", 2**20, {"factor": 256.0, ORIGINAL: 8192, "high_freq_factor": 4.0}),
        (yarn(beta_fast=24), "yarn", 65536, {"factor": 8.0, ORIGINAL: 8192, "beta_fast": 24}),
        # yarn over the length from before it, as Qwen2.5 is published
        (scaled("yarn", 4.0, 32768, **{ORIGINAL: 32768}), "auto", 2**18, {"factor": 8.0, ORIGINAL: 32768}),
        # An attention factor of its own stays; one that follows from the factor follows the new one
        (yarn(attention_factor=1.5), "auto", 65536, {"attention_factor": 1.5}),
        (yarn(attention_factor=1.1386294361), "auto", 65536, {"factor": 8.0, "attention_factor": None}),
    ],
)
def test_factors(config: dict[str, Any], rope: str, tokens: int, settings: dict[str, Any]) -> None:
    changed, _ = extend_rope(config, rope, tokens)
    found = changed["rope_parameters"]
    assert {name: found.get(name) for name in settings} == settings
    positions = changed["max_position_embeddings"]
    if rope in ("yarn, factor=16", "yarn, factor=4"):
        assert positions == 8192 * settings["factor"]
    else:
        assert positions == tokens
    assert ORIGINAL not in changed
    assert "type" not in (changed["rope_scaling"] or {})


def test_auto() -> None:
    """Nothing within the length, theta up to a factor of 8, yarn beyond; a second extension goes on from the first."""
    within, line = extend_rope(plain(), "auto", 8192)
    assert within == plain()
    assert line == "Rope: unchanged, 8K tokens are within the model's 8K"
    first, line = extend_rope(plain(), "auto", 65536)
    assert line.startswith(
        "Rope: theta (auto: a factor of 8 is at most 8): rope_theta 855503.7589 = 100000 × 8^(64/62)"
    )
    assert line.endswith("factor 8 = 64K / 8K tokens; max_position_embeddings 8192 -> 65536")
    far, line = extend_rope(plain(), "auto", 65537)
    assert far["rope_scaling"]["rope_type"] == "yarn"
    assert "(auto: a factor of 8.00012 is more than 8)" in line
    second, _ = extend_rope(first, "auto", 8 * 65536)
    assert math.isclose(second["rope_theta"], 1e5 * 64 ** (64 / 62))
    further, line = extend_rope(far, "auto", 2**20)
    assert further["rope_scaling"] == {"rope_type": "yarn", "factor": 128.0, ORIGINAL: 8192}
    assert "yarn (auto: the model has it already): factor 128 = 1M / 8K tokens, attention factor 1.4852" in line


def test_a_length_beside_the_settings_does_not_win() -> None:
    """transformers takes original_max_position_embeddings from the top of config.json first."""
    config = scaled("yarn", 2.0, 16384) | {ORIGINAL: 8192}
    changed, _ = extend_rope(config, "yarn, original_max_position_embeddings=4K", 65536)
    assert read_spec(changed).rope.trained_positions == 4096
    assert changed["rope_scaling"]["factor"] == 16


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (plain(), 8192),
        (PRESETS["llama3.2-1b"], 131072),
        (scaled("yarn", 4.0, 32768, **{ORIGINAL: 32768}), 131072),
        (scaled("linear", 4.0, 32768), 32768),
    ],
)
def test_beyond(config: dict[str, Any], length: int) -> None:
    spec = read_spec(config)
    assert context_length(spec) == length
    assert beyond_context(spec, length, 8 * length) is None
    warning = beyond_context(spec, length + 1, length + 1) or ""
    assert warning.startswith(f"the context has {length + 1:,} tokens")
    assert f"made for {length:,} " in warning
    assert warning.endswith("--set model.rope=auto extends it")
    packed = beyond_context(spec, length + 1, 8 * length, "so it is extended") or ""
    assert packed.startswith(f"the longest document has {length + 1:,} tokens")
    assert packed.endswith("new to it: so it is extended")


L32 = PRESETS["llama3.2-1b"]
YARN4 = yarn()


@pytest.mark.parametrize(
    ("config", "rope", "tokens", "sentence"),
    [
        (plain(), "yarm", 65536, "model.rope 'yarm' does not exist: did you mean 'yarn'\\?"),
        (plain(), "", 65536, "model.rope '' does not exist: known are theta, linear, yarn, llama3, auto"),
        (plain(), "dynamic", 65536, "known are theta"),
        (plain(), "yarn factor=8", 65536, "'yarn factor=8' does not exist"),
        (plain(), "yarn, 8", 65536, "has '8' for a parameter: write 'yarn, factor=8'"),
        (plain(), "yarn,", 65536, "has '' for a parameter"),
        (plain(), "yarn, fctor=8", 65536, "gives 'fctor', which is not a parameter of 'yarn': did you mean 'factor'"),
        (plain(), "theta, theta=8e6", 65536, "did you mean 'rope_theta'"),
        (plain(), "linear, beta_fast=8", 65536, "not a parameter of 'linear': known are factor, rope_theta"),
        (plain(), "auto, factor=8", 65536, "'auto' has no parameters: write 'yarn, factor=8'"),
        (plain(), "yarn, factor=8, factor=9", 65536, "gives factor twice"),
        (plain(), "yarn, factor=much", 65536, "gives factor as 'much': a number is needed, as factor=8"),
        (plain(), "yarn, factor=nan", 65536, "gives factor as 'nan'"),
        (plain(), "yarn, factor=inf", 65536, "gives factor as 'inf'"),
        (plain(), "llama3, original_max_position_embeddings=-4", 65536, "as original_max_position_embeddings=8K"),
        (plain(), "linear, factor=4", 65536, r"reaches 32768 tokens \(8192 × 4\), .* has 65536: factor=8 works"),
        (plain(), "yarn, factor=7.99", 65536, "reaches 65454.08 tokens .* factor=8 works"),
        (plain(), "theta, factor=2", 65536, "reaches 16384 tokens"),
        (plain(), "llama3, factor=0.5", 65536, "factor=8 works"),
        (plain(), "theta, factor=0.5", 4096, "factor=1 works"),
        (plain(), "yarn, factor=1e300", 65536, "at most 2147483647 are possible: factor=8 works"),
        (plain(), "llama3, factor=1e308", 65536, "at most 2147483647 are possible"),
        (plain(), "yarn", 2**31, "max_position_embeddings as 2147483648"),
        (plain(), "theta, factor=8, rope_theta=1e6", 65536, "keep one of them"),
        (
            plain(),
            "theta, rope_theta=99999",
            65536,
            "rope_theta as 99999, and the model has 100000: .* needs a larger one",
        ),
        (plain(), "theta, rope_theta=1e5", 65536, "rope_theta as 100000, and the model has 100000"),
        (plain(), "theta, rope_theta=1e31", 65536, "cannot be used: it gives rope_theta as 1e\\+31: .* at most 1e"),
        (plain(size=2), "theta", 65536, "a head size of 4 or more, and the model's is 2: model.rope=linear works"),
        (plain(), "yarn, attention_factor=0", 65536, "cannot be used: it gives attention_factor as 0.0: a number"),
        (plain(), "yarn, beta_fast=1, beta_slow=2", 65536, "beta_fast as 1.0 and beta_slow as 2.0: the first must"),
        (plain(), "llama3, low_freq_factor=8", 65536, "8.0 and high_freq_factor as 4.0: the second must be larger"),
        *((plain(), rope, 8192, "nothing to extend: 8192 tokens are within the 8192") for rope in [*METHODS][:-1]),
        (L32, "yarn", 2**20, "'llama3' with factor 32: two scalings .*; model.rope=llama3, or auto, raises its factor"),
        (L32, "theta", 2**20, "does not fit a model that has rope type 'llama3'"),
        (L32, "linear", 2**20, "does not fit"),
        (YARN4, "llama3", 2**20, "'yarn' with factor 4: .* model.rope=yarn, or auto"),
        (YARN4, "theta, rope_theta=1e6", 2**20, "does not fit"),
        (scaled("linear", 4.0, 32768), "yarn", 2**20, "rope type 'linear' with factor 4: .* model.rope=linear"),
        (scaled("linear", 4.0, 32768), "linear, factor=5", 65536, r"\(32768 × 5 / 4\), .* factor=8 works"),
        (YARN4, "yarn, factor=3", 4096, "makes the factor 3, below the model's 4"),
        (L32, "llama3, factor=16", 2**20, "makes the factor 16, below the model's 32"),
    ],
)
def test_refused(config: dict[str, Any], rope: str, tokens: int, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as error:
        extend_rope(config, rope, tokens)
    assert str(error.value).startswith("model.rope ")
    assert "\n" not in str(error.value)


@settings(max_examples=300, deadline=None)
@given(
    text=st.one_of(
        st.text(max_size=40),
        st.builds(
            lambda method, parts: ", ".join([method, *parts]),
            st.sampled_from([*METHODS]),
            st.lists(
                st.builds(
                    "{}={}".format,
                    st.sampled_from(sorted({name for names in METHODS.values() for name in names})),
                    st.one_of(st.floats(), st.integers(-5, 10**9), st.text(max_size=5)),
                ),
                max_size=3,
            ),
        ),
    ),
    tokens=st.integers(2, 2**32),
    config=st.sampled_from([plain(), L32, YARN4, scaled("linear", 4.0, 32768)]),
)
def test_anything_is_refused_or_can_be_read(text: str, tokens: int, config: dict[str, Any]) -> None:
    try:
        changed, line = extend_rope(config, text, tokens)
    except IthacaError:
        return
    spec = read_spec(json.loads(json.dumps(changed)))
    assert context_length(spec) >= max(tokens, context_length(read_spec(config)))
    assert inverse_frequencies(spec.rope, spec.head_size).isfinite().all()
    assert line.startswith("Rope: ")
    parse_rope(text)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rope": "yarn"}, "rope='yarn' and tokens=None: give tokens, as tokens='64K', too"),
        ({"tokens": 4096}, "rope=None and tokens=4096: give rope, as rope='auto', too"),
        ({"rope": "yarn", "tokens": "12Q"}, "'12Q' is not a number of tokens"),
        ({"rope": "yarn", "tokens": -1}, "'-1' is not a number of tokens"),
        ({"rope": 8, "tokens": 131072}, "model.rope is 8: a word is needed, one of theta"),
        ({"rope": "yarm", "tokens": 131072}, "did you mean 'yarn'"),
    ],
)
def test_mistakes_of_a_call(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(IthacaError, match=sentence):
        ithaca.load_model("smollm2-135m", **given)
