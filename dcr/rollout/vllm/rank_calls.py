"""The ranks of one vLLM engine: one call reaches the worker extension of all of them."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from dcr.protocol.errors import DcrError, RefusedError


class EngineCallError(DcrError):
    """A call into vLLM failed or did not return in time; what it has done is unknown."""


class RankCalls:
    """Calls to every rank's ``DcrWorkerExtension``, whichever way the engine is reached.

    Args:
        name: names the engine in errors.
        config: its ``VllmConfig``.
        rpc: ``collective_rpc``: given a method of the worker and its arguments, each rank's result, in order.

    Raises:
        RefusedError: see ``check_config``.

    Attributes:
        names: vLLM's ranks, from 0: pipeline stage by stage, tensor-parallel ranks within each.
    """

    def __init__(self, name: str, config: Any, rpc: Callable[[str, tuple[object, ...]], Iterable[Any]]) -> None:
        check_config(name, config)
        self.names = tuple(map(str, range(config.parallel_config.world_size)))
        self._name = name
        self._rpc = rpc
        self._calls = count()

    def call(self, request: bytes) -> list[bytes]:
        """Send one request to the host of every rank; their answers in the order of ``names``.

        Raises:
            EngineCallError: the call failed in vLLM, or did not return in time.
        """
        number = next(self._calls)
        answers = self._rpc("dcr_call", (number, request))
        # Where a call of somebody else failed on one rank, vLLM leaves the others' answers to it in the queue.
        mine = [a for a in answers if isinstance(a, (tuple, list)) and list(a[:1]) == [number]]
        if len(mine) != len(self.names):
            raise EngineCallError(f"engine {self._name}: ranks answered another call than the last: restart the engine")
        return [bytes(answer) for _, answer in mine]

    def resident_digests(self) -> dict[str, str]:
        """Digest of the stored bits of every parameter and buffer, by name; by ``RANK/name`` if there are several."""
        ranks = list(self._rpc("dcr_resident_digests", ()))
        if len(ranks) == 1:
            return dict(ranks[0])
        return {f"{rank}/{n}": d for rank, digests in zip(self.names, ranks, strict=True) for n, d in digests.items()}

    def layout_reports(self) -> list[dict[str, Any]]:
        """The fields of each rank's ``LayoutReport``, for an operator who wants to know why an engine is refused."""
        return [dict(report) for report in self._rpc("dcr_layout_report", ())]


def check_config(name: str, config: Any) -> None:
    """Refuse an engine that a node cannot keep at one version, by its ``VllmConfig``.

    Raises:
        RefusedError: the engine is data-parallel or spread over hosts, its workers were not given the extension, it
            obeys vLLM's own weight-transfer calls as well, it has a KV connector that cannot be emptied, or encoder
            outputs are kept outside it.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size != 1:
        raise RefusedError(
            f"engine {name}: data_parallel_size={parallel.data_parallel_size}; start one engine for each replica, "
            "with a name of its own, and give a node all of those on its host"
        )
    if parallel.nnodes != 1:
        raise RefusedError(
            f"engine {name}: nnodes={parallel.nnodes}; its ranks must run on one host, where the node shares what "
            "it receives through memory"
        )
    if not parallel.worker_extension_cls:
        raise RefusedError(
            f"engine {name}: its workers cannot be refitted: start it with "
            "worker_extension_cls='dcr.rollout.vllm.extension.DcrWorkerExtension'"
        )
    transfer = config.weight_transfer_config
    if transfer is not None and transfer.backend == "dcr":
        raise RefusedError(
            f"engine {name}: it was started with weight_transfer_config backend 'dcr', whose caller coordinates; a "
            "node agent beside it would be a second coordinator: leave weight_transfer_config out"
        )
    check_caches(name, config)


def check_caches(name: str, config: Any) -> None:
    """Refuse an engine whose ``VllmConfig`` has caches that nothing empties when its weights change (DESIGN D12).

    Raises:
        RefusedError: a KV connector that cannot be emptied, or any encoder-cache connector.
    """
    _check_connector(name, config.kv_transfer_config)
    encoders = config.ec_transfer_config
    if encoders is not None:
        # vLLM's reset of the encoder cache does not reach a connector's store, which is keyed by the input alone.
        raise RefusedError(
            f"engine {name}: its encoder-cache connector {encoders.ec_connector} keeps what older weights computed, "
            "for vLLM has no way to empty one: leave ec_transfer_config out"
        )


def _check_connector(name: str, transfer: Any) -> None:
    """KV blocks outside the engine must go with the weights that made them (DESIGN D12).

    vLLM takes a connector that does not say how to empty it for one that is empty.
    """
    if transfer is None or transfer.kv_connector is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  slow to import
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415  the same
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector  # noqa: PLC0415  the same

    connector = KVConnectorFactory.get_connector_class(transfer)
    # One of several asks each of them, and takes their silence for an answer.
    if connector.reset_cache is KVConnectorBase_V1.reset_cache or issubclass(connector, MultiConnector):
        raise RefusedError(
            f"engine {name}: its KV connector {transfer.kv_connector} keeps what older weights computed, for it has no "
            "reset_cache of its own: leave kv_transfer_config out, or use one that has, such as OffloadingConnector"
        )
