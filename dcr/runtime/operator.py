"""An operator's end of the control channel: asks the leader of a record, or gives it an order."""

import math
import os
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.protocol.errors import DcrError
from dcr.protocol.messages import (
    Intervene,
    Intervened,
    Intervention,
    Order,
    Report,
    Verified,
    Verify,
    decode_order,
    encode_message,
)
from dcr.protocol.record import decode_record
from dcr.runtime.channel import ChannelTimeoutError, Peer, Spoke
from dcr.runtime.channel_address import ChannelAddress
from dcr.runtime.kept_order import kept_order
from dcr.runtime.leader_wait import why_unled
from dcr.runtime.registry import leader_address
from dcr.runtime.roster import roster
from dcr.runtime.secret import record_secret

NOT_ADMITTED = "not admitted"
"""So begins the reason of an engine that was not compared because it is connected and serves nothing (``verify``)."""
_ANSWERS_MAX = 100_000


_AGAIN_S = 0.2


class OperatorError(DcrError):
    """The leader could not be asked, or did not answer."""


class NoRecordError(OperatorError):
    """There is no such record, and nobody is about to make it: there is nothing to ask about."""


def verify(
    control: ControlPlane,
    record_id: str,
    secret: bytes,
    *,
    channel: str,
    connect_s: float,
    answer_s: float,
    asked: Callable[[], None] = lambda: None,
) -> Iterator[Verified]:
    """Have every admitted engine compared with the owners' baseline (DESIGN D2).

    Args:
        control: where the record and its leader's address are.
        record_id: the record.
        secret: the secret of the run.
        channel: the setting of this name, as trainer and nodes have it.
        connect_s: how long to look for the leader.
        answer_s: how long to wait for each answer.
        asked: called when the leader was found and asked.

    Returns:
        One answer an engine, as they come; the last has ``left == 0``, or ``error``.  Engines that are connected and
        not admitted come first, with a reason that begins with ``NOT_ADMITTED``.

    Raises:
        OperatorError: no leader could be reached, it was lost, or an answer took too long.
        RefusedError: the credentials that ``channel`` names are no good.
    """
    with _asking(control, record_id, secret, Verify(record_id), channel=channel, connect_s=connect_s) as leader:
        asked()
        while True:
            answer = leader.answer(answer_s)
            if not isinstance(answer, Verified):
                raise leader.nonsense(answer)
            yield answer
            if answer.error or not answer.left:
                return


def intervene(
    control: ControlPlane,
    record_id: str,
    secret: bytes,
    what: Intervention,
    *,
    channel: str,
    connect_s: float,
    answer_s: float,
) -> Intervened:
    """Give the leader an order about the open transition (DESIGN D14, D17); arguments and errors as ``verify``.

    A leader that is lost before it answers, or refuses for the moment, is asked again, or its successor, for as
    long as ``answer_s`` lasts.  Whatever the first one came to, the order is obeyed once (``kept_order``).

    Returns:
        What it answered; ``refused`` says why it does not obey.

    Raises:
        NoRecordError: there is no such record, and nobody leads it.
        OperatorError: as above, and at once where nobody leads and no trainer asks for a coordinator; where a leader
            was asked, it says whether the order is kept, and obeyed all the same.
        RefusedError: as above.
    """
    _find_anybody(control, record_id)
    order = Intervene(record_id, what, secrets.token_hex(8))
    until = math.inf
    lost = ""
    while True:
        left = min(max(until - time.monotonic(), _AGAIN_S), answer_s)
        find_s = connect_s if until == math.inf else left
        try:
            with _asking(control, record_id, secret, order, channel=channel, connect_s=find_s) as leader:
                until = min(until, time.monotonic() + answer_s)
                answer = leader.answer(left)
        except OperatorError as e:
            lost = lost or str(e)
            if until == math.inf:
                raise
            if time.monotonic() >= until:
                raise OperatorError(f"{lost}; {_became_of(control, order)}") from e
        else:
            if not isinstance(answer, Intervened):
                raise leader.nonsense(answer)
            if not answer.again:
                return answer
            if time.monotonic() >= until:
                if _kept(control, order) is not False:
                    raise OperatorError(f"{answer.refused}; {_became_of(control, order)}")
                return answer
        time.sleep(_AGAIN_S)


