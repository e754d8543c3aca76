"""Times that a user's program gives, as those of the settings are checked in the settings."""

from math import isnan
from numbers import Real
from typing import cast

from dcr.protocol.errors import RefusedError
from dcr.runtime.settings import LARGEST


def seconds(value: object, what: str) -> float:
    """How long to wait: a number; of what is longer than any clock takes (infinity) as much as it does.

    Args:
        value: as it was given; less than 0 is a time that is over.
        what: names it in the error.

    Raises:
        RefusedError: it is no number, or NaN, for which a wait would never end nor rest.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        bounded = float(min(max(cast("float", value), 0), LARGEST))  # NaN stays, as the first of both
        if not isnan(bounded):
            return bounded
    raise RefusedError(f"{what}: {value!r} is no time to wait; give a number of seconds")
