"""The Courier specification once more, in plain Python: the independent answer for what TLC says of it."""

from itertools import pairwise

COURIERS = ("ann", "bob")
PARCELS = 2
IDLE = ("idle", 0)


def first():
    """(desk, what each courier holds, delivered)."""
    return (tuple(range(1, PARCELS + 1)), (IDLE,) * len(COURIERS), frozenset())


def successors(state):
    """(action, who, next state)."""
    desk, holds, delivered = state
    for at, who in enumerate(COURIERS):

        def holding(what, at=at):
            return (*holds[:at], what, *holds[at + 1 :])

        status, parcel = holds[at]
        if status == "idle" and desk:
            yield "Take", who, (desk[1:], holding(("loaded", desk[0])), delivered)
        if status == "loaded":
            yield "Deliver", who, (desk, holding(IDLE), delivered | {(who, parcel)})
            yield "Return", who, ((*desk, parcel), holding(IDLE), delivered)


def explore():
    """All reachable (action, who, state), the depth of the search, and how many states were generated."""
    start = ("Init", "", first())
    seen, frontier, depth, generated = {start}, [start], 1, 1
    while frontier:
        following = []
        for _, _, state in frontier:
            for found in successors(state):
                generated += 1
                if found not in seen:
                    seen.add(found)
                    following.append(found)
        frontier = following
        depth += bool(frontier)
    return seen, depth, generated


def of_tlc(state):
    """A state of TLC in the form above."""
    step, courier = state["step"], state["courier"]
    holds = tuple((courier[who]["st"], courier[who]["parcel"]) for who in COURIERS)
    delivered = frozenset((d["who"], d["parcel"]) for d in state["delivered"])
    return step["name"], step["who"], (state["desk"], holds, delivered)


def is_behaviour(states):
    """Whether states, in the form above, follow one another from the first on."""
    return states[0] == ("Init", "", first()) and all(
        after in list(successors(before[2])) for before, after in pairwise(states)
    )
