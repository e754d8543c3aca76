"""Payloads that a rank finds in shared memory: it trusts neither the file nor what is said of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rank import Rank, acknowledged

from dcr.protocol.messages import OpenApply
from dcr.runtime.rank_messages import Shared
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


NODE = """
import sys, time
from pathlib import Path
import msgspec
from dcr.runtime.shared_memory import SharedMemory
folder, *payloads = map(Path, sys.argv[1:])
memory = SharedMemory("r", 7, folder)
print(memory.folder)
for path in payloads:
    print(msgspec.json.encode(memory.write(path.read_bytes())).decode(), flush=True)
time.sleep(600)
"""


def test_a_node_that_is_killed_takes_nothing_from_the_ranks_that_have_mapped_its_memory(tmp_path):
    """SIGKILL of the process that shares; the next node sweeps its files; what ranks hold is applied all the same."""
    rank = Rank()
    rank.prepare(stage=True)
    sent = [tmp_path / str(n) for n in range(3)]
    for path, request in zip(sent, rank.requests, strict=False):
        path.write_bytes(request.data)
    root = tmp_path / "shm"
    root.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", NODE, str(root), *map(str, sent)], stdout=subprocess.PIPE, text=True
    ) as node:
        folder = Path(node.stdout.readline().strip())
        shared = [msgspec.json.decode(node.stdout.readline(), type=Shared) for _ in sent]
        answers = [
            rank.call(msgspec.structs.replace(r, data=s)) for r, s in zip(rank.requests[:2], shared, strict=False)
        ]
        os.kill(node.pid, signal.SIGKILL)
        node.wait(30)
    assert folder.exists()
    memory = SharedMemory("r", 8, root)  # the node that comes after it
    try:
        assert not folder.exists()
        # What had not been mapped by then is a bad copy, and nothing worse; the new node receives it anew.
        late = rank.call(msgspec.structs.replace(rank.requests[2], data=shared[2]))
        assert late.corrupt
        assert "cannot be opened" in late.refused
        assert rank.call(rank.attach).results == (rank.attached,)
        again = [msgspec.structs.replace(r, data=memory.write(r.data)) for r in rank.requests[:3]]
        answers += [rank.call(r) for r in [*again, *rank.requests[3:]]]
        answers.append(rank.call(OpenApply("r", 1)))
    finally:
        memory.close()
    assert [r.root for r in acknowledged(answers)] == [rank.root()]
    assert rank.bits == dense(rank.new)
