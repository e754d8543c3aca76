"""Shards that several ranks hold with the same bits, or ought to."""

from collections.abc import Mapping, Sequence

from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron.conversion import Task
from dcr.trainer.megatron.digest import digest_of
from dcr.trainer.torch.ranks import Ranks


class Replicas:
    """Compares replicas by digests; the comparison is collective.

    Args:
        parts: by task, which canonical elements this rank's shard of it has, of those that other ranks hold too.
    """

    def __init__(self, parts: Mapping[int, str]) -> None:
        self._parts = parts

    def refuse_differing(self, tasks: Sequence[Task], ranks: Ranks) -> None:
        """Digest the live tensors, and compare; collective.

        Raises:
            RefusedError: on every rank alike, with the tensor and the ranks.
        """
        mine = {
            (tasks[number].name, part): digest_of(tensor)
            for number, part in self._parts.items()
            if (tensor := tasks[number].tensor) is not None
        }
        holders: dict[tuple[str, str], dict[str, list[int]]] = {}
        for rank, theirs in enumerate(ranks.gather(mine)):
            for key, digest in theirs.items():
                holders.setdefault(key, {}).setdefault(digest, []).append(rank)
        differing = [key for key, by_digest in holders.items() if len(by_digest) > 1]
        if not differing:
            return
        name, part = min(differing)
        among = " and ".join(", ".join(map(str, held)) for held in holders[name, part].values())
        more = f" (and of {len(differing) - 1} other shards)" if len(differing) > 1 else ""
        raise RefusedError(f"{name}: ranks {among} hold replicas with different bits{more}; synchronise them first")
