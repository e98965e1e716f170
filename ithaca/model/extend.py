"""Context extension: the rope settings of a `config.json` changed for a longer context, as `model.rope` asks.

`factor` is the new length divided by the model's own, unless it is given. d is the head size.

- theta: rope_theta · factor^(d / (d - 2)), the NTK-aware rule (bloc97, 2023; Peng et al. 2023, YaRN, section 3.1). The
  slowest feature pair rotates as far over the new length as it did over the old one; the fastest is left alone.
- linear: position interpolation (Chen et al. 2023). Every frequency is divided by the factor.
- yarn: frequencies that do not complete a rotation within the trained length are divided by the factor, fast ones are
  kept, and attention is sharpened by 0.1 ln(factor) + 1 (Peng et al. 2023).
- llama3: as yarn with a ramp over wavelengths and no sharpening (Llama 3.1).
- auto: see `_choose`.

A model that is scaled already gets a larger factor of the same kind: two scalings on top of each other are refused.
No torch here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ithaca.base.errors import ConfigError, ModelError, shown, suggestion
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.model.config_json import LARGEST, real, table
from ithaca.model.families import read_spec
from ithaca.model.rope import yarn_attention_factor
from ithaca.model.spec import Spec

AUTO = "auto"
ORIGINAL = "original_max_position_embeddings"
# The methods, and the parameters that may follow a word: the names that config.json has for them
METHODS: dict[str, tuple[str, ...]] = {
    "theta": ("factor", "rope_theta"),
    "linear": ("factor", "rope_theta"),
    "yarn": ("factor", "rope_theta", ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "rope_theta", ORIGINAL, "low_freq_factor", "high_freq_factor"),
    AUTO: (),
}
# `auto` raises theta up to this factor. Published continued training did with a larger base alone: Llama 2 Long from
# 4K to 32K (Xiong et al. 2023), ProLong from 8K to 64K and, from there, to 512K (Gao et al. 2024)
THETA_FACTOR = 8


@dataclass(frozen=True)
class RopeOption:
    """A `model.rope` that was read, as 'yarn, factor=8'."""

    text: str
    method: str  # a key of METHODS
    given: Mapping[str, Any]  # parameters by name

    def refuse(self, why: str) -> ModelError:
        return ModelError(f"model.rope {shown(self.text)} {why}")


@dataclass(frozen=True)
class _Change:
    """New rope settings for config.json, and the arithmetic behind them."""

    settings: dict[str, Any]  # the content of rope_parameters
    positions: int  # the new max_position_embeddings
    arithmetic: str


def parse_rope(text: str) -> RopeOption:
    """Read a `model.rope`: a word, and parameters behind commas, as 'yarn, factor=8, beta_fast=16'."""
    if not isinstance(text, str):
        raise ModelError(f"model.rope is {shown(text)}: a word is needed, one of {', '.join(METHODS)}")
    method, *parts = (part.strip() for part in text.split(","))
    option = RopeOption(text, method, given := {})
    if method not in METHODS:
        raise ModelError(f"model.rope {shown(method)} does not exist: {suggestion(method[:80], METHODS)}")
    for part in parts:
        name, equals, value = (word.strip() for word in part.partition("="))
        if not METHODS[method]:
            raise option.refuse(f"gives {shown(part)}, but '{method}' has no parameters: write 'yarn, factor=8'")
        if not equals:
            raise option.refuse(f"has {shown(part)} for a parameter: write '{method}, factor=8'")
        if name not in METHODS[method]:
            hint = suggestion(name[:80], METHODS[method])
            raise option.refuse(f"gives {shown(name)}, which is not a parameter of '{method}': {hint}")
        if name in given:
            raise option.refuse(f"gives {name} twice: keep one")
        given[name] = _number(option, name, value)
    return option


def _number(option: RopeOption, name: str, text: str) -> float | int:
    try:
        if name == ORIGINAL:
            return parse_tokens(text)
        number = float(text)
    except (ValueError, ConfigError):
        number = math.nan
    if not math.isfinite(number):
        example = f"{ORIGINAL}=8K" if name == ORIGINAL else f"{name}=8"
        raise option.refuse(f"gives {name} as {shown(text)}: a number is needed, as {example}")
    return number


def context_length(spec: Spec) -> int:
    """The context length that a model's rope is made for.

    That is max_position_embeddings, or what yarn reaches if it is more: some models are published with yarn and the
    length from before it.
    """
    rope, positions = spec.rope, spec.max_position_embeddings
    return max(positions, int(rope.factor * rope.trained_positions)) if rope.kind == "yarn" else positions


def beyond_context(
    spec: Spec, longest: int, tokens: int, remedy: str = "--set model.rope=auto extends it"
) -> str | None:
    """A sentence if positions are beyond the model's context length; None if they are not.

    Positions count from the beginning of a document: `longest` is the longest one in a context of `tokens`.
    """
    if longest <= context_length(spec):
        return None
    what = "the context" if longest == tokens else "the longest document"
    return (
        f"{what} has {longest:,} tokens, but the model's rope is made for {context_length(spec):,} "
        f"(max_position_embeddings in config.json), and later positions are new to it: {remedy}"
    )


def extend_rope(config: Mapping[str, Any], text: str, tokens: int) -> tuple[Mapping[str, Any], str]:
    """A `config.json` with the rope that `text` asks for a context of `tokens`, and a line that says what changed."""
    option, spec = parse_rope(text), read_spec(config)
    length = context_length(spec)
    if option.method == AUTO and tokens <= length:
        return config, f"Rope: unchanged, {format_tokens(tokens)} tokens are within the model's {format_tokens(length)}"
    method, reason = _choose(spec, tokens) if option.method == AUTO else (option.method, "")
    _check(option, method, spec, tokens)
    change = _raise_theta(option, spec, tokens) if method == "theta" else _scale(option, method, config, spec, tokens)
    changed = _with_rope(config, change)
    try:
        rope = read_spec(changed).rope
    except ModelError as problem:  # a parameter out of its range
        sentence = str(problem).replace("config.json gives", "it gives")
        raise option.refuse(f"cannot be used: {sentence}") from None
    sharper = f", attention factor {rope.attention_factor:.6g}" if method == "yarn" else ""
    lengths = f"max_position_embeddings {spec.max_position_embeddings} -> {change.positions}"
    return changed, f"Rope: {method}{reason}: {change.arithmetic}{sharper}; {lengths}"


def _choose(spec: Spec, tokens: int) -> tuple[str, str]:
    """The method of `auto` for a context beyond the model's, and the reason in brackets.

    A scaled model keeps its kind. Up to THETA_FACTOR others get theta, which leaves a plain config.json and changes
        short contexts little, but makes angles that the model has not seen and must learn. Beyond it they get yarn,
        which makes hardly any new angles.
    """
    if spec.rope.kind != "default":
        return spec.rope.kind, " (auto: the model has it already)"
    factor = tokens / context_length(spec)
    if factor <= THETA_FACTOR:
        return "theta", f" (auto: a factor of {factor:.6g} is at most {THETA_FACTOR})"
    return "yarn", f" (auto: a factor of {factor:.6g} is more than {THETA_FACTOR})"


def _check(option: RopeOption, method: str, spec: Spec, tokens: int) -> None:
    """Raise an error if the option cannot extend this model."""
    rope, given, length = spec.rope, option.given, context_length(spec)
    if rope.kind not in ("default", method):
        raise option.refuse(
            f"does not fit a model that has rope type '{rope.kind}' with factor {rope.factor:g}: two scalings would be "
            f"on top of each other; model.rope={rope.kind}, or auto, raises its factor"
        )
    theta = given.get("rope_theta")
    if theta is not None and (theta < rope.theta or (method == "theta" and theta == rope.theta)):
        raise option.refuse(
            f"gives rope_theta as {theta:g}, and the model has {rope.theta:g}: a longer context needs a larger one"
        )
    if tokens <= length and not given.keys() & {"factor", "rope_theta"}:
        raise option.refuse(
            f"has nothing to extend: {tokens} tokens are within the {length} that the model is made for; leave "
            f"model.rope out, or give the factor, as '{method}, factor=4'"
        )


def _raise_theta(option: RopeOption, spec: Spec, tokens: int) -> _Change:
    given, theta, size, length = option.given, spec.rope.theta, spec.head_size, context_length(spec)
    if "rope_theta" in given:
        if "factor" in given:
            raise option.refuse("gives factor and rope_theta, which follows from the factor: keep one of them")
        settings = {"rope_type": "default", "rope_theta": given["rope_theta"]}
        return _Change(settings, max(tokens, length), f"rope_theta {theta:.10g} -> {given['rope_theta']:.10g}")
    if size == 2:
        raise option.refuse("needs a head size of 4 or more, and the model's is 2: model.rope=linear works")
    factor, positions, how = _factor(option, length, tokens)
    raised = theta * factor ** (size / (size - 2))
    power = f"{theta:.10g} × {factor:.6g}^({size}/{size - 2})"
    settings = {"rope_type": "default", "rope_theta": raised}
    return _Change(settings, max(positions, length), f"rope_theta {raised:.10g} = {power}, factor {factor:.6g}{how}")


def _scale(option: RopeOption, method: str, config: Mapping[str, Any], spec: Spec, tokens: int) -> _Change:
    """The change to a factor of linear, yarn or llama3; a model of the same kind keeps its other settings."""
    rope, given, raises = spec.rope, option.given, spec.rope.kind == method
    length = context_length(spec)
    trained = given.get(ORIGINAL, rope.trained_positions or length)
    # Under linear and llama3 only the length that the old factor was for is known; that is not the trained one times
    # the factor (Llama 3.1 has factor 8 for 16 times the length)
    grown = raises and method != "yarn"
    start, old = (length, rope.factor) if grown else (trained if method != "linear" else length, 1.0)
    factor, positions, how = _factor(option, start, tokens, old, reaches=method != "llama3")
    if factor < rope.factor:
        raise option.refuse(f"makes the factor {factor:g}, below the model's {rope.factor:g}: a larger one is needed")
    settings = _given_settings(config) if raises else {}
    settings |= {"rope_type": method, "rope_theta": given.get("rope_theta", rope.theta), "factor": factor}
    if method != "linear":
        settings[ORIGINAL] = trained
    if method == "llama3":
        settings |= {name: given.get(name, getattr(rope, name)) for name in ("low_freq_factor", "high_freq_factor")}
    if method == "yarn":
        _sharpen(settings, given, rope.factor)
    return _Change(settings, max(positions, length), f"factor {factor:.6g}{how}")


def _factor(
    option: RopeOption, length: int, tokens: int, old: float = 1.0, reaches: bool = True
) -> tuple[float, int, str]:
    """The factor, the length that it reaches, and its origin in words. `old` is the factor that `length` has now.

    `reaches`: the factor alone says how far the model reaches, so a factor that is too small is an error.
    """
    before = f"{old:g} × " if old != 1 else ""
    needed = old * tokens / length
    if "factor" not in option.given:
        return needed, tokens, f" = {before}{format_tokens(tokens)} / {format_tokens(length)} tokens"
    factor, least = option.given["factor"], math.ceil(max(needed, 1) * 1000) / 1000
    reached = length * factor / old
    words = f"reaches {reached:.10g} tokens ({length} × {factor:g}{f' / {old:g}' if old != 1 else ''})"
    if factor < 1 or (reaches and round(reached) < tokens):
        raise option.refuse(f"{words}, but the context has {tokens}: factor={least:.10g} works")
    if reached > LARGEST:
        raise option.refuse(f"{words}, but at most {LARGEST} are possible: factor={least:.10g} works")
    return factor, max(round(reached), tokens), " (given)"


def _given_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings that a config.json has, without the old name of rope_type."""
    found = table(config, "rope_scaling") or table(config, "rope_parameters")
    return {name: value for name, value in found.items() if name != "type"}


def _sharpen(settings: dict[str, Any], given: Mapping[str, Any], old_factor: float) -> None:
    """Set the parameters that only yarn has. An attention factor that followed from the old factor is computed anew."""
    names = ("attention_factor", "mscale", "mscale_all_dim")
    followed = yarn_attention_factor({name: settings.get(name) for name in names[1:]}, old_factor)
    if settings.get(names[0]) is not None and math.isclose(real(settings, names[0]), followed, rel_tol=1e-4):
        del settings[names[0]]
    settings |= {name: given[name] for name in ("beta_fast", "beta_slow", "attention_factor") if name in given}


def _with_rope(config: Mapping[str, Any], change: _Change) -> dict[str, Any]:
    """The config.json with new rope settings, in both spellings.

    `transformers` 5 writes rope_parameters. Version 4, and software made for it, only knows rope_theta and
    rope_scaling.
    """
    changed = {name: value for name, value in config.items() if name != ORIGINAL}  # it would win over the one inside
    scaling = {name: value for name, value in change.settings.items() if name != "rope_theta"}
    return changed | {
        "max_position_embeddings": change.positions,
        "rope_theta": change.settings["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": dict(change.settings),
    }
