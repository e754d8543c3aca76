"""Requests to etcd through its JSON gateway: bounded, not repeated where that could lie, named when they fail.

Python's own HTTP client is enough for the few calls that a control plane needs, and does nothing behind our back: a
request is sent once, and whether it was sent is known.  The gateway is part of every etcd since 3.4.
"""

import base64
import http.client
import json
import os
import select
import socket
import ssl
import threading
from dataclasses import dataclass, field
from typing import Any

from dcr.control_plane.etcd_address import Endpoint, EtcdAddress
from dcr.control_plane.interface import ControlPlaneUnavailableError
from dcr.protocol.errors import RefusedError

ANSWER_BYTES_MAX = 64 << 20
_IDLE_MAX = 8
"""Connections kept for the next requests."""
_OK = 200
# gRPC's codes, in which etcd says why.  With those of _DEFINITE nothing was done; all others may come after the effect.
_INVALID, _NOT_FOUND, _PERMISSION, _PRECONDITION, _RANGE, _UNIMPLEMENTED, _UNAUTHENTICATED = 3, 5, 7, 9, 11, 12, 16
_DEFINITE = (_INVALID, _NOT_FOUND, _PERMISSION, _PRECONDITION, _RANGE, _UNIMPLEMENTED, _UNAUTHENTICATED)
_TOKEN_STALE = ("invalid auth token", "revision of auth store is old")
_CONNECT_ERRORS = (OSError, http.client.HTTPException)


