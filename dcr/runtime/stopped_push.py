"""What a trainer's log says of a push that waits because its transition has stopped (DESIGN D14)."""

from collections.abc import Callable

from dcr.control_plane.interface import ControlPlane
from dcr.protocol.errors import DcrError
from dcr.protocol.messages import Intervened, Intervention
from dcr.protocol.record import OpenTransition, decode_record
from dcr.runtime.fleet_status import WAITS_FOR_OPERATOR
from dcr.runtime.operator import intervene
from dcr.runtime.progress_log import Stuck
from dcr.runtime.settings import Settings

_ASK_S = 2.0
"""For the leader's answer: it is asked from the thread that tells the log."""


class StoppedPush:
    """Asked while a push waits, where the setting ``stopped_push`` lets it wait for the operator.

    Args:
        owner: whose push it is.
        record_id: the record.
        control: where K is read, and the leader found.
        secret: the secret of the run.
        settings: the trainer's.
    """

    def __init__(self, owner: str, record_id: str, control: ControlPlane, secret: bytes, settings: Settings) -> None:
        self._owner = owner
        self._record_id = record_id
        self._control = control
        self._secret = secret
        self._settings = settings

    def look(self) -> Stuck | None:
        """What is to be told; None unless K says that the transition has stopped."""
        if self._settings.stopped_push != "wait":
            return None
        try:
            stored = self._control.read(self._record_id)
            tr = None if stored is None else decode_record(stored.body).open
        except DcrError:  # whoever needs K to go on tells of it
            return None
        return Stuck(self._text(tr)) if tr is not None and tr.stopped else None

    def _text(self, tr: OpenTransition) -> Callable[[], str]:
        attempts = "1 attempt" if tr.attempts == 1 else f"{tr.attempts} attempts"
        return lambda: (
            f"{self._owner}, its push waits, at most {self._settings.push_timeout_s:g} s in all: the transition to "
            f"version {tr.target} of record {self._record_id!r} has stopped after {attempts}, {self._why()}; an "
            f"operator ends the wait: dcr transition show|resume|dense|abandon|roll-back --control ... --record-id "
            f"{self._record_id}"
        )

    def _why(self) -> str:
        """Why attempts failed, which the leader knows."""
        try:
            answer = self._shown()
        except DcrError as e:
            return f"why is not known here: {e}"
        if answer.waits_for != WAITS_FOR_OPERATOR:
            return f"and its leader says: {answer.waits_for or answer.refused or answer.phase}"
        return f"for: {'; '.join(answer.failures)}" if answer.failures else "why is in the log of its last coordinator"

    def _shown(self) -> Intervened:
        return intervene(
            self._control,
            self._record_id,
            self._secret,
            Intervention.SHOW,
            channel=self._settings.channel,
            connect_s=_ASK_S,
            answer_s=_ASK_S,
        )