def _find_anybody(control: ControlPlane, record_id: str) -> None:
    """Refuse at once what only a leader that does not exist could answer.

    The address of a leader stays in the registry when it is closed; that nobody leads, the lease says.  While a trainer
    asks for a coordinator one may take over at any moment, and is waited for; a trainer that brings its own asks for
    none, and whether it ever comes back nothing tells.
    """
    if control.leader(record_id) is not None:
        return
    stored = control.read(record_id)
    if stored is None:
        raise NoRecordError(f"there is no record {record_id!r} at this address")
    if control.leases and roster(control, record_id) is None:
        last = decode_record(stored.body).leader
        raise OperatorError(
            f"nobody leads record {record_id!r}: {last}, the last leader that wrote it, holds no lease any more, and "
            f"no trainer asks for a coordinator; start the trainer again, with this control plane, and ask again once "
            f"it leads (`dcr record show` says who does)"
        )


def _became_of(control: ControlPlane, order: Intervene) -> str:
    """What an order has come to that no leader has answered."""
    match _kept(control, order):
        case _ if order.what is Intervention.SHOW:
            return "ask again"
        case None:
            return (
                f"whether {order.what} is ordered all the same is not known, for the control plane is away: ask again"
            )
        case False:
            return "nothing is ordered until now: ask again"
        case True:
            return f"{order.what} is ordered all the same: it was taken before that, and whoever leads obeys it"


def _kept(control: ControlPlane, order: Intervene) -> bool | None:
    """Whether the order is kept; None if that cannot be told now."""
    try:
        kept = kept_order(control, order.record_id)
    except ControlPlaneUnavailableError:
        return None
    return kept is not None and kept.order_id == order.order_id


@dataclass(frozen=True)
class _Leader:
    """The leader at the other end, and what it says; a text is why it was lost."""

    record_id: str
    said: queue.Queue[bytes | str]

    def answer(self, answer_s: float) -> Order:
        """The next answer."""
        started = time.monotonic()
        try:
            data = self.said.get(timeout=answer_s)
        except queue.Empty:
            waited = time.monotonic() - started
            raise OperatorError(
                f"the leader of record {self.record_id!r} has not answered for {waited:.0f} s; its log may say why"
            ) from None
        if isinstance(data, str):
            raise OperatorError(f"the leader of record {self.record_id!r} was lost before it answered: {data}")
        return decode_order(data)

    def nonsense(self, answer: Order) -> OperatorError:
        """The error of an answer to another question."""
        return OperatorError(f"the leader of record {self.record_id!r} answered with {type(answer).__name__}")


@contextmanager
def _asking(
    control: ControlPlane, record_id: str, secret: bytes, question: Report, *, channel: str, connect_s: float
) -> Iterator[_Leader]:
    """A connection to the leader, over which it was asked something."""
    credentials = ChannelAddress.parse(channel).credentials()
    if control.leader(record_id) is None and (last := roster(control, record_id)) is not None and last.closed:
        raise OperatorError(f"no leader of record {record_id!r}: {why_unled(control, record_id)}")
    leader = _Leader(record_id, queue.Queue(_ANSWERS_MAX))
    asker = Peer("operator", f"{type(question).__name__.lower()}-{os.getpid()}-{secrets.token_hex(4)}", 0)
    spoke = Spoke(
        record_secret(secret, record_id),
        asker,
        lambda data: leader.said.put(data, timeout=connect_s),
        resolve=lambda: leader_address(control, record_id),
        credentials=credentials,
        on_disconnect=lambda reason: leader.said.put(reason, timeout=connect_s),
    )
    try:
        try:
            spoke.wait_connected(connect_s)
        except ChannelTimeoutError as e:
            raise OperatorError(
                f"no leader of record {record_id!r} could be reached in {connect_s:g} s: is its trainer running, or "
                f"a dcr coordinator? `dcr record show` needs neither ({e}; {why_unled(control, record_id)})"
            ) from e
        spoke.send(encode_message(question))
        yield leader
    finally:
        spoke.close()
