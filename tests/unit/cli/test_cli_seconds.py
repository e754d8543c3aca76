"""Times on the command line: what no clock can wait for is refused before anything is asked."""

import pytest

from dcr.cli.main import main


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "--control", "sqlite:///nowhere/record.db", "--timeout-s"],
        ["verify", "--control", "sqlite:///nowhere/record.db", "--connect-s"],
        ["transition", "show", "--control", "sqlite:///nowhere/record.db", "--timeout-s"],
        ["chaos", "soak", "--seconds"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("value", ["nan", "inf", "-5", "0", "1e9", "soon"])
def test_it_is_refused(command, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, value])
    assert ended.value.code == 2
    assert command[-1] in capsys.readouterr().err
