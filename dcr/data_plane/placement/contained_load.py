"""A native loader that ends no process: it is a user's code, and what it raises fails only what it was called for."""

from collections.abc import Iterable

import torch

from dcr.data_plane.placement.prewarm import Load


class LoaderExitError(Exception):
    """The loader would have ended the process or the thread that it was called in, as by ``sys.exit``."""


def contained(load: Load) -> Load:
    """The same loader; what it raises is an ``Exception``, but for the interrupt of whoever runs the process.

    Args:
        load: a model's native loader.
    """

    def call(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str] | None:
        try:
            return load(weights)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as e:
            raise LoaderExitError(f"{type(e).__name__}: {e}") from e

    return call
