"""Requests to an S3 server: bounded, repeated with back-off where that can help, counted, and named when they fail.

boto3's own retries are off: they would report a conditional put whose answer was lost as refused although it took
effect, count nothing, and know no bound for the whole.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from dcr.protocol.errors import DcrError
from dcr.s3.place import S3Place

_T = TypeVar("_T")

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 5.0
_DOUBLINGS_MAX = 16
_LOADER = create_loader()
"""The description of S3, which takes a tenth of a second to read, once for all clients of a process."""
_LOCAL_REGION = "us-east-1"
"""What servers that know no regions expect."""
_THROTTLED_STATUS = (429, 503)
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException"}
_DAMAGED = {"BadDigest", "InvalidDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_CREDENTIALS = (
    "check what boto3 finds where this process runs (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, the "
    "machine's role) and the rights that {page} lists"
)
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_FULL_STATUS = 507
_FULL = {"InsufficientStorage", "XMinioStorageFull", "QuotaExceeded", "QuotaExceededException"}
_UNREACHABLE = "check the address's endpoint, the network, and that the server runs"


class S3AnswerError(Exception):
    """The store refused a request in a way that its caller expects."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status


class DamagedAnswerError(Exception):
    """An answer is not what the store means to say: cut short, or not of the form that it must have."""


_ERRORS = (BotoCoreError, ClientError, HTTPError, OSError, DamagedAnswerError)


class LostAnswerError(Exception):
    """A request that was sent once may have taken effect: no answer came that tells."""


class Counter(Protocol):
    """What is told of every try."""

    def asked(self, bytes_up: int = 0) -> None:
        """A request is sent, with so many bytes of an object."""

    def again(self, reason: str) -> None:
        """A request failed for a reason, and is repeated."""


@dataclass(frozen=True)
class _Fault:
    """Why a try failed, and what follows from it.

    Attributes:
        reason: in a word, for the counters.
        again: whether another try may help.
        advice: what a person could do.
        pause_min_s: how long the store asks to be left alone, seconds.
        undone: whether the request had no effect, for certain.
    """

    reason: str
    again: bool
    advice: str
    pause_min_s: float = 0.0
    undone: bool = False


