"""Combinations of settings such that every two values of two settings meet in one of them."""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Choice = dict[str, Any]


def cover(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Choice], bool] = lambda _choice: True, seed: int = 0
) -> list[Choice]:
    """A small set of allowed choices in which every pair of values that an allowed choice has is there.

    Greedy: each next choice is one that brings the most new pairs; the seed decides between equals.  All products are
    looked at, so this is for thousands of them, not for millions.

    Args:
        factors: values by name.
        allowed: whether a choice can be.
        seed: of what is left open.
    """
    names = list(factors)
    every = [dict(zip(names, values, strict=True)) for values in product(*factors.values())]
    every = [choice for choice in every if allowed(choice)]
    random.Random(seed).shuffle(every)  # noqa: S311 - no secret
    pairs_of = [{((a, c[a]), (b, c[b])) for a, b in combinations(names, 2)} for c in every]
    missing = set().union(*pairs_of) if pairs_of else set()
    taken = []
    # What a choice brings only falls: one in front that brings as much as when it was looked at last is the best.
    brings = [(-len(pairs), n) for n, pairs in enumerate(pairs_of)]
    heapq.heapify(brings)
    while missing:
        most, n = brings[0]
        now = -len(pairs_of[n] & missing)
        if now != most:
            heapq.heapreplace(brings, (now, n))
            continue
        missing -= pairs_of[n]
        taken.append(every[n])
        heapq.heapreplace(brings, (0, n))
    return taken
