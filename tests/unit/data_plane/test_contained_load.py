"""What a loader raises ends no process, and stays the interrupt of whoever runs it."""

import pytest

from dcr.data_plane.placement.contained_load import LoaderExitError, contained


def raising(error):
    def load(weights):
        assert list(weights) == [1]
        raise error

    return contained(load)


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("late"), BaseException("whatever")])
def test_what_would_end_a_process_is_an_error_by_its_name(error):
    with pytest.raises(LoaderExitError, match=f"^{type(error).__name__}: {error}$") as raised:
        raising(error)([1])
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_other_errors_and_an_interrupt_pass_as_they_are(error):
    with pytest.raises(type(error)) as raised:
        raising(error)([1])
    assert raised.value is error


def test_what_it_returns_passes():
    assert contained(lambda weights: {str(w) for w in weights})([1, 2]) == {"1", "2"}