class EtcdRefusedError(RefusedError):
    """etcd refused a request, which had no effect.

    Attributes:
        code: gRPC's.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def not_found(self) -> bool:
        """Whether what was asked for is not there."""
        return self.code == _NOT_FOUND


class LostAnswerError(ControlPlaneUnavailableError):
    """A request that writes was sent, and no answer came that tells whether it took effect."""


class _UnsentError(Exception):
    """A connection that did not come about, or ended before anything of the request can have been acted upon."""


class _UnansweredError(Exception):
    """A request was sent, and what became of it is unknown."""


@dataclass
class _Connection:
    endpoint: Endpoint
    http: http.client.HTTPConnection
    used: bool = False

    @property
    def stale(self) -> bool:
        """Whether the server ended it while nobody used it."""
        return self.http.sock is None or bool(select.select([self.http.sock], [], [], 0)[0])


@dataclass
class _Answer:
    status: int
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> dict[str, Any]:
        """Of a stream its first error, of others the body."""
        inner = self.body.get("error")
        return inner if isinstance(inner, dict) else self.body

    @property
    def message(self) -> str:
        return str(self.error.get("message") or self.error.get("error") or f"status {self.status}")[:500]

    @property
    def code(self) -> int:
        code = self.error.get("code", self.error.get("grpc_code", 2))
        return code if isinstance(code, int) else 2

    @property
    def failed(self) -> bool:
        return self.status != _OK or "error" in self.body


class EtcdRequests:
    """The members of one cluster, as one process reaches them; usable from several threads at once.

    Args:
        address: where, and how to be let in.
        timeout_s: longest time for one request, seconds, all members together.

    Raises:
        RefusedError: certificates, key or password are no good.
    """

    def __init__(self, address: EtcdAddress, timeout_s: float) -> None:
        self._address = address
        self._member_timeout_s = timeout_s / len(address.endpoints)
        self._context = address.context()
        if address.user:
            address.password()  # refused now, not at the first request
        self._token = ""
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._first = 0
        self._cluster = ""
        self._revision = 0
        self._closed = False
        self._process = os.getpid()

    def ask(self, stage: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request that only reads, or that is safe to repeat; every member is tried once.

        Raises:
            ControlPlaneUnavailableError: no member answered; names each one, and the stage.
            RefusedError: etcd refused it.
        """
        return self._request(stage, path, body, repeat=True)

    def write(self, stage: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request that is sent to one member only, the first that can be connected to.

        Raises:
            LostAnswerError: it was sent, and may have taken effect.
            ControlPlaneUnavailableError: it was not sent; names each member, and the stage.
            RefusedError: etcd refused it, nothing was done.
        """
        return self._request(stage, path, body, repeat=False)

    def close(self) -> None:
        """Let go of connections; safe to repeat."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if os.getpid() == self._process:  # to a child they are its parent's
            for connection in idle:
                connection.http.close()

    def _request(self, stage: str, path: str, body: dict[str, Any], *, repeat: bool) -> dict[str, Any]:
        if os.getpid() != self._process:
            raise ControlPlaneUnavailableError(
                f"control plane {self._address}: {stage}: opened by process {self._process}; connections do not "
                f"survive a fork, open it again in the child"
            )
        data = json.dumps(body).encode()
        known = self._revision
        answer = self._sent(stage, path, data, repeat=repeat)
        if self._address.user and answer.failed and any(text in answer.message for text in _TOKEN_STALE):
            self._token = ""
            answer = self._sent(stage, path, data, repeat=repeat)
        if answer.failed:
            raise self._refused(stage, answer, repeat=repeat)
        if path.startswith("kv/"):
            self._check_went_on(stage, answer.body, known)
        return answer.body

    def _sent(self, stage: str, path: str, data: bytes, *, repeat: bool) -> _Answer:
        """The first answer of a member; an error that says to ask another one counts only if none is left."""
        if self._address.user and not self._token:
            self._log_in(stage)
        troubles: list[str] = []
        answer = None
        count = len(self._address.endpoints)
        for turn in range(count):
            number = (self._first + turn) % count
            endpoint = self._address.endpoints[number]
            try:
                answer = self._post(endpoint, path, data, repeat=repeat)
            except _UnsentError as e:
                troubles.append(f"{endpoint}: {e}")
                continue
            except _UnansweredError as e:
                troubles.append(f"{endpoint}: {e}")
                if not repeat:
                    raise LostAnswerError(f"control plane {self._address}: {stage}: {troubles[-1]}") from e
                continue
            if repeat and answer.failed and answer.code not in _DEFINITE:
                troubles.append(f"{endpoint}: {answer.message}")
                continue
            self._first = number
            return answer
        raise ControlPlaneUnavailableError(
            f"control plane {self._address}: {stage}: {'; '.join(troubles)}; see that etcd runs, that its majority is "
            f"up, and that it can be reached from here"
        )

    def _post(self, endpoint: Endpoint, path: str, data: bytes, *, repeat: bool) -> _Answer:
        connection = self._take(endpoint)
        try:
            return self._exchange(connection, path, data)
        except _UnansweredError:
            if not (repeat and connection.used):
                raise
        # It was idle for a while and the server may have ended it as we wrote: once more, on one of its own.
        return self._exchange(self._connect(endpoint), path, data)

    def _exchange(self, connection: _Connection, path: str, data: bytes) -> _Answer:
        headers = {"Content-Type": "application/json"}
        if self._token and path != "auth/authenticate":
            headers["Authorization"] = self._token
        try:
            connection.http.request("POST", f"/v3/{path}", data, headers)
            response = connection.http.getresponse()
            text = response.read(ANSWER_BYTES_MAX + 1)
        except _CONNECT_ERRORS as e:
            connection.http.close()
            raise _UnansweredError(_said(e)) from e
        if len(text) > ANSWER_BYTES_MAX:
            connection.http.close()
            raise _UnansweredError(f"its answer has more than {ANSWER_BYTES_MAX} bytes")
        self._put_back(connection, keep=not response.will_close)
        try:
            body = json.loads(text)
        except ValueError as e:
            raise _UnansweredError(f"status {response.status}, and no JSON: is that etcd's client port?") from e
        if not isinstance(body, dict):
            raise _UnansweredError(f"status {response.status}, and no JSON object")
        return _Answer(response.status, body)

    # ------------------------------------------------------------ connections

    def _take(self, endpoint: Endpoint) -> _Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise ControlPlaneUnavailableError(f"control plane {self._address}: it has been closed")
                found = next((c for c in self._idle if c.endpoint == endpoint), None)
                if found is None:
                    break
                self._idle.remove(found)
            if not found.stale:
                return found
            found.http.close()
        return self._connect(endpoint)

    def _connect(self, endpoint: Endpoint) -> _Connection:
        timeout = self._member_timeout_s
        if self._context is None:
            made = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout)
        else:
            made = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout, context=self._context)
        try:
            made.connect()
        except _CONNECT_ERRORS as e:
            made.close()
            raise _UnsentError(_said(e)) from e
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(endpoint, made)

    def _put_back(self, connection: _Connection, *, keep: bool) -> None:
        connection.used = True
        with self._lock:
            if keep and not self._closed and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.http.close()

    # ------------------------------------------------------------ who is let in, and to what

    def _log_in(self, stage: str) -> None:
        data = json.dumps({"name": self._address.user, "password": self._address.password()}).encode()
        troubles = []
        for endpoint in self._address.endpoints:
            try:
                answer = self._post(endpoint, "auth/authenticate", data, repeat=True)
            except (_UnsentError, _UnansweredError) as e:
                troubles.append(f"{endpoint}: {e}")
                continue
            if not answer.failed:
                self._token = str(answer.body.get("token", ""))
                return
            if answer.code in _DEFINITE:
                raise EtcdRefusedError(
                    f"control plane {self._address}: {stage}: user {self._address.user} was not let in: "
                    f"{answer.message}; check user and password, and that authentication is enabled",
                    answer.code,
                )
            troubles.append(f"{endpoint}: {answer.message}")
        raise ControlPlaneUnavailableError(
            f"control plane {self._address}: {stage}: logging in: {'; '.join(troubles)}; see that etcd runs and can be "
            f"reached from here"
        )

    def _refused(self, stage: str, answer: _Answer, *, repeat: bool) -> Exception:
        said = f"control plane {self._address}: {stage}: {answer.message}"
        if answer.code in _DEFINITE:
            advice = {
                _PERMISSION: f"; user {self._address.user or '(none)'} needs to read and write the prefix "
                f"/{self._address.prefix}/",
                _UNIMPLEMENTED: "; it must be etcd 3.4 or later, with its gRPC gateway enabled",
            }
            return EtcdRefusedError(said + advice.get(answer.code, "; see the log of etcd"), answer.code)
        # "request timed out", "no leader", even "database space exceeded" may come after the effect.
        return ControlPlaneUnavailableError(said) if repeat else LostAnswerError(said)

    def _check_went_on(self, stage: str, body: dict[str, Any], known: int) -> None:
        """That it is the same cluster, and has not forgotten what it acknowledged."""
        header = body.get("header", {})
        cluster, revision = str(header.get("cluster_id", "")), int(header.get("revision", 0))
        with self._lock:
            self._cluster = self._cluster or cluster
            self._revision = max(self._revision, revision)
        if cluster != self._cluster or revision < known:
            raise LostAnswerError(
                f"control plane {self._address}: {stage}: another cluster answers, or one that was put back "
                f"to an older state (cluster {cluster} at {revision}, after {self._cluster} at {known}); stop every "
                f"process of the run, and see to etcd"
            )


def encode(data: bytes | str) -> str:
    """Bytes as the gateway has them."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def decode(text: str) -> bytes:
    """Bytes from the gateway."""
    return base64.b64decode(text)


def _said(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "no answer in time"
        case ConnectionRefusedError():
            return "nothing listens there"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not one of ca=: {error.verify_message}"
        case ssl.SSLError():
            return f"TLS: {error.reason or error}"
        case http.client.RemoteDisconnected():
            return "it closed the connection"
        case http.client.BadStatusLine():
            return "no HTTP: is TLS missing on one side?"
        case OSError():
            return error.strerror or str(error)
        case _:
            return str(error) or type(error).__name__
