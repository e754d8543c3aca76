"""All ranks of one engine, called at once, and what each of them said last (DESIGN D9)."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.messages import OpenApply, StorageState
from dcr.protocol.node import engine_state
from dcr.runtime.rank_messages import (
    Answer,
    Attach,
    Attached,
    Orphans,
    Payload,
    Request,
    SealedManifest,
    WriteOn,
    decode_answer,
    encode,
)


class Engine(Protocol):
    """What a serving runtime's adapter gives the node agent.

    Calls come from the agent's thread.  ``close_gate`` may also come from another one, while a call to the ranks is
    under way: a gate must close though a rank hangs.  Calls to the gate come one at a time.
    """

    @property
    def ranks(self) -> tuple[str, ...]:
        """Names of the engine's ranks, in the order of ``call_ranks``."""
        ...

    def call_ranks(self, request: bytes) -> Sequence[bytes]:
        """Hand a request to the host of every rank at once; their answers in the order of ``ranks``.

        DcrError, with engine and stage, if a rank did not answer; then what it has done is unknown.
        """
        ...

    def close_gate(self, drain_timeout_s: float) -> None:
        """Let no request in, and return when none is inside; DcrError if they do not leave in time."""
        ...

    def reset_caches(self) -> None:
        """Drop what was computed with older weights; DcrError if that cannot be done."""
        ...

    def open_gate(self, version: int) -> None:
        """Let requests in, served by this version."""
        ...


class RankLostError(DcrError):
    """A rank did not answer, or failed at something that it did not expect: the engine is lost with it (DESIGN D9)."""


class Ranks:
    """The ranks of one engine.

    One call carries a request to all of them, since all are told the same: a rank ignores what it has already.  Each
    answers for itself.

    Args:
        engine: the serving runtime's adapter.
        name: the engine's name.

    Attributes:
        names: of the ranks.
        incarnations: of the ranks that were attached to, by name.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.names = engine.ranks
        self._engine = engine
        self._name = name
        self._answers: dict[str, Answer] = {}
        self.incarnations: dict[str, int] = {}

    @property
    def state(self) -> StorageState:
        """What the engine's storage holds, as of the last answers."""
        return engine_state(a.state for a in self._answers.values())

    @property
    def seconds(self) -> dict[str, float]:
        """Stage times of the epoch so far: of the slowest rank, for they work side by side."""
        stages = {stage for a in self._answers.values() for stage in a.seconds}
        return {s: max(a.seconds.get(s, 0.0) for a in self._answers.values()) for s in stages}

    @property
    def held(self) -> int:
        """Payloads that are held and not written yet, as of the last answers: of the rank that has most."""
        return max((a.held for a in self._answers.values()), default=0)

    def attach(self, request: Attach) -> Attached:
        """Attach to every rank, and tell them what none of them holds; what the engine is, of what its ranks are.

        Raises:
            RefusedError: a rank cannot be attached to.
            RankLostError: see ``call``.
        """
        answers = self.call(request)
        self._raise_if_refused(answers)
        attached = {rank: r for rank, a in answers.items() for r in a.results if isinstance(r, Attached)}
        self.incarnations = {rank: one.incarnation for rank, one in attached.items()}
        merged = _merged(attached)
        orphans = set(merged.skipped).difference(merged.tied)
        self._raise_if_refused(self.call(Orphans(tuple(sorted(orphans)))))
        return merged

    def call(self, request: Request) -> dict[str, Answer]:
        """Hand a request to every rank; the answer of each, by rank.

        An order to write what is held takes several calls if it takes long; ``held`` and ``seconds`` follow it.

        Raises:
            RankLostError: a rank did not answer, or not as a rank of this version does.
        """
        answers = self._call(request)
        while isinstance(request, OpenApply) and any(a.held for a in answers.values() if not a.refused):
            more = self._call(WriteOn(request.epoch))
            answers = {rank: _continued(answer, more[rank]) for rank, answer in answers.items()}
        return answers

    def _call(self, request: Request) -> dict[str, Answer]:
        try:
            raw = self._engine.call_ranks(encode(request))
            answers = dict(zip(self.names, map(decode_answer, raw), strict=True))
        except (DcrError, ValueError) as e:
            raise RankLostError(f"{_stage(request)}: {e}") from e
        if broken := {rank: a.broken for rank, a in answers.items() if a.broken}:
            why = "; ".join(f"rank {rank} failed: {text}" for rank, text in broken.items())
            raise RankLostError(f"{_stage(request)}: {why}")
        self._answers = answers
        return answers

    def _raise_if_refused(self, answers: dict[str, Answer]) -> None:
        for rank, answer in answers.items():
            if answer.refused:
                where = f", rank {rank}" if len(self.names) > 1 else ""
                raise RefusedError(f"engine {self._name}{where}: {answer.refused}")


def _merged(ranks: dict[str, Attached]) -> Attached:
    """The engine: a tensor is skipped where every rank skips it, and set or refused where any rank wants it so.

    The incarnation is that of the rank that started last: when any of them starts anew, it is another engine.
    """
    refused: dict[str, str] = {}
    for rank, one in ranks.items():
        for name, why in one.refused.items():
            refused.setdefault(name, why if len(ranks) == 1 else f"rank {rank}: {why}")
    return Attached(
        max(one.incarnation for one in ranks.values()),
        tuple(sorted({name for one in ranks.values() for name in one.set_only})),
        tuple(sorted(set.intersection(*(set(one.skipped) for one in ranks.values())))),
        refused,
        tuple(sorted({name for one in ranks.values() for name in one.tied})),
    )


def _continued(first: Answer, then: Answer) -> Answer:
    """Both answers as one; a rank that refused the order itself is asked again with the others, and refuses again."""
    if first.refused:
        return first
    return msgspec.structs.replace(then, results=(*first.results, *then.results))


def _stage(request: Request) -> str:
    """What the ranks were asked to do, for errors."""
    match request:
        case Payload():
            i = request.identity
            return f"payload {i.owner}/{i.sequence} of epoch {i.epoch}"
        case SealedManifest():
            return f"manifest of {request.owner}, epoch {request.epoch}"
        case _:
            return type(request).__name__
