"""An S3 bucket behind the object-store interface (docs/delivery.md says what a bucket must offer and allow).

An object is put under the condition that its key is free, in one request or, above ``part_bytes``, in parts that are
completed under that condition.  It carries a digest of its bytes, which every reader compares.  A put whose outcome is
not known, because the answer was lost or the key turns out to be taken, is settled by reading that digest back.
"""

import io
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import xxhash

from dcr.data_plane.nvtx import stage
from dcr.delivery.interface import (
    DeliveryConflictError,
    DeliveryError,
    LookPause,
    check_key,
    check_prefix,
)
from dcr.delivery.s3_address import PARTS_MAX, S3Address
from dcr.delivery.traffic import Traffic, TrafficCounter
from dcr.protocol.errors import RefusedError
from dcr.s3.objects import DIGEST, answered, crc32_of, keys_of, list_pages
from dcr.s3.parallel import in_parallel
from dcr.s3.requests import DamagedAnswerError, S3AnswerError, S3Requests

_log = logging.getLogger("dcr.delivery")

_ROUNDS_MAX = 5
"""How often a put starts anew because its key was taken and then free, and a get because what came was not whole."""
_OPEN_TRIES_MAX = 4
_CHUNK_BYTES = 1 << 16
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_BAD, _MISSING, _CONFLICT, _TAKEN, _NO_RANGE = 400, 404, 409, 412, 416


@dataclass
class _Object:
    """An object that is being read: all of its memory, filled part by part."""

    size: int
    etag: str
    digest: str
    bytes: io.BytesIO
    filled: int = 0


@dataclass(frozen=True)
class _Upload:
    """An upload in parts, and what completes each, by its number."""

    key: str
    upload_id: str
    parts: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])


class _DamagedObjectError(Exception):
    """What was read is not what was stored, or not all of one object."""


