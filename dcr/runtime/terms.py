"""What a trainer and a coordinator that runs elsewhere must have in common (DESIGN D16).

Each process is given its own settings and its own copy of the run's secret.  A leader whose ones are others than the
trainer's would lead all the same: it would keep other bounds than the trainer was given, or let nobody in.  So the
trainer says what it has, beside its roster, and whoever could lead compares.  That finds mistakes; who means harm is
kept out by the control channel (docs/security.md).
"""

import hmac
import secrets

import msgspec

from dcr.runtime.secret import record_secret
from dcr.runtime.settings import Settings

LEADERS = (
    "operation",
    "gate_mode",
    "members_min",
    "attempts_max",
    "restores_max",
    "stopped_push",
    "retain_epochs",
    "retain_versions",
    "attempt_pause_timeout_s",
    "prepare_timeout_s",
    "ack_timeout_s",
    "fold_timeout_s",
    "restore_timeout_s",
    "restore_pause_timeout_s",
    "members_timeout_s",
    "rejoin_timeout_s",
    "ranks_timeout_s",
    "owners_timeout_s",
    "verify_timeout_s",
)
"""Settings that the leader keeps for the whole run.  All others are each process's own."""


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one trainer has; nothing in it is secret."""

    settings: dict[str, str | int | float]
    """Those of ``LEADERS``."""
    nonce: str
    proof: str
    """That it holds the secret of the run: HMAC-SHA256 over the nonce, as hex."""


def terms(settings: Settings, secret: bytes, record_id: str) -> Terms:
    """What a trainer that starts has.

    Args:
        settings: the trainer's.
        secret: of the run.
        record_id: the record.
    """
    nonce = secrets.token_hex(16)
    return Terms(_kept(settings), nonce, _prove(secret, record_id, nonce))


def another_secret(asked: Terms, secret: bytes, record_id: str) -> str:
    """Why a coordinator's secret is not that of the trainer that asks; empty if it is."""
    if hmac.compare_digest(asked.proof.encode(), _prove(secret, record_id, asked.nonce).encode()):
        return ""
    return (
        "the trainer's secret of the run is not this coordinator's: bring the same file to both (the control plane's "
        "address says where it is), and start whichever had the wrong one again"
    )


def differences(asked: Terms, settings: Settings) -> str:
    """How a coordinator's settings differ from those of the trainer that asks; empty if they do not."""
    theirs, mine = asked.settings, _kept(settings)
    differ = [
        f"{name} is {_shown(theirs, name)} in the trainer's settings and {_shown(mine, name)} in this coordinator's"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    if not differ:
        return ""
    return f"{', '.join(differ)}: give this coordinator the trainer's settings, or start the trainer again with these"


def _kept(settings: Settings) -> dict[str, str | int | float]:
    return {name: getattr(settings, name) for name in LEADERS}


def _shown(settings: dict[str, str | int | float], name: str) -> str:
    return str(settings.get(name, "not there (another version of dcr)"))


def _prove(secret: bytes, record_id: str, nonce: str) -> str:
    return hmac.digest(record_secret(secret, record_id), b"dcr roster " + nonce.encode(), "sha256").hex()
