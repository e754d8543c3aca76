"""One rank's share of a Megatron trainer: detects, converts, emits and folds the elements that it owns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dcr.data_plane.change_counts import ChangeCount
from dcr.data_plane.content_digest import ContentDigest
from dcr.data_plane.index_map import Box, IndexMap
from dcr.data_plane.item import Change, TensorSpec
from dcr.data_plane.nonfinite import NonFinite
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.runtime.progress_log import untold
from dcr.trainer.megatron.conversion import Conversion, Task
from dcr.trainer.megatron.digest import digest_of
from dcr.trainer.megatron.inspection import Inspection, Portion, inspect_live
from dcr.trainer.megatron.listing import list_tasks, missing
from dcr.trainer.megatron.lockstep import PEER_GRACE_S, Lockstep
from dcr.trainer.megatron.outline import Group
from dcr.trainer.megatron.projection import Residual, learn, part_of
from dcr.trainer.megatron.replicas import Replicas
from dcr.trainer.share import OwnedShard, Share
from dcr.trainer.snapshot import Live
from dcr.trainer.torch.ownership import Ownership, Shard, assign
from dcr.trainer.torch.ranks import Ranks

_RESIDUAL = "residual baseline"
"""The part of a canonical tensor whose committed bits are kept whole."""


class MegatronSource:
    """The owner of one training rank (DESIGN section 5, D10, D13).

    Elements of direct tasks are compared where they lie, and projected; full tensors are assembled for residual tasks
    alone, and only where something they are made of has changed (paper section 4.3).  The committed bits of both lie in
    host memory: a tracker of each direct shard at one of its holders, each residual canonical tensor at one rank.

    ``prepare`` is collective and comes after the weights have changed; every attempt that follows, and the fold, use
    what it has converted, so that no attempt waits for another rank.  Only the constructor, ``prepare`` and
    ``gather_state`` are collective.

    Args:
        conversion: the trainer's own; it is run several times while this constructs, with other tensors.
        process_group: all ranks that hold the model; None is the default group, or one process without any.
        chunk_elements: elements handled at once; a chunk needs up to 72 bytes of temporary memory for each element.
        check_replicas: compare the bits of replicas on different ranks by digests, once.
        check_replicas_always: compare them in every ``prepare`` too.
        peer_grace_s: how long a rank may still be inside a conversion task that another rank has failed in.
        cache_folder: where what was learned is kept for the next start; one for all ranks or one each.  None keeps
            nothing.  Either all ranks have one or none.
        step: told of each step of the construction.

    Attributes:
        specs: all canonical tensors, in order of name.
        owner: this owner's name.
        ownership: bytes by rank.
        residual: residual tasks, with reasons.
        residual_specs: canonical tensors of residual tasks.
        memory_bytes: host memory of this rank's committed bits.

    Raises:
        RefusedError: on every rank alike, by name: see ``projection.learn``; or replicas differ.
        OutOfStepError: on every rank alike: a conversion failed on one rank inside its collectives.
    """

    def __init__(
        self,
        conversion: Conversion,
        *,
        process_group: dist.ProcessGroup | None = None,
        chunk_elements: int = 1 << 22,
        check_replicas: bool = True,
        check_replicas_always: bool = False,
        peer_grace_s: float = PEER_GRACE_S,
        cache_folder: Path | None = None,
        step: Callable[[str], None] = untold,
    ) -> None:
        self._conversion = conversion
        self._ranks = Ranks(process_group)
        self._ranks.refuse_differing(check_replicas=check_replicas, check_replicas_always=check_replicas_always)
        self._lockstep = Lockstep(self._ranks, peer_grace_s=peer_grace_s)
        step("learns what the conversion does, all ranks together")
        projection = learn(conversion, self._lockstep, cache_folder)
        self._tasks = list_tasks(conversion, self._ranks)
        self._layout = self._layout_of(self._tasks)
        self._state = conversion.state()
        self.specs: tuple[TensorSpec, ...] = projection.specs
        self.owner = f"rank-{self._ranks.rank}"
        self.residual: tuple[Residual, ...] = tuple(projection.residual.values())
        self._residual = projection.residual
        self._pieces = projection.pieces
        self._groups = projection.groups
        self._numbers = {spec.name: number for number, spec in enumerate(self.specs)}
        self.residual_specs = tuple(self.specs[self._numbers[name]] for g in self._groups for name in g.names)
        self._bases = [0]
        for spec in self.specs:
            self._bases.append(self._bases[-1] + spec.numel)
        parts = {number: part_of(piece) for number, piece in projection.pieces.items()}
        step(f"chooses owners of {len(self.specs)} canonical tensors, and compares replicas, all ranks together")
        self.ownership, self._replicas = self._assign(parts)
        if check_replicas:
            self._replicas.refuse_differing(self._tasks, self._ranks)
        self._check_replicas_always = check_replicas_always
        step("copies what this rank owns into host memory")
        shards = [
            OwnedShard(
                number, Tracker(self._tasks[number].name, live, chunk_elements=chunk_elements), self._maps(piece)
            )
            for number, piece in projection.pieces.items()
            if (live := self._tasks[number].tensor) is not None
            and self.ownership.owner[self._tasks[number].name, parts[number]] == self._ranks.rank
        ]
        self._owned = tuple(shard.number for shard in shards)
        step(f"converts {len(self.residual_specs)} tensors that are not projected directly, all ranks together")
        self._inputs = self._digests_of_inputs()
        self._candidate_inputs: dict[str, str] | None = None
        self._candidates = self._convert(self._groups)
        shards += [
            OwnedShard(
                len(self._tasks) + number,
                Tracker(self.specs[number].name, tensor, chunk_elements=chunk_elements),
                (IndexMap((Box.of((tensor.numel(),), (1,), (1,), 0, self._bases[number]),)),),
            )
            for number, tensor in self._candidates.items()
            if tensor.numel()
        ]
        self._candidates = {}
        step("digests what this rank owns, and waits for the other ranks")
        self._share = Share(self.owner, self.specs, self._bases[:-1], shards)
        self.owned_elements = self._share.owned_elements
        self.memory_bytes = sum(shard.tracker.numel * shard.tracker.dtype.itemsize for shard in shards)
        counts = self._ranks.gather(self.owned_elements)
        assert sum(counts) == self._bases[-1], f"ranks own {counts} elements of {self._bases[-1]}"

    @property
    def baseline_digest(self) -> ContentDigest | None:
        """This owner's share of the committed version's content digest; None when the baseline is lost."""
        return self._share.baseline_digest

    @property
    def baseline_digests(self) -> Mapping[str, ContentDigest] | None:
        """The same by canonical tensor, brought forward from the changed elements alone."""
        return self._share.baseline_digests

    @property
    def candidate_digest(self) -> ContentDigest | None:
        """This owner's share of the target's content digest; None until a forward ``changes`` was read to its end."""
        return self._share.candidate_digest

    @property
    def changes_found(self) -> Mapping[str, ChangeCount]:
        """See :attr:`dcr.runtime.source.Source.changes_found`."""
        return self._share.changes_found

    @property
    def compared(self) -> tuple[int, int]:
        """See :attr:`dcr.runtime.source.Source.compared`."""
        return self._share.compared

    def prepare(self) -> None:
        """Take the live weights as the candidate: find what residual tasks need, and convert it; collective.

        Raises:
            RefusedError: on every rank alike, by name: tensors appeared, are gone or are laid out otherwise; or the
                conversion fails, leaves a tensor out, or comes out with different bits on different ranks; or, if asked
                for, replicas differ.
            OutOfStepError: on every rank alike: a conversion failed on one rank inside its collectives.
        """
        self._refresh()
        # The optimizer may have written them on a stream that the threads which read them know nothing of.
        devices = {task.tensor.device for task in self._tasks if task.tensor is not None}
        for device in devices - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)
        self._candidate_inputs = None
        if self._check_replicas_always:
            self._replicas.refuse_differing(self._tasks, self._ranks)
        inputs = self._digests_of_inputs()
        groups = self._affected(inputs)
        self._candidates = self._convert(groups)
        self._candidate_inputs = inputs

    def changes(self, kind: Kind) -> Iterator[Change]:
        """What this owner emits in an attempt of this kind, in chunks; not collective.  See ``Share.changes``.

        Raises:
            RefusedError: as ``Share.changes``, or if ``prepare`` was not called since the last fold, or weights that
                residual tasks are made of have changed since.
        """
        return self._share.changes(kind, self._look)

    def nonfinite(self) -> Mapping[str, NonFinite]:
        """New NaN and infinities among the owned elements, by canonical tensor; not collective.  See ``Share``.

        Raises:
            RefusedError: as ``changes``.
        """
        return self._share.nonfinite(self._look)

    def snapshot(self) -> None:
        """Pin the candidate by a copy, just after ``prepare``; not collective.  See ``Share.snapshot``.

        What ``prepare`` converted is in the copy then, and nowhere else.

        Raises:
            RefusedError: if ``prepare`` was not called since the last fold, or a live tensor is gone.
        """
        self._share.snapshot(self._prepared)
        self._candidates = {}

    def hold(self) -> None:
        """Read the live weights from here on; ``prepare`` comes next.  See ``Share.hold``."""
        self._share.hold()

    def fold(self, expected: ContentDigest) -> None:
        """Bring the baseline to the candidate in place, after the commit (D13); may be run again at any time.

        Args:
            expected: this owner's share of the committed candidate's digest.

        Raises:
            CandidateChangedError: if what was folded has another digest; the baseline is lost then.
        """
        self._share.fold(expected, self._stored)
        if self._candidate_inputs is not None:
            self._inputs, self._candidate_inputs = self._candidate_inputs, None
        self._candidates = {}

    def gather_state(self) -> dict[str, torch.Tensor] | None:
        """The checkpoint by the conversion alone, not by the projection; collective.

        Returns:
            On the first rank the canonical tensors, contiguous copies in host memory; None elsewhere.
        """
        state = {}

        def take(_: int, name: str, tensor: torch.Tensor) -> None:
            if self._ranks.rank == 0:
                state[name] = tensor.clone(memory_format=torch.contiguous_format)

        everything = range(len(self._tasks))
        if failure := self._lockstep.run(self._conversion, self._tasks, everything, lambda _, live: live, take):
            raise RefusedError(str(failure))
        return state if self._ranks.rank == 0 else None

    def inspect(self) -> Inspection:
        """What of the model is projected directly, what is not and why, who owns it and what it costs; collective.

        Returns:
            The same on every rank; printing it shows a table.
        """
        itemsize = {spec.name: spec.dtype.itemsize for spec in self.specs}
        portions = []
        for number in self._owned:
            task, piece = self._tasks[number], self._pieces[number]
            sizes = {name: index_map.numel * itemsize[name] for name, index_map in piece.items()}
            portions.append(Portion(task.name, task.kind, "", sizes))
        for group in self._groups:
            made = [self.specs[self._numbers[name]] for name in group.names]
            sizes = {
                spec.name: spec.numel * spec.dtype.itemsize
                for spec in made
                if self.ownership.owner[spec.name, _RESIDUAL] == self._ranks.rank
            }
            for number in group.numbers:  # what they make together is counted with the first
                whole = self._residual[number]
                counted = sizes if number == group.numbers[0] else {}
                portions.append(Portion(whole.task, whole.kind, whole.reason, counted))
        return inspect_live(portions, self.ownership.bytes_by_rank, self.memory_bytes, self._ranks)

    def _refresh(self) -> None:
        """Find the live tensors anew, where a rank has others than before; collective."""
        state = self._conversion.state()
        if not any(self._ranks.gather(state != self._state)):
            return
        tasks = list_tasks(self._conversion, self._ranks)
        layout = self._layout_of(tasks)
        problem = None
        for ours, theirs, found in ((layout, self._layout, "appeared in"), (self._layout, layout, "is gone from")):
            known = set(theirs)
            for line in ours:
                if line not in known and problem is None:
                    problem = f"[{line}] {found} the model since this source was made; make a new one"
        if problem is None and layout != self._layout:
            # Maps and baselines go by number.
            problem = "the model's tensors are listed in another order since this source was made; make a new one"
        self._ranks.refuse_together(problem)
        self._tasks, self._state = tasks, state

    def _layout_of(self, tasks: Sequence[Task]) -> list[str]:
        others = self._conversion.others()
        return [task.layout for task in tasks] + [
            f"{name}: {tensor.dtype} {tuple(tensor.shape)}, no task's" for name, tensor in others.items()
        ]

    def _assign(self, parts: Mapping[int, str]) -> tuple[Ownership, Replicas]:
        """Owners of direct shards and of residual canonical tensors, balanced together, and replicas; collective."""
        held = {}
        for number, part in parts.items():
            tensor = self._tasks[number].tensor
            assert tensor is not None, "a piece is of a tensor that this rank holds"
            held[number] = (self._tasks[number].name, part, tensor.numel() * tensor.element_size())
        holders: dict[tuple[str, str, int], list[int]] = {}
        for rank, theirs in enumerate(self._ranks.gather(list(held.values()))):
            for key in theirs:
                holders.setdefault(key, []).append(rank)
        everyone = tuple(range(self._ranks.count))
        shards = [Shard(*key, tuple(ranks)) for key, ranks in holders.items()]
        shards += [Shard(s.name, _RESIDUAL, s.numel * s.dtype.itemsize, everyone) for s in self.residual_specs]
        replicas = {number: parts[number] for number, key in held.items() if len(holders[key]) > 1}
        return assign(shards, self._ranks.count), Replicas(replicas)

    def _maps(self, piece: Mapping[str, IndexMap]) -> tuple[IndexMap, ...]:
        """A piece in checkpoint space: one map, or one for each canonical tensor if they repeat source elements."""
        moved = [index_map.moved(target=self._bases[self._numbers[name]]) for name, index_map in piece.items()]
        try:
            return (IndexMap.union(box for index_map in moved for box in index_map.boxes),)
        except RefusedError:
            return tuple(moved)

    def _digests_of_inputs(self) -> dict[str, str]:
        """Digests of what residual tasks can be made of, as this rank holds it; empty without residual tasks."""
        if not self._groups:
            return {}
        everything = any(group.reads_live for group in self._groups)
        numbers = range(len(self._tasks)) if everything else self._residual
        tensors = {str(number): self._tasks[number].tensor for number in numbers}
        held = {key: tensor for key, tensor in tensors.items() if tensor is not None} | dict(self._conversion.others())
        return {key: digest_of(tensor) for key, tensor in held.items()}

    def _affected(self, inputs: Mapping[str, str]) -> list[Group]:
        """The groups of residual tasks that something has changed of, on any rank; collective."""
        mine = {key for key, digest in inputs.items() if self._inputs.get(key) != digest}
        lost = self._share.baseline_digest is None
        everywhere = self._ranks.gather((mine, lost))
        changed = {key for keys, _ in everywhere for key in keys}
        tasks = {str(number) for number in range(len(self._tasks))}
        # What no task names may go into any of them.
        if any(lost for _, lost in everywhere) or not changed <= tasks:
            return list(self._groups)
        return [
            group
            for group in self._groups
            if (changed and group.reads_live) or any(str(number) in changed for number in group.numbers)
        ]

    def _convert(self, groups: Iterable[Group]) -> dict[int, torch.Tensor]:
        """Convert groups of residual tasks; this rank's canonical tensors by number.  Collective.

        Raises:
            RefusedError: on every rank alike: the conversion fails, or its tensors are not those that were learned, the
                same on all ranks.
        """
        groups = list(groups)
        wanted = {name for group in groups for name in group.names}
        if not wanted:
            return {}
        numbers = sorted(number for group in groups for number in group.numbers)
        mine: dict[int, torch.Tensor] = {}
        digests: dict[str, str] = {}
        problem = None

        def take(_: int, name: str, tensor: torch.Tensor) -> None:
            nonlocal problem
            found = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
            if name not in wanted or found != self.specs[self._numbers[name]] or name in digests:
                problem = f"canonical {name} comes out as {found}, not as it was learned; make a new source"
                return
            digests[name] = digest_of(tensor)
            if self.ownership.owner[name, _RESIDUAL] == self._ranks.rank:
                mine[self._numbers[name]] = tensor.clone(memory_format=torch.contiguous_format)

        if failure := self._lockstep.run(self._conversion, self._tasks, numbers, lambda _, live: live, take):
            raise RefusedError(str(failure))
        if problem is None and (missing := wanted - digests.keys()):
            problem = f"canonical {min(missing)} does not come out of the conversion any more; make a new source"
        self._ranks.refuse_together(problem)
        for rank, theirs in enumerate(self._ranks.gather(digests)):
            for name in sorted(wanted):
                if theirs[name] != digests[name]:
                    raise RefusedError(
                        f"canonical {name}: it is converted to different bits on ranks {rank} and {self._ranks.rank}; "
                        "replicas of what it is made of differ: synchronise them first"
                    )
        return mine

    def _prepared(self) -> Live:
        if self._candidate_inputs is None:
            raise RefusedError(f"owner {self.owner}: call prepare() on every rank once the weights have changed")
        return self._stored()

    def _look(self) -> Live:
        live = self._prepared()
        if self._digests_of_inputs() != self._candidate_inputs:
            raise RefusedError(
                f"owner {self.owner}: weights of residual tasks have changed since prepare(); call it again on every "
                "rank, and keep the optimizer from stepping until push() returns, or use begin_push()"
            )
        return live

    def _stored(self) -> Live:
        if problem := missing(self._tasks, self._conversion.others()):
            raise RefusedError(f"owner {self.owner}: {problem}")
        return self._live

    def _live(self, number: int) -> torch.Tensor | None:
        if number < len(self._tasks):
            return self._tasks[number].tensor
        return self._candidates.get(number - len(self._tasks))
