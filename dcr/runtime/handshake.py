"""How two peers of the control channel prove to each other that they hold the secret of the run.

The bytes are specified in docs/control-channel.md.
"""

import hmac
import os
import time
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.runtime.frame import HANDSHAKE, ChannelError, Stream, frame, receive_frame, time_left

CHANNEL_VERSION = 1
HANDSHAKE_BYTES_MAX = 2048
"""Longest body that is read from a peer which has not proved the secret, bytes."""
NONCE_BYTES = 32
SECRET_BYTES_MIN = 16
NAME_CHARS_MAX = 200

_T = TypeVar("_T")


@dataclass(frozen=True)
class Peer:
    """One process on the channel: what it is, its name, and the number of its start."""

    role: str
    name: str
    incarnation: int

    def __post_init__(self) -> None:
        for what, text in (("role", self.role), ("name", self.name)):
            if not 0 < len(text) <= NAME_CHARS_MAX or not text.isprintable():
                raise RefusedError(
                    f"a peer's {what} must be 1 to {NAME_CHARS_MAX} printable characters, not {text[:NAME_CHARS_MAX]!r}"
                )
        if not 0 <= self.incarnation < 2**63:
            raise RefusedError(f"{self.role} {self.name}: incarnation {self.incarnation} is outside 0 to 2**63 - 1")

    def __str__(self) -> str:
        return f"{self.role} {self.name} (incarnation {self.incarnation})"


class _Hello(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    role: str
    name: str
    incarnation: int
    nonce: bytes


class _Challenge(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    nonce: bytes
    proof: bytes


class _Proof(msgspec.Struct, forbid_unknown_fields=True):
    proof: bytes


class _Verdict(msgspec.Struct, forbid_unknown_fields=True):
    refused: str
    """Empty: welcome."""


def check_secret(secret: bytes) -> None:
    """Raise RefusedError for a secret that is too short to be one."""
    if len(secret) < SECRET_BYTES_MIN:
        raise RefusedError(f"the secret of a run has at least {SECRET_BYTES_MIN} bytes; use load_or_create_secret")


def prove_to_hub(sock: Stream, secret: bytes, peer: Peer, deadline: float, binding: bytes = b"") -> None:
    """The spoke's half of the handshake.

    Args:
        sock: connected.
        secret: of the record.
        peer: who this process is.
        deadline: of the whole, on the monotonic clock.
        binding: what both ends of the TLS session have in common; empty without TLS.

    Raises:
        ChannelError: a side did not prove the secret, or the hub did not say welcome.
        TimeoutError: the deadline has passed.
        OSError: the connection was lost.
    """
    hello = _Hello(CHANNEL_VERSION, peer.role, peer.name, peer.incarnation, os.urandom(NONCE_BYTES))
    _send_handshake(sock, hello, deadline)
    challenge = _receive_handshake(sock, _Challenge, deadline)
    if challenge.version != CHANNEL_VERSION:
        raise ChannelError(f"the hub speaks version {challenge.version}, not {CHANNEL_VERSION}; run one dcr everywhere")
    if not hmac.compare_digest(challenge.proof, _prove(secret, b"hub", hello, challenge.nonce, binding)):
        raise ChannelError("the hub does not hold the secret of this run")
    _send_handshake(sock, _Proof(_prove(secret, b"spoke", hello, challenge.nonce, binding)), deadline)
    verdict = _receive_handshake(sock, _Verdict, deadline)
    if verdict.refused:
        raise ChannelError(f"the hub refused this peer: {verdict.refused}")


def prove_to_spoke(sock: Stream, secret: bytes, deadline: float, binding: bytes = b"") -> Peer:
    """The hub's half of the handshake, up to its verdict; arguments and errors are those of ``prove_to_hub``."""
    hello = _receive_handshake(sock, _Hello, deadline)
    if len(hello.nonce) != NONCE_BYTES:
        raise ChannelError(f"a nonce of {len(hello.nonce)} bytes instead of {NONCE_BYTES}")
    nonce = os.urandom(NONCE_BYTES)
    proof = _prove(secret, b"hub", hello, nonce, binding)
    _send_handshake(sock, _Challenge(CHANNEL_VERSION, nonce, proof), deadline)
    if hello.version != CHANNEL_VERSION:
        raise ChannelError(f"the spoke speaks version {hello.version}, not {CHANNEL_VERSION}; run one dcr everywhere")
    try:
        answer = _receive_handshake(sock, _Proof, deadline)
    except (ChannelError, ConnectionError) as error:
        said = f"{hello.role} {hello.name}"[:NAME_CHARS_MAX]
        raise ChannelError(f"{said!r} left at the proof of the secret: has it another one? ({error})") from error
    if not hmac.compare_digest(answer.proof, _prove(secret, b"spoke", hello, nonce, binding)):
        raise ChannelError(f"{hello.role} {hello.name} does not hold the secret of this run")
    try:
        return Peer(hello.role, hello.name, hello.incarnation)
    except RefusedError as error:
        raise ChannelError(str(error)) from error


def send_verdict(sock: Stream, refused: str, timeout_s: float) -> None:
    """The hub's last word in the handshake: welcome, or why not."""
    _send_handshake(sock, _Verdict(refused[:NAME_CHARS_MAX]), time.monotonic() + timeout_s)


def _prove(secret: bytes, side: bytes, hello: _Hello, hub_nonce: bytes, binding: bytes) -> bytes:
    """The proof of one side: over everything both said, and over which side it is, so that it cannot be sent back.

    Over a TLS session also over that session, so that it cannot be passed on through another one.
    """
    bound = (binding,) if binding else ()
    said = (side, hello.version, hello.role, hello.name, hello.incarnation, hello.nonce, hub_nonce, *bound)
    return hmac.digest(secret, b"dcr control channel" + msgspec.msgpack.encode(said), "sha256")


def _send_handshake(sock: Stream, message: msgspec.Struct, deadline: float) -> None:
    sock.settimeout(time_left(deadline))
    sock.sendall(frame(HANDSHAKE, msgspec.msgpack.encode(message)))


def _receive_handshake(sock: Stream, message: type[_T], deadline: float) -> _T:
    kind, body = receive_frame(sock, HANDSHAKE_BYTES_MAX, deadline)
    if kind != HANDSHAKE:
        raise ChannelError(f"a frame of type {kind} in the handshake")
    try:
        return msgspec.msgpack.decode(body, type=message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChannelError(f"not a handshake: {error}") from error
