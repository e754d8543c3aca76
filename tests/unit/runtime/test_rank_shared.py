"""Payloads that a rank finds in shared memory: it trusts neither the file nor what is said of it."""

import msgspec
import pytest
from rank import Rank, acknowledged

from dcr.protocol.messages import OpenApply
from dcr.runtime.shared_memory import SharedMemory
from tests.faults.models import dense


@pytest.mark.parametrize("stage", [False, True])
def test_shared_bytes_are_checked_before_they_are_read(tmp_path, stage):
    """Flipped, cut, gone, another payload's, or said to have another digest: refused as a bad copy, never applied."""
    rank = Rank()
    memory = SharedMemory("r", 1, tmp_path)
    rank.prepare(stage=stage)
    if not stage:
        rank.call(OpenApply("r", 1))
    before = rank.bits
    data = rank.requests[0].data
    good = memory.write(data)

    def sent(shared):
        return rank.call(msgspec.structs.replace(rank.requests[0], data=shared))

    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    bad = [
        msgspec.structs.replace(memory.write(bytes(flipped)), digest=good.digest),
        msgspec.structs.replace(memory.write(data[:-1]), size=good.size),
        msgspec.structs.replace(good, path=good.path + "0"),
        msgspec.structs.replace(good, digest="0" * 64),
        memory.write(rank.requests[1].data),
    ]
    for shared in bad:
        answer = sent(shared)
        assert answer.corrupt
        assert answer.state.clean
        assert rank.bits == before
    others = [msgspec.structs.replace(r, data=memory.write(r.data)) for r in rank.requests[1:3]]
    answers = [sent(good), *map(rank.call, others)]
    memory.close()  # what is staged stays mapped
    answers += [rank.call(r) for r in rank.requests[3:]]
    if stage:
        answers.append(rank.call(OpenApply("r", 1)))
    assert [r.root for r in acknowledged(answers)] == [rank.root()]
    assert rank.bits == dense(rank.new)
