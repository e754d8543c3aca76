"""An operator's end of the control channel: asks the leader of a record, changes nothing."""

import os
import queue
import secrets
import time
from collections.abc import Iterator

from dcr.control_plane.interface import ControlPlane
from dcr.protocol.errors import DcrError
from dcr.protocol.messages import Verified, Verify, decode_order, encode_message
from dcr.runtime.channel import ChannelTimeoutError, Peer, Spoke
from dcr.runtime.channel_address import ChannelAddress
from dcr.runtime.registry import leader_address
from dcr.runtime.secret import record_secret

_ANSWERS_MAX = 100_000


class OperatorError(DcrError):
    """The leader could not be asked, or did not answer."""


def verify(
    control: ControlPlane, record_id: str, secret: bytes, *, channel: str, connect_s: float, answer_s: float
) -> Iterator[Verified]:
    """Have every admitted engine compared with the owners' baseline (DESIGN D2).

    Args:
        control: where the record and its leader's address are.
        record_id: the record.
        secret: the secret of the run.
        channel: the setting of this name, as trainer and nodes have it.
        connect_s: how long to look for the leader.
        answer_s: how long to wait for each answer.

    Returns:
        One answer an engine, as they come; the last has ``left == 0``, or ``error``.

    Raises:
        OperatorError: no leader could be reached, it was lost, or an answer took too long.
        RefusedError: the credentials that ``channel`` names are no good.
    """
    credentials = ChannelAddress.parse(channel).credentials()
    answers: queue.Queue[bytes | str] = queue.Queue(_ANSWERS_MAX)
    peer = Peer("operator", f"verify-{os.getpid()}-{secrets.token_hex(4)}", 0)
    spoke = Spoke(
        record_secret(secret, record_id),
        peer,
        lambda data: answers.put(data, timeout=connect_s),
        resolve=lambda: leader_address(control, record_id),
        credentials=credentials,
        on_disconnect=lambda reason: answers.put(reason, timeout=connect_s),
    )
    try:
        try:
            spoke.wait_connected(connect_s)
        except ChannelTimeoutError as e:
            raise OperatorError(
                f"no leader of record {record_id!r} could be reached in {connect_s} s: is its trainer running? ({e})"
            ) from e
        spoke.send(encode_message(Verify(record_id)))
        while True:
            answer = _next(answers, record_id, answer_s)
            yield answer
            if answer.error or not answer.left:
                return
    finally:
        spoke.close()


def _next(answers: queue.Queue[bytes | str], record_id: str, answer_s: float) -> Verified:
    started = time.monotonic()
    try:
        data = answers.get(timeout=answer_s)
    except queue.Empty:
        waited = time.monotonic() - started
        raise OperatorError(
            f"the leader of record {record_id!r} has not answered for {waited:.0f} s; its log may say why"
        ) from None
    if isinstance(data, str):
        raise OperatorError(f"the leader of record {record_id!r} was lost while it verified: {data}; ask again")
    answer = decode_order(data)
    if not isinstance(answer, Verified):
        raise OperatorError(f"the leader of record {record_id!r} answered with {type(answer).__name__}")
    return answer
