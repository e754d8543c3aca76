"""A time on the command line."""

import argparse

_WEEK_S = 7 * 86_400.0


def seconds(text: str) -> float:
    """For ``type=``: seconds, more than none and at most a week, which every clock takes."""
    value = float(text)
    if not 0 < value <= _WEEK_S:  # nor is NaN
        raise argparse.ArgumentTypeError("more than 0, and at most a week")
    return value
