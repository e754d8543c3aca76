"""An engine's storage, read back and compared: with its checkpoint, with the record, or with the owners' digests."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.messages import CompareContents, ContentsCompared, cut
from dcr.runtime.contents import WAY_OUT, EngineContents, ReadbackError, ReadbackReport, named
from dcr.runtime.rank_messages import Contents, ReadBack
from dcr.runtime.ranks import Ranks

_log = logging.getLogger("dcr.node")
_TOLD_MAX = 16
"""How many tensors an answer names; it counts the others."""
_NOT_COMMITTED = "its bits are not those that the owners have committed"


class StorageCheck:
    """Reads the ranks of one engine back.  Nothing is written, and requests may run meanwhile.

    Args:
        ranks: the engine's.
        name: the engine's name.
        incarnation: of the engine.
        specs: all canonical tensors of its checkpoint.
    """

    def __init__(self, ranks: Ranks, name: str, incarnation: int, specs: Sequence[TensorSpec]) -> None:
        self._ranks = ranks
        self._name = name
        self._incarnation = incarnation
        self._specs = tuple(specs)

    def as_loaded(self, loaded_digest: str) -> bool:
        """Whether storage is taken to hold what the loader was fed: an earlier agent may have refitted it since."""
        state = self._ranks.state
        return bool(loaded_digest) and not state.torn_by and state.content_digest == loaded_digest

    def read_back(self, checkpoint: Mapping[str, ContentDigest] | None = None) -> ReadbackReport:
        """Compare storage with what it is taken to hold, or with what the loader was fed.

        Args:
            checkpoint: content digests by tensor of what the loader was fed, if storage should hold that.

        Raises:
            ReadbackError: it holds something else.
            RankLostError: a rank did not answer.
        """
        state = self._ranks.state
        started = time.perf_counter()
        try:
            report = self._contents().compare(state.version, state.content_digest, checkpoint)
        except ReadbackError as e:
            held = "what it was loaded from" if checkpoint is not None else f"version {state.version}"
            raise ReadbackError(f"engine {self._name} does not hold {held}, and serves nothing: {e}") from None
        _log.info("engine %s was read back in %.3f s: %s", self._name, time.perf_counter() - started, report)
        return report

    def answer(self, asked: Future[ReadbackReport], applying: bool, why: Callable[[], str]) -> None:
        """Answer somebody who wants to know what storage holds.  Raises as ``read_back``.

        Args:
            asked: gets the report, or the error.
            applying: whether an attempt may be writing.
            why: what an engine that holds no version waits for.
        """
        state = self._ranks.state
        if state.torn_by or not state.content_digest or applying:
            asked.set_exception(RefusedError(f"engine {self._name} holds no version now: {why()}"))
            return
        try:
            asked.set_result(self.read_back())
        except DcrError as e:
            asked.set_exception(e)
            raise

    def holds(self, version: int, content_digest: str) -> None:
        """Compare storage with a version, whatever it is taken to hold.  Raises as ``read_back``."""
        started = time.perf_counter()
        report = self._contents().compare(version, content_digest, None)
        _log.info("engine %s was read back in %.3f s: %s", self._name, time.perf_counter() - started, report)

    def compare(self, order: CompareContents, owners: Mapping[str, ContentDigest] | DcrError) -> ContentsCompared:
        """Compare storage with the owners' digests, tensor by tensor.

        Args:
            order: the leader's.
            owners: what every canonical tensor of the committed version digests to, or why that could not be read.

        Raises:
            RankLostError: a rank did not answer.
        """
        if isinstance(owners, DcrError):
            return self.refusal(order, f"the owners' digests could not be read: {owners}")
        state = self._ranks.state
        if state.torn_by or state.version != order.version:
            held = "no known version" if state.version is None else f"version {state.version}"
            torn = f", torn by {', '.join(state.torn_by)}" if state.torn_by else ""
            return self.refusal(order, f"it holds {held}{torn}, not version {order.version}")
        started = time.perf_counter()
        try:
            contents = self._contents()
        except ReadbackError as e:  # what storage holds is nothing that a loader leaves there
            return self._answer(order, EngineContents({}, {}, 0), e.tensors, started, str(e))
        different = {n: _NOT_COMMITTED for n, digest in contents.digests.items() if owners.get(n) != digest}
        return self._answer(order, contents, different, started, "" if contents.digests else "no tensor has a way back")

    def refusal(self, order: CompareContents, reason: str) -> ContentsCompared:
        """The answer that nothing could be compared."""
        return ContentsCompared(self._name, self._incarnation, order.epoch, 0, 0, {}, 0, {}, 0, cut(reason), 0.0)

    def error(self, answer: ContentsCompared) -> ReadbackError | None:
        """What the engine ends on, if its answer is that it holds something else."""
        if not answer.different_count:
            return None
        more = answer.different_count - len(answer.different)
        found = named(answer.different) + (f"; and {more} more" if more else "")
        return ReadbackError(
            f"engine {self._name} does not hold what is committed, and serves nothing: {found}: {WAY_OUT}"
        )

    def _contents(self) -> EngineContents:
        answers = self._ranks.call(ReadBack())
        ranks = {rank: r for rank, a in answers.items() for r in a.results if isinstance(r, Contents)}
        unread = {rank: a.refused for rank, a in answers.items() if rank not in ranks}
        return EngineContents.of(self._specs, ranks, unread)

    def _answer(
        self,
        order: CompareContents,
        contents: EngineContents,
        different: Mapping[str, str],
        started: float,
        reason: str,
    ) -> ContentsCompared:
        return ContentsCompared(
            self._name,
            self._incarnation,
            order.epoch,
            len(contents.digests),
            contents.elements,
            _first(different),
            len(different),
            _first(contents.unread),
            len(contents.unread),
            cut(reason),
            time.perf_counter() - started,
        )


def _first(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: cut(why) for name, why in itertools.islice(sorted(reasons.items()), _TOLD_MAX)}
