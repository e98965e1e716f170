"""The public names of `ithaca`."""

import pytest

import ithaca


def test_all_names_exist_and_are_documented() -> None:
    for name in ithaca.__all__:
        assert getattr(ithaca, name).__doc__, name
    assert set(ithaca.__all__) == set(ithaca._HOMES)
    assert set(ithaca.__all__) <= set(dir(ithaca))


def test_a_plan_from_python() -> None:
    source = ithaca.load_model("llama3-8b")
    plan = ithaca.plan(source.spec, "8xH100-80GB", tokens="5M", host="1.9TB")
    assert (plan.recipe, plan.placement(32).o.count("recompute")) == ("sweep", 0)
    with pytest.raises(ithaca.PlanError, match=r"40M tokens of llama .* do not fit"):
        ithaca.plan(source.spec, "8xH100-80GB", tokens="40M")