class S3Requests:
    """Carries out requests to one bucket; usable from several threads.

    Args:
        place: where the bucket is, and the bounds of connections.
        tries_max: tries of one request.
        timeout_s: how long one request may take, all its tries together, seconds.
        failed: makes the error of what failed, from what to say, and whether it may be better later.
        counter: told of every try.

    Raises:
        DcrError: of ``failed``: boto3 finds no credentials, or its configuration cannot be read.
    """

    def __init__(
        self,
        place: S3Place,
        *,
        tries_max: int,
        timeout_s: float,
        failed: Callable[[str, bool], DcrError],
        counter: Counter | None = None,
    ) -> None:
        self._place = place
        self._tries_max = tries_max
        self._timeout_s = timeout_s
        self._failed = failed
        self._counter = counter
        self._connections = threading.BoundedSemaphore(place.connections_max)
        self._closed = threading.Event()
        try:
            self._client = _client(place)
        except (BotoCoreError, ValueError) as e:
            raise self._error("opening it", f"{e}; {self._advice(_fault(e))}", again=False) from e

    def call(
        self,
        stage: str,
        act: Callable[[Any, float], _T],
        *,
        bytes_up: int = 0,
        expected: tuple[int, ...] = (),
        tries_max: int | None = None,
    ) -> _T:
        """Carry out a request, again and again within the bounds while another try may help.

        Args:
            stage: what this is for, for errors: "storing KEY".
            act: makes the request; called with boto3's client and the time by ``time.monotonic`` when it should stop.
            bytes_up: bytes of an object that it sends.
            expected: statuses that the caller deals with; a missing bucket is never one.
            tries_max: at most so many tries, if that is less than the store's bound.

        Raises:
            S3AnswerError: the store answered with an expected status.
            DcrError: of ``failed``; names the place, the stage and the last answer.
        """
        most = min(self._tries_max, tries_max or self._tries_max)
        began = time.monotonic()
        deadline = began + self._timeout_s
        tries = 0
        while True:
            tries += 1
            with self._connection(stage, deadline):
                if self._counter is not None:
                    self._counter.asked(bytes_up)
                try:
                    return act(self._client, deadline)
                except _ERRORS as e:
                    _raise_expected(e, expected)
                    fault, error = _fault(e), e
            longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(tries, _DOUBLINGS_MAX))
            pause = max(random.uniform(0, longest), fault.pause_min_s)  # noqa: S311 - full jitter
            if not fault.again or tries >= most or time.monotonic() + pause > deadline:
                raise self._error(
                    stage,
                    f"{fault.reason}, after {tries} {'try' if tries == 1 else 'tries'} in "
                    f"{time.monotonic() - began:.1f} s: {_said(error)}; {self._advice(fault)}",
                    again=fault.again,
                ) from error
            if self._counter is not None:
                self._counter.again(fault.reason)
            self._closed.wait(pause)

    def once(self, stage: str, act: Callable[[Any], _T], *, expected: tuple[int, ...] = ()) -> _T:
        """Carry out a request that must not be repeated before it is known what became of it.

        Args:
            stage: what this is for, for errors.
            act: makes the request; called with boto3's client.
            expected: statuses that the caller deals with, with which nothing was done.

        Raises:
            S3AnswerError: the store answered with an expected status.
            LostAnswerError: it may have taken effect.
            DcrError: of ``failed``: it had no effect.
        """
        began = time.monotonic()
        with self._connection(stage, began + self._timeout_s):
            try:
                return act(self._client)
            except _ERRORS as e:
                _raise_expected(e, expected)
                fault = _fault(e)
                said = f"{fault.reason}, in {time.monotonic() - began:.1f} s: {_said(e)}; {self._advice(fault)}"
                if not fault.undone:
                    raise LostAnswerError(f"{self._place.STORE} {self._place}: {stage}: {said}") from e
                raise self._error(stage, said, again=fault.again) from e

    def close(self) -> None:
        """Begin no request any more, and let go of connections; safe to repeat."""
        self._closed.set()
        self._client.close()

    @contextmanager
    def _connection(self, stage: str, deadline: float) -> Iterator[None]:
        if not self._connections.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._error(
                stage,
                f"no connection became free in {self._timeout_s} s; raise connections_max = "
                f"{self._place.connections_max}",
                again=True,
            )
        try:
            if self._closed.is_set():
                raise self._error(stage, "it is closed", again=False)
            yield
        finally:
            self._connections.release()

    def _error(self, stage: str, said: str, *, again: bool) -> DcrError:
        return self._failed(f"{self._place.STORE} {self._place}: {stage}: {said}", again)

    def _advice(self, fault: _Fault) -> str:
        return fault.advice.format(page=self._place.PAGE)


