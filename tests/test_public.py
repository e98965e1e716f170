"""What users can import, and what it costs to do so."""

import subprocess
import sys
import time

import pytest

import ithaca


def test_all_names_exist_and_are_documented() -> None:
    for name in ithaca.__all__:
        assert getattr(ithaca, name).__doc__, name
    assert set(ithaca.__all__) == set(ithaca._HOMES)
    assert set(ithaca.__all__) <= set(dir(ithaca))


def test_importing_and_asking_for_help_loads_no_torch() -> None:
    for run in ("import ithaca", "from ithaca.cli import app; app(['train', '--help'], standalone_mode=False)"):
        program = f"import sys\n{run}\nassert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_plan_from_python() -> None:
    source = ithaca.load_model("llama3-8b")
    plan = ithaca.plan(source.spec, "8xH100-80GB", tokens="5M", host="1.9TB")
    assert (plan.recipe, plan.placement(32).o.count("recompute")) == ("sweep", 0)
    with pytest.raises(ithaca.PlanError, match=r"40M tokens of llama .* do not fit"):
        ithaca.plan(source.spec, "8xH100-80GB", tokens="40M")


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ithaca", "--help"], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(5)) < 0.4
