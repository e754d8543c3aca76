"""The golden bytes of K, a manifest and every message.

``python -m tests.unit.protocol.golden`` writes tests/golden/protocol.json anew: only together with a version number,
once one is released.
"""

import json
from pathlib import Path

from dcr.protocol.identity import encode_manifest
from dcr.protocol.messages import encode_message
from dcr.protocol.record import encode_record
from tests.unit.protocol.contracts import MANIFEST, ORDERS, RECORD, REPORTS

FILE = Path(__file__).parents[2] / "golden" / "protocol.json"


def cases() -> dict[str, bytes]:
    messages = {type(message).__name__: encode_message(message) for message in ORDERS + REPORTS}
    return {"CommitRecord": encode_record(RECORD), "Manifest": encode_manifest(MANIFEST), **messages}


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: data.hex() for name, data in cases().items()}, indent=1) + "\n")