def _client(place: S3Place) -> Any:
    """A client of boto3 that tries once, and leaves checksums to its caller."""
    logger = logging.getLogger("botocore")
    if logger.level == logging.NOTSET:  # else somebody wants to hear of it, or not
        logger.setLevel(logging.WARNING)  # for every client of ours it would say at INFO where credentials were found
    inner = botocore.session.get_session()
    inner.register_component("data_loader", _LOADER)
    session = boto3.Session(botocore_session=inner)
    addressing = ("path" if place.endpoint else "auto") if place.addressing == "auto" else place.addressing
    region = place.region or session.region_name or (_LOCAL_REGION if place.endpoint else None)
    if region is None:
        raise NoRegionError
    if session.get_credentials() is None:
        raise NoCredentialsError
    return session.client(
        "s3",
        endpoint_url=place.endpoint or None,
        region_name=region,
        config=Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=place.connect_timeout_s,
            read_timeout=place.answer_timeout_s,
            max_pool_connections=place.connections_max,
            tcp_keepalive=True,
            s3={"addressing_style": addressing},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def _raise_expected(error: Exception, expected: tuple[int, ...]) -> None:
    if isinstance(error, ClientError) and (answer := _answer(error)).status in expected:
        raise answer from error


def _answer(error: ClientError) -> S3AnswerError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    # Without its bucket the store is not one where the object merely is not there.
    return S3AnswerError(0 if code == "NoSuchBucket" else status, code)


def _fault(error: Exception) -> _Fault:
    match error:
        case ClientError():
            return _refusal(error)
        case NoCredentialsError() | PartialCredentialsError() | CredentialRetrievalError() | ProfileNotFound():
            return _Fault("no credentials", again=False, advice=_CREDENTIALS, undone=True)
        case NoRegionError():
            advice = "add region=NAME to the address, or set AWS_REGION"
            return _Fault("no region", again=False, advice=advice, undone=True)
        case SSLError():
            return _Fault("TLS failed", again=False, advice="check the endpoint's scheme, and AWS_CA_BUNDLE")
        case EndpointConnectionError() | ConnectTimeoutError():
            return _Fault("unreachable", again=True, advice=_UNREACHABLE, undone=True)
        case ReadTimeoutError():
            return _Fault("no answer", again=True, advice="raise answer_timeout_s if the store is that slow")
        case ResponseParserError() | DamagedAnswerError():
            return _Fault("damaged answer", again=True, advice="check what lies between here and the store")
        case HTTPClientError() | NoConnectionError() | IncompleteReadError() | HTTPError() | OSError():
            return _Fault("connection lost", again=True, advice=_UNREACHABLE)
        case _:
            return _Fault("cannot be asked", again=False, advice="check boto3's configuration and the address")


def _refusal(error: ClientError) -> _Fault:
    code = str(error.response.get("Error", {}).get("Code", ""))
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    # What answers 5xx may stand between here and a store that has done it; a store that says "slow down" has not.
    undone = 300 <= status < 500 or code in _THROTTLED  # noqa: PLR2004 - HTTP
    wait = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
    pause = min(float(wait), _BACKOFF_MAX_S) if wait.isdecimal() else 0.0
    reason, again, advice = _reason(code, status)
    return _Fault(reason, again=again, advice=advice, pause_min_s=pause, undone=undone)


def _reason(code: str, status: int) -> tuple[str, bool, str]:
    """Why the store refused, whether another try may help, and what a person could do."""
    if code in _THROTTLED or status in _THROTTLED_STATUS:
        return "throttled", True, "the store asks for less: fewer processes at once"
    if status == _FULL_STATUS or code in _FULL:
        return "store full", True, "free some space there or raise the quota"
    if code in _SKEWED:
        return "clocks differ", False, "set this machine's clock, or the server's (NTP)"
    if code in _EXPIRED:
        return "credentials expired", False, _CREDENTIALS
    if code in _DAMAGED:
        return "damaged request", True, "check what lies between here and the store"
    if (status >= 500 and status != 501) or code == "RequestTimeout":  # noqa: PLR2004 - HTTP
        return "server error", True, "see the store's log"
    if status == 409:  # noqa: PLR2004 - HTTP
        return "conflict", True, "somebody else writes the same keys"
    if code == "NoSuchBucket":
        return "no such bucket", False, "create the bucket, or correct the address"
    if status in {301, 307} or code == "AuthorizationHeaderMalformed":
        return "another region", False, "set region= in the address to the bucket's"
    if status in {401, 403}:
        return "refused", False, _CREDENTIALS
    if status == 501:  # noqa: PLR2004 - HTTP
        return "not implemented", False, "the store must support conditional writes"
    return "refused", False, "see {page} for what the store must support"


def _said(error: Exception) -> str:
    if isinstance(error, ClientError):
        metadata = error.response.get("ResponseMetadata", {})
        found = error.response.get("Error", {})
        return f"{metadata.get('HTTPStatusCode', '?')} {found.get('Code', '')}: {found.get('Message', '')}"
    return f"{type(error).__name__}: {error}"
