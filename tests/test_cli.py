"""The command line as a whole: what a mistake prints, and the code it ends with."""

import pytest

from ithaca import cli
from ithaca.base.errors import ConfigError, DataError, IthacaError, LostRankError, ModelError, PlanError, RunError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((kind("that cannot be"), 2) for kind in (IthacaError, ConfigError, DataError, ModelError, PlanError)),
        (RunError("that cannot be"), 1),
        (LostRankError("that cannot be", [1]), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_sentence_and_a_code(
    error: IthacaError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 for a user's mistake, 1 for a run that cannot continue: schedulers start only the latter again."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code
    assert capsys.readouterr().err == "error: that cannot be\n"
