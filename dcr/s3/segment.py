"""A name as one segment of an object's key."""

import hashlib
import re

_CHARS_MAX = 120
_CHARS_KEPT = 80


def segment_of(name: str) -> str:
    """The segment of a name: every byte outside ``[A-Za-z0-9_-]`` is written ``=XX`` (hexadecimal).

    One that is longer than 120 characters after that is cut to 80 and ends in ``=.`` and the SHA-256 of the whole, 146
    characters in all; so no two names share a segment.
    """
    raw = name.encode("utf-8", "surrogatepass")
    encoded = re.sub(rb"[^A-Za-z0-9_-]", lambda match: b"=%02X" % match[0][0], raw).decode("ascii")
    if len(encoded) > _CHARS_MAX:
        return f"{encoded[:_CHARS_KEPT]}=.{hashlib.sha256(raw).hexdigest()}"
    return encoded
