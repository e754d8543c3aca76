"""Ownership: one owner a shard, balanced, and the same whoever asks."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.protocol.errors import RefusedError
from dcr.trainer.torch.ownership import Shard, assign

replicated = st.lists(st.integers(0, 1000), max_size=40).map(
    lambda sizes: [Shard(f"w{i}", "p", size, (0, 1, 2)) for i, size in enumerate(sizes)]
)


@given(replicated, st.randoms())
def test_replicas_are_balanced_and_order_does_not_matter(shards, random):
    ownership = assign(shards, 3)
    assert set(ownership.owner) == {(s.name, s.part) for s in shards}
    loads = [sum(s.size_bytes for s in shards if ownership.owner[s.name, s.part] == rank) for rank in range(3)]
    assert list(ownership.bytes_by_rank) == loads
    # Greedy from the biggest: loads differ by no more than one shard.
    assert max(loads) - min(loads) <= max((s.size_bytes for s in shards), default=0)
    shuffled = list(shards)
    random.shuffle(shuffled)
    assert assign(shuffled, 3) == ownership


def test_only_holders_own():
    shards = [Shard("a", "top", 10, (0, 2)), Shard("a", "bottom", 10, (1, 3)), Shard("b", "", 5, (3,))]
    ownership = assign(shards, 4)
    assert ownership.owner["a", "top"] in (0, 2)
    assert ownership.owner["a", "bottom"] in (1, 3)
    assert ownership.owner["b", ""] == 3
    assert sum(ownership.bytes_by_rank) == 25


def test_imbalance():
    assert assign([Shard("a", "", 30, (0,)), Shard("b", "", 10, (1,))], 2).imbalance == 1.5
    assert assign([], 2).imbalance == 1.0


def test_the_choice_is_fixed_across_processes():
    code = (
        "from dcr.trainer.torch.ownership import Shard, assign\n"
        "print(sorted(assign([Shard(f'w{i}', '', 8, (0, 1, 2)) for i in range(9)], 3).owner.items()))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert all(one == other for one, other in pairwise(runs))
    assert runs[0].count(b"), 0)") == runs[0].count(b"), 1)") == 3


def test_a_shard_listed_twice_or_held_by_nobody_is_refused():
    with pytest.raises(RefusedError, match="listed once"):
        assign([Shard("a", "", 1, (0,)), Shard("a", "", 1, (1,))], 2)
    with pytest.raises(RefusedError, match="holders"):
        assign([Shard("a", "", 1, ())], 2)
