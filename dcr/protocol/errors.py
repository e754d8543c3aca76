"""The errors of dcr.  Each message names what, where, and what to do about it."""


class DcrError(Exception):
    """Base of every error that dcr raises on purpose."""


class RefusedError(DcrError):
    """An input, an order or a layout was refused; nothing was changed by it."""


class CorruptPayloadError(RefusedError):
    """Payload bytes that are not what their sender sealed, or not what the format allows."""
