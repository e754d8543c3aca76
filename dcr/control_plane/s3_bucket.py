"""Small objects below a prefix of a bucket, one of which is written only as long as it is what its writer has read."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import xxhash

from dcr.control_plane.interface import ControlPlaneUnavailableError
from dcr.control_plane.s3_address import S3RecordAddress
from dcr.protocol.errors import RefusedError
from dcr.s3.objects import DIGEST, answered, crc32_of, keys_of, list_pages
from dcr.s3.requests import DamagedAnswerError, S3AnswerError, S3Requests

OBJECT_BYTES_MAX = 64 << 20
_TRIES_MAX = 4
"""Of a request that may be repeated.  Whoever asks for the record asks again, so a store that is away is told soon."""
_MISSING, _CONFLICT, _OTHER = 404, 409, 412

_T = TypeVar("_T")


class StoreUnavailableError(ControlPlaneUnavailableError):
    """The store could not be used.

    Attributes:
        again: whether it may be better later, with nobody's help.
    """

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Bucket:
    """Objects below a prefix; usable from several threads at once.

    Every method may raise StoreUnavailableError.

    Args:
        address: where.
        timeout_s: longest time for one request with all its tries, seconds.

    Raises:
        RefusedError: there is no such bucket, or no credentials, or these do not let us in.
    """

    def __init__(self, address: S3RecordAddress, timeout_s: float) -> None:
        self._address = dataclasses.replace(
            address,
            connect_timeout_s=min(address.connect_timeout_s, timeout_s),
            answer_timeout_s=min(address.answer_timeout_s, timeout_s),
        )
        self._process = os.getpid()
        try:
            self._requests = S3Requests(
                self._address, tries_max=_TRIES_MAX, timeout_s=timeout_s, failed=StoreUnavailableError
            )
            try:
                next(self._pages("opening it", "", MaxKeys=1))
            except BaseException:
                self._requests.close()
                raise
        except StoreUnavailableError as e:
            if e.again:
                raise
            raise RefusedError(str(e)) from e

    def get(self, stage: str, key: str) -> tuple[bytes, str] | None:
        """An object, and the tag that no other content under its key has; None while there is none.

        Raises:
            RefusedError: something else wrote it.
        """

        def act(client: Any, _: float) -> tuple[bytes, str]:
            answer = client.get_object(**self._at(key))
            try:
                answered(answer)
                digest = answer.get("Metadata", {}).get(DIGEST)
                if digest is None or answer["ContentLength"] > OBJECT_BYTES_MAX:
                    raise RefusedError(
                        f"object {self._address.prefix}{key} in {self._address}: something else wrote it "
                        f"({answer['ContentLength']} bytes, metadata {DIGEST}: {digest}); check the address"
                    )
                data: bytes = answer["Body"].read()
            finally:
                answer["Body"].close()
            if xxhash.xxh3_128_hexdigest(data) != digest:
                raise DamagedAnswerError("its bytes are not those that were stored")
            return data, answer["ETag"]

        try:
            return self._call(stage, act, expected=(_MISSING,))
        except S3AnswerError:
            return None

    def put(self, stage: str, key: str, data: bytes) -> None:
        """Set an object, whatever is there; safe to repeat."""
        self._call(stage, lambda client, _: answered(client.put_object(**self._object(key, data))))

    def put_after(self, stage: str, key: str, data: bytes, tag: str | None) -> bool:
        """Set an object if it is still what was read.

        Args:
            stage: what this is for, for errors.
            key: of the object.
            data: its new bytes.
            tag: of what was read; None if there was none.

        Returns:
            False if it was refused: it is something else now, or is just being written.

        Raises:
            LostAnswerError: it may have taken effect.
        """
        self._check_process(stage)
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            self._requests.once(
                stage,
                lambda client: answered(client.put_object(**self._object(key, data), **condition)),
                expected=(_MISSING, _CONFLICT, _OTHER),
            )
        except S3AnswerError:
            return False
        return True

    def delete(self, stage: str, key: str) -> None:
        """Remove an object; an absent one is fine."""
        try:
            self._call(stage, lambda client, _: client.delete_object(**self._at(key)), expected=(_MISSING,))
        except S3AnswerError:
            return

    def keys(self, stage: str, prefix: str) -> list[str]:
        """The keys that begin so."""
        cut = len(self._address.prefix)
        return [key[cut:] for page in self._pages(stage, prefix) for key in keys_of(page)]

    def close(self) -> None:
        """Let go of connections; safe to repeat."""
        if os.getpid() == self._process:  # to a child they are its parent's
            self._requests.close()

    def _call(self, stage: str, act: Callable[[Any, float], _T], *, expected: tuple[int, ...] = ()) -> _T:
        self._check_process(stage)
        return self._requests.call(stage, act, expected=expected)

    def _pages(self, stage: str, prefix: str, **query: Any) -> Iterator[dict[str, Any]]:
        self._check_process(stage)
        return list_pages(self._requests, self._address.bucket, stage, self._address.prefix + prefix, **query)

    def _check_process(self, stage: str) -> None:
        if os.getpid() != self._process:
            raise ControlPlaneUnavailableError(
                f"control plane {self._address}: {stage}: opened by process {self._process}; connections do not "
                f"survive a fork, open it again in the child"
            )

    def _object(self, key: str, data: bytes) -> dict[str, Any]:
        digest = xxhash.xxh3_128_hexdigest(data)
        return {**self._at(key), "Body": data, "ChecksumCRC32": crc32_of(data), "Metadata": {DIGEST: digest}}

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._address.bucket, "Key": self._address.prefix + key}