class S3Delivery:
    """A Delivery in a bucket (see ``interface.Delivery``).  The bucket must exist, and allow conditional writes.

    Args:
        place: bucket, prefix, server and bounds.

    Raises:
        DeliveryError: the bucket cannot be listed: the error says whether endpoint, bucket or credentials are wrong.
    """

    kind = "s3"

    def __init__(self, place: S3Address) -> None:
        self._place = place
        self.place = str(place)
        self._bucket, self._root = place.bucket, place.prefix
        self._counter = TrafficCounter()
        self._requests = S3Requests(
            place,
            tries_max=place.tries_max,
            timeout_s=place.retry_timeout_s,
            failed=lambda said, _: DeliveryError(said),
            counter=self._counter,
        )
        self.look_pause = LookPause(place.look_pause_s, place.look_pause_max_s)
        try:
            next(self._pages("opening it", self._root, tries_max=_OPEN_TRIES_MAX, MaxKeys=1))
        except BaseException:
            self.close()
            raise

    @property
    def traffic(self) -> Traffic:
        """See Delivery."""
        return self._counter.traffic

    def close(self) -> None:
        """See Delivery; what other threads are at fails soon."""
        self._requests.close()

    # ------------------------------------------------------------ put

    def put(self, key: str, data: bytes) -> None:
        """See Delivery.  DeliveryError also for more than 10,000 parts."""
        check_key(key)
        if len(data) > self._place.part_bytes * PARTS_MAX:
            raise DeliveryError(
                f"object {key}: {len(data)} bytes are more than {PARTS_MAX} parts; raise part_bytes = "
                f"{self._place.part_bytes} in the address"
            )
        digest = xxhash.xxh3_128_hexdigest(data)
        refusal: S3AnswerError | None = None
        for _ in range(_ROUNDS_MAX):
            upload = None
            if len(data) <= self._place.part_bytes:
                refusal = self._put_whole(key, data, digest)
            else:
                upload = self._upload(key, data, digest)
                refusal = self._complete(upload)
            if refusal is None:
                return
            found = self._stored(key)
            if found == (len(data), digest):
                # Ours, or the same from another writer.  If an answer was lost it may be this very upload, which some
                # servers would tear from under the object if it was aborted now; the sweep takes it once it is old.
                return
            if upload is not None:
                self._abort(upload)
            if found is not None:
                raise DeliveryConflictError(
                    f"object {key} in {self._place}: holds other bytes already; an owner emits once per epoch, open a "
                    "new one"
                )
        raise DeliveryError(
            f"object {key} in {self._place}: refused {_ROUNDS_MAX} times though the key is free, last with {refusal}; "
            "does something delete what is stored there?"
        )

    def _put_whole(self, key: str, data: bytes, digest: str) -> S3AnswerError | None:
        """Put in one request; an answer if the key is taken, perhaps by an earlier try whose answer was lost."""
        crc = crc32_of(data)
        try:
            self._requests.call(
                f"storing {key} ({len(data)} bytes)",
                lambda client, _: answered(
                    client.put_object(
                        **self._at(key), Body=data, IfNoneMatch="*", ChecksumCRC32=crc, Metadata={DIGEST: digest}
                    )
                ),
                bytes_up=len(data),
                expected=(_TAKEN,),
            )
        except S3AnswerError as e:
            return e
        return None

    def _upload(self, key: str, data: bytes, digest: str) -> _Upload:
        """Send every part; nothing is to be seen of them until they are completed."""
        answer = self._requests.call(
            f"beginning to store {key} ({len(data)} bytes)",
            lambda client, _: answered(
                client.create_multipart_upload(**self._at(key), ChecksumAlgorithm="CRC32", Metadata={DIGEST: digest}),
                "UploadId",
            ),
        )
        upload = _Upload(key, answer["UploadId"])

        def send(index: int) -> None:
            part = data[index * self._place.part_bytes : (index + 1) * self._place.part_bytes]
            crc, number = crc32_of(part), index + 1
            sent = self._requests.call(
                f"storing part {number} of {key} ({len(part)} bytes)",
                lambda client, _: answered(
                    client.upload_part(
                        **self._at(key), UploadId=upload.upload_id, PartNumber=number, Body=part, ChecksumCRC32=crc
                    )
                ),
                bytes_up=len(part),
            )
            upload.parts[number] = {"ETag": sent["ETag"], "ChecksumCRC32": crc}

        try:
            in_parallel(send, self._parts(len(data)), self._place.parallel_parts)
        except BaseException:
            self._abort(upload)
            raise
        return upload

    def _complete(self, upload: _Upload) -> S3AnswerError | None:
        """Make the object of its parts; an answer if the key is taken, the upload gone, or its parts not all there.

        An earlier try whose answer was lost may have made it.
        """
        parts = [{"PartNumber": number, **sent} for number, sent in sorted(upload.parts.items())]
        try:
            self._requests.call(
                f"completing {upload.key} of its {len(parts)} parts",
                lambda client, _: answered(
                    client.complete_multipart_upload(
                        **self._at(upload.key),
                        UploadId=upload.upload_id,
                        MultipartUpload={"Parts": parts},
                        IfNoneMatch="*",
                    )
                ),
                expected=(_TAKEN, _BAD, _MISSING, _CONFLICT),
            )
        except S3AnswerError as e:
            return e
        except DeliveryError:
            self._abort(upload)
            raise
        return None

    def _abort(self, upload: _Upload) -> None:
        """Drop the parts of an upload; what cannot be dropped now, the sweep drops later."""
        try:
            self._requests.call(
                f"aborting an upload of {upload.key}",
                lambda client, _: client.abort_multipart_upload(**self._at(upload.key), UploadId=upload.upload_id),
                expected=(_MISSING,),
                tries_max=_OPEN_TRIES_MAX,
            )
        except S3AnswerError:
            pass
        except DeliveryError as e:
            _log.warning("%s; it is left to the sweep, or to the bucket's lifecycle rule", e)

    def _stored(self, key: str) -> tuple[int, str] | None:
        """Size and digest of what a key holds."""
        try:
            answer = self._requests.call(
                f"reading back {key}",
                lambda client, _: answered(client.head_object(**self._at(key))),
                expected=(_MISSING,),
            )
        except S3AnswerError:
            return None
        return int(answer["ContentLength"]), str(answer.get("Metadata", {}).get(DIGEST, ""))

    # ------------------------------------------------------------ get

    def get(self, key: str, size_max: int) -> bytes | None:
        """See Delivery.  The memory it takes is the object's size and one chunk for each part that is on its way."""
        check_key(key)
        problem = ""
        for _ in range(_ROUNDS_MAX):
            try:
                return self._read(key, size_max)
            except _DamagedObjectError as e:
                self._counter.again("damaged object")
                problem = str(e)
        raise DeliveryError(f"object {key} in {self._place}: {problem}, {_ROUNDS_MAX} times; has it been overwritten?")

    def _read(self, key: str, size_max: int) -> bytes | None:
        found = self._first(key, size_max)
        if found is None:
            return None
        in_parallel(
            lambda i: self._rest(key, found, i + 1), self._parts(found.size - found.filled), self._place.parallel_parts
        )
        data = found.bytes.getvalue()
        if xxhash.xxh3_128_hexdigest(data) != found.digest:
            raise _DamagedObjectError(f"its {found.size} bytes are not those that were stored")
        return data

    def _first(self, key: str, size_max: int) -> _Object | None:
        """The beginning of an object, all of it if it is small; RefusedError before any of it is read."""
        query = {"Range": f"bytes=0-{self._place.part_bytes - 1}"}
        try:
            return self._begin(key, size_max, query)
        except S3AnswerError as e:
            if e.status == _MISSING:
                return None
        try:
            return self._begin(key, size_max, {})  # an empty object has no ranges
        except S3AnswerError:
            return None

    def _begin(self, key: str, size_max: int, query: dict[str, str]) -> _Object:
        def act(client: Any, deadline: float) -> _Object:
            answer = client.get_object(**self._at(key), **query)
            body = answer["Body"]
            try:
                answered(answer)
                length, size = int(answer["ContentLength"]), _size(answer)
                if size > size_max:
                    raise RefusedError(f"object {key} in {self._place}: {size} bytes, more than the {size_max} allowed")
                if length != (min(size, self._place.part_bytes) if "ContentRange" in answer else size):
                    raise DamagedAnswerError(f"{length} bytes were answered of an object of {size}")
                digest = answer.get("Metadata", {}).get(DIGEST)
                if digest is None:
                    raise DeliveryError(
                        f"object {key} in {self._place}: has no metadata {DIGEST}: something else wrote it; remove it"
                    )
                found = _Object(size, answer["ETag"], digest, io.BytesIO(bytes(size)), length)
                self._fill(found, 0, length, body, deadline)
                return found
            finally:
                body.close()

        return self._requests.call(f"reading {key}", act, expected=(_MISSING, _NO_RANGE))

    def _rest(self, key: str, found: _Object, index: int) -> None:
        """A later part of the same object."""
        start = index * self._place.part_bytes
        end = min(start + self._place.part_bytes, found.size)

        def act(client: Any, deadline: float) -> None:
            answer = client.get_object(**self._at(key), Range=f"bytes={start}-{end - 1}", IfMatch=found.etag)
            body = answer["Body"]
            try:
                if answer.get("ContentRange") != f"bytes {start}-{end - 1}/{found.size}":
                    raise DamagedAnswerError(f"bytes {start} to {end - 1} were asked for, and others answered")
                self._fill(found, start, end, body, deadline)
            finally:
                body.close()

        try:
            self._requests.call(
                f"reading bytes {start} to {end - 1} of {key}", act, expected=(_MISSING, _TAKEN, _NO_RANGE)
            )
        except S3AnswerError as e:
            raise _DamagedObjectError("it was replaced while it was read") from e

    def _fill(self, found: _Object, start: int, end: int, body: Any, deadline: float) -> None:
        with stage("receive"), found.bytes.getbuffer() as whole, whole[start:end] as left:
            done = 0
            while done < len(left):
                if time.monotonic() > deadline:
                    raise DamagedAnswerError(f"{done} of {len(left)} bytes came in time")
                with left[done : done + _CHUNK_BYTES] as chunk:
                    read = body.readinto(chunk)
                if not read:
                    raise DamagedAnswerError(f"{done} of {len(left)} bytes came")
                done += read
                self._counter.received(read)

    # ------------------------------------------------------------ lists

    def keys(self, prefix: str) -> list[str]:
        """See Delivery."""
        check_prefix(prefix)
        pages = self._pages(f"listing {prefix}", self._root + prefix)
        return sorted(k[len(self._root) :] for page in pages for k in keys_of(page))

    def segments(self, prefix: str) -> list[str]:
        """See Delivery."""
        check_prefix(prefix)
        whole = self._root + prefix
        pages = self._pages(f"listing below {prefix}", whole, Delimiter="/")
        return sorted(found["Prefix"][len(whole) : -1] for page in pages for found in page.get("CommonPrefixes", []))

    def delete_prefix(self, prefix: str) -> None:
        """See Delivery."""
        check_prefix(prefix)
        for page in self._pages(f"listing {prefix}", self._root + prefix):
            if not (keys := keys_of(page)):
                continue
            answer = self._requests.call(f"deleting {prefix}", lambda client, _, keys=keys: self._delete(client, keys))  # type: ignore[misc]
            if errors := answer.get("Errors"):
                raise DeliveryError(
                    f"delivery store {self._place}: deleting {prefix}: {len(errors)} objects were not deleted, first "
                    f"{errors[0].get('Key')}: {errors[0].get('Code')} {errors[0].get('Message')}"
                )

    def _delete(self, client: Any, keys: list[str]) -> dict[str, Any]:
        answer: dict[str, Any] = client.delete_objects(
            Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in keys]}
        )
        told = len(answer.get("Deleted", [])) + len(answer.get("Errors", []))
        if told != len(keys):
            raise DamagedAnswerError(f"{told} of {len(keys)} objects to delete were answered for")
        return answer

    def tidy(self, prefix: str) -> None:
        """See Delivery: aborts uploads that are older than ``upload_age_max_s`` by the store's clock."""
        check_prefix(prefix)
        marker: dict[str, str] = {}
        while True:
            page = self._requests.call(
                f"listing uploads below {prefix}",
                lambda client, _, marker=marker: answered(  # type: ignore[misc]
                    client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._root + prefix, **marker), "Bucket"
                ),
            )
            now = _date(page)
            for upload in page.get("Uploads", []):
                if (now - upload["Initiated"]).total_seconds() > self._place.upload_age_max_s:
                    self._abort(_Upload(upload["Key"][len(self._root) :], upload["UploadId"]))
            after = {"KeyMarker": page.get("NextKeyMarker", ""), "UploadIdMarker": page.get("NextUploadIdMarker", "")}
            if not page.get("IsTruncated") or after == marker:
                return
            marker = after

    def _pages(self, stage: str, prefix: str, **query: Any) -> Iterator[dict[str, Any]]:
        return list_pages(self._requests, self._bucket, stage, prefix, **query)

    # ------------------------------------------------------------ small things

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._root + key}

    def _parts(self, size: int) -> int:
        return -(-size // self._place.part_bytes)


def _size(answer: dict[str, Any]) -> int:
    """Size of the whole object that an answer holds the beginning of."""
    if "ContentRange" not in answer:
        return int(answer["ContentLength"])
    match = _CONTENT_RANGE.fullmatch(answer["ContentRange"])
    if match is None or match[1] != "0":
        raise DamagedAnswerError("the beginning was asked for, and another part answered")
    return int(match[3])


def _date(answer: dict[str, Any]) -> datetime:
    """The store's clock; ours if it does not tell."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        found = parsedate_to_datetime(said)
    except (TypeError, ValueError):
        return datetime.now(UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
