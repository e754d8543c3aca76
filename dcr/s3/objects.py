"""What every object that dcr puts carries, and what every answer must have; lists of keys."""

import base64
import zlib
from collections.abc import Iterator
from typing import Any

from dcr.s3.requests import DamagedAnswerError, S3Requests

DIGEST = "dcr-xxh3-128"
"""Name of the metadata that holds the XXH3-128 of an object's bytes, in hexadecimal."""
_PAGE_KEYS = 1000


def crc32_of(data: bytes) -> str:
    """CRC-32 as S3 writes it; the store compares it with what came."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4)).decode()


def answered(answer: dict[str, Any], field_name: str = "ETag") -> dict[str, Any]:
    """The answer, if it is one of S3: what a portal or a wrong server says with status 200 lacks what must be there.

    Raises:
        DamagedAnswerError: it lacks the field.
    """
    if not answer.get(field_name):
        raise DamagedAnswerError(f"an answer without {field_name}, as no S3 server gives")
    return answer


def list_pages(
    requests: S3Requests, bucket: str, stage: str, prefix: str, *, tries_max: int | None = None, **query: Any
) -> Iterator[dict[str, Any]]:
    """The pages of a list of the keys with a prefix.

    Args:
        requests: asks the store.
        bucket: its name.
        stage: what this is for, for errors.
        prefix: of the keys.
        tries_max: at most so many tries for a page, if that is less than the store's bound.
        query: further fields of ``ListObjectsV2``.
    """
    query = {"MaxKeys": _PAGE_KEYS, "Bucket": bucket, "Prefix": prefix, **query}
    token = ""
    while True:
        found: dict[str, Any] = requests.call(
            stage, lambda client, _: answered(client.list_objects_v2(**query), "Name"), tries_max=tries_max
        )
        yield found
        after = str(found.get("NextContinuationToken", ""))
        if not found.get("IsTruncated") or after in {"", token}:
            return
        query["ContinuationToken"] = token = after


def keys_of(found: dict[str, Any]) -> list[str]:
    """The keys of a page."""
    return [one["Key"] for one in found.get("Contents", [])]
