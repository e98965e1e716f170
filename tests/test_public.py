"""The public names of `ithaca`."""

import pytest

import ithaca


def test_all_names_exist_and_are_documented() -> None:
    for name in ithaca.__all__:
        assert getattr(ithaca, name).__doc__, name
    assert set(ithaca.__all__) == set(ithaca._MODULES)
    assert set(ithaca.__all__) <= set(dir(ithaca))


def test_a_plan_from_python() -> None:
    source = ithaca.load_model("llama3-8b")
    plan = ithaca.plan(source.spec, "8xH100-80GB", tokens="5M", host="1.9TB")
    assert (plan.recipe, plan.placement(32).o.count("recompute")) == ("sweep", 0)
    with pytest.raises(ithaca.PlanError, match=r"40M tokens of llama .* do not fit"):
        ithaca.plan(source.spec, "8xH100-80GB", tokens="40M")


def test_old_names_still_work() -> None:
    """Each with a notice that points at the caller's line."""
    plan = ithaca.Plan(recipe="sweep", chunk=16, optimizer="host")
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), plan)
    with pytest.warns(UserWarning, match=r"check_room is now model\.check_memory") as room:
        model.check_room(1, 32)
    with pytest.warns(UserWarning, match=r"reserve is now model\.allocate") as reserved:
        model.reserve(1, 32)
    assert model.describe_tapes()
    with pytest.warns(UserWarning, match="spoken_for.* is now reserved_bytes") as spoken:
        ithaca.make_optimizer(model, learning_rate=0.1, spoken_for=2**10)
    assert {told[0].filename for told in (room, reserved, spoken)} == {__file__}
    with pytest.warns(match="spoken_for"), pytest.raises(ithaca.PlanError, match=r"beside .* of tapes"):
        ithaca.make_optimizer(model, learning_rate=0.1, spoken_for=2**60)
    with pytest.warns(match="spoken_for"), pytest.raises(ithaca.InputError, match="reserved_bytes=1 and spoken_for=2"):
        ithaca.make_optimizer(model, learning_rate=0.1, reserved_bytes=1, spoken_for=2)
