"""The whole data path without processes: detection to acknowledgement over real bytes, against an untouched dense load.

A trainer's source, its emission into a folder, and a rank's host with its native loader; payloads come twice, in any
order, with stale ones of older epochs among them.
"""

import random
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import nn

from dcr.data_plane.placement.placement import Placement
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import payload_key
from dcr.protocol.identity import Base, Kind, Manifest, encode_manifest, manifest_root
from dcr.protocol.messages import Emit, OpenApply, Prepare, StorageState
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared
from dcr.protocol.record import CommitRecord, Committed, OwnerRef
from dcr.runtime.emission import Emission
from dcr.runtime.rank_host import RankHost
from dcr.runtime.rank_messages import Answer, Attach, Learn, Payload, SealedManifest, WireSpec, decode_answer, encode
from dcr.runtime.settings import Settings
from dcr.trainer.torch.source import TorchSource

INCARNATION = 5
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Quiet and signalling NaN with payloads, of both signs; -0.0; infinities; the smallest and the largest denormal.
SPECIAL = {
    1: [0x7F, 0xFF, 0x80, 0x7E, 0x01, 0x07],
    2: [0x7FC1, 0x7F81, 0xFFC1, 0xFF82, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x007F, 0x7C01, 0x7E01, 0x0000],
    4: [0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x007FFFFF, 0],
    8: [0x7FF8000000000001, 0x7FF0000000000001, 1 << 63, 0x7FF0000000000000, 1, 0],
}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().view(INTEGERS[t.itemsize])


def signed(pattern: int, width: int) -> int:
    return pattern if width == 1 or pattern < 1 << (8 * width - 1) else pattern - (1 << (8 * width))


class Trained(nn.Module):
    """The trainer's layout; its state dict is the checkpoint."""

    def __init__(self) -> None:
        super().__init__()

        def p(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.wide = p(16, 12)
        self.q = p(12, 10)
        self.k = p(5, 10)
        self.f16 = p(33, dtype=torch.float16)
        self.f32 = p(7, 6, dtype=torch.float32)
        self.f64 = p(9, dtype=torch.float64)
        self.f8 = p(6, 8, dtype=torch.float8_e4m3fn)
        self.log = p(16, dtype=torch.float32)
        self.vocab = p(7, 4)
        self.expert = p(4, 4)
        self.register_buffer("counts", torch.zeros(11, dtype=torch.int64))


class Serving(nn.Module):
    """The rollout's layout: fused, transposed, sliced, padded, cast, computed; one tensor lives on another rank."""

    def __init__(self) -> None:
        super().__init__()

        def z(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.wide = z(12, 16)
        self.qk = z(17, 10)
        self.f16 = z(33, dtype=torch.float32)  # cast
        self.f32 = z(4, 6, dtype=torch.float32)  # this rank's rows
        self.f64 = z(9, dtype=torch.float64)
        self.f8 = z(6, 8, dtype=torch.float8_e4m3fn)
        self.decay = z(16, dtype=torch.float32)
        self.vocab = z(10, 4)  # padded
        self.register_buffer("counts", torch.zeros(11, dtype=torch.int64), persistent=False)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def load_weights(self, weights):
        loaded = set()
        for name, w in weights:
            match name:
                case "wide":
                    self.wide.copy_(w.t())
                case "q":
                    self.qk[:12].copy_(w)
                case "k":
                    self.qk[12:].copy_(w)
                case "f32":
                    self.f32.copy_(w[3:])
                case "log":
                    self.decay.copy_(-torch.exp(w))
                case "vocab":
                    self.vocab.zero_()
                    self.vocab[:7].copy_(w)
                case "expert":
                    continue
                case _:
                    getattr(self, name).copy_(w)
            loaded.add({"q": "qk", "k": "qk", "log": "decay"}.get(name, name))
        return loaded


def set_bits(model: nn.Module, rng: random.Random, change: str) -> None:
    """Change stored bits of some elements: none, one, one run, all, or some of them; specials among the new values."""
    tensors = list(model.state_dict().values())
    chosen = rng.randrange(len(tensors))
    for number, t in enumerate(tensors):
        flat = bits(t).view(-1)
        n = flat.numel()
        match change:
            case "none":
                where = []
            case "one":
                where = [rng.randrange(n)] if number == chosen else []
            case "run":
                start = rng.randrange(n)
                where = range(start, rng.randint(start, n))
            case "all":
                where = range(n)
            case _:
                where = [i for i in range(n) if rng.random() < 0.1]
        for i in where:
            width = t.itemsize
            pattern = rng.choice(SPECIAL[width]) if rng.random() < 0.5 else rng.getrandbits(8 * width)
            old = int(flat[i])
            new = signed(pattern, width)
            flat[i] = new if new != old else signed((pattern ^ 1), width)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: bits(t).clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def dense(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The independent answer: a fresh model loads the checkpoint, and nothing else ever happens to it."""
    twin = Serving()
    twin.load_weights(checkpoint.items())
    return stored(twin)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


class DataPath:
    """One trainer, one store, one rank."""

    def __init__(self, trained: Trained, folder: Path, *, chunk_elements: int, loaded: bool) -> None:
        self.trained = trained
        self.source = TorchSource(trained, chunk_elements=chunk_elements)
        self.store = FolderDelivery(folder)
        self.model = Serving()
        self.model.load_weights(state(trained).items())
        digest = self.source.baseline_digest
        assert digest is not None
        self.baseline = digest.hex()
        self.host = RankHost(
            lambda specs: Placement(self.model, self.model.load_weights, specs, sharded=True), state_incarnation=1
        )
        specs = tuple(WireSpec.of(s) for s in self.source.specs)
        (attached,) = self.call(Attach("a", "r", specs, self.baseline if loaded else "")).results
        assert attached.refused == {}
        assert attached.skipped == ("expert",)
        self.set_only = attached.set_only
        self.order: Prepare | None = None

    def call(self, request) -> Answer:
        return decode_answer(self.host.call(encode(request)))

    def state(self) -> StorageState:
        """What the rank says of its storage, with a refusal that changes nothing."""
        answer = decode_answer(self.host.call(b""))
        assert answer.refused
        return answer.state

    def prepare(self, epoch: int, kind: Kind) -> list:
        target = 0 if kind is Kind.RESTORE else 1
        base = Base(kind, 0, "" if kind is Kind.DENSE else self.baseline, "" if kind is Kind.RESTORE else "c")
        self.order = Prepare("r", epoch, target, base, (OwnerRef(self.source.owner, INCARNATION),), 1)
        answer = self.call(PrepareRank(self.order, CommitRecord("r", 0, epoch, "l", 1, self.baseline)))
        assert [type(r) for r in answer.results] == [RankPrepared]
        return list(answer.results)

    def open_apply(self) -> Answer:
        assert self.order is not None
        return self.call(OpenApply("r", self.order.epoch))

    def emit(self, bucket_bytes: int, operation: str) -> tuple[Manifest, list]:
        """Emit the prepared attempt; returns its manifest, and every request that a node would make of it."""
        o = self.order
        assert o is not None
        order = Emit("r", o.epoch, o.target, o.base, operation, self.set_only, INCARNATION)
        manifest = Emission(order, self.source, INCARNATION, self.store, Settings(bucket_bytes=bucket_bytes)).run()
        requests = []
        for p in manifest.payloads:
            identity = manifest.identity(p.sequence)
            data = self.store.get(payload_key(identity), 1 << 30)
            assert data is not None
            assert len(data) == p.size_bytes
            requests.append(Payload(identity, data))
        return manifest, [*requests, SealedManifest(self.source.owner, o.epoch, encode_manifest(manifest))]

    def commit(self, manifest: Manifest) -> None:
        root = manifest_root({manifest.owner: manifest.digest()})
        committed = Committed(1, manifest.epoch, "c", (), root, "op")
        self.call(Learn(CommitRecord("r", 1, manifest.epoch, "l", 1, manifest.content_digest, committed=committed)))


@st.composite
def cases(draw):
    return {
        "seed": draw(st.integers(0, 2**32)),
        "change": draw(st.sampled_from(["none", "one", "run", "all", "some"])),
        "bucket_bytes": draw(st.sampled_from([1, 300, 1200, 9000, 1 << 20])),
        "chunk_elements": draw(st.sampled_from([11, 37, 1 << 20])),
        "kind": draw(st.sampled_from([Kind.RELATIVE, Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE, Kind.RESTORE])),
        "operation": draw(st.sampled_from(["add", "xor"])),
        "before": draw(st.sampled_from(["nothing", "unopened", "torn"])),
    }


def case(**given_):
    return {
        "seed": 1, "change": "some", "bucket_bytes": 300, "chunk_elements": 37, "kind": Kind.RELATIVE,
        "operation": "add", "before": "unopened", **given_,
    }  # fmt: skip


@example(case(change="all", bucket_bytes=1 << 20))
@example(case(change="some", bucket_bytes=1, operation="xor"))
@example(case(change="none"))
@example(case(kind=Kind.ABSOLUTE, before="torn"))
@example(case(kind=Kind.DENSE, before="torn"))
@example(case(kind=Kind.RESTORE, before="torn"))
@given(cases())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_arrives_and_in_whatever_order_storage_equals_a_dense_load(c) -> None:
    rng = random.Random(c["seed"])
    kind, bucket_bytes = c["kind"], c["bucket_bytes"]
    if c["change"] in ("run", "all") or kind in (Kind.DENSE, Kind.RESTORE):
        bucket_bytes = max(bucket_bytes, 600)  # a payload an element would take too long
    trained = Trained()
    set_bits(trained, rng, "all")
    baseline = state(trained)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = DataPath(trained, Path(folder) / "p", chunk_elements=c["chunk_elements"], loaded=True)
        set_bits(trained, rng, c["change"])
        candidate = state(trained)

        # An attempt of an older epoch, of which payloads come late; if it tore storage, it did so somewhere.
        stale = []
        if c["before"] != "nothing":
            path.prepare(1, Kind.RELATIVE)
            _, stale = path.emit(bucket_bytes, c["operation"])
            if c["before"] == "torn":
                path.open_apply()
                for request in rng.sample(stale[:-1], len(stale[:-1]) // 2):
                    assert not path.call(request).refused
                if kind is Kind.RELATIVE and not path.state().clean:
                    kind = Kind.ABSOLUTE  # what a coordinator does when a member is torn

        path.prepare(2, kind)
        path.open_apply()
        manifest, requests = path.emit(bucket_bytes, c["operation"])
        arriving = requests + rng.choices(requests, k=min(len(requests), 20)) + rng.sample(stale, min(len(stale), 20))
        rng.shuffle(arriving)
        roots = []
        for request in arriving:
            answer = path.call(request)
            assert not answer.refused
            assert not any(isinstance(r, RankFailed) for r in answer.results)
            roots += [r.root for r in answer.results if isinstance(r, RankAcknowledged)]
        assert roots == [manifest_root({manifest.owner: manifest.digest()})]
        expected = dense(baseline if kind is Kind.RESTORE else candidate)
        assert same(stored(path.model), expected)

        # Whatever comes after the acknowledgement changes nothing, and the commit makes storage clean at the target.
        for request in rng.sample(arriving, min(len(arriving), 10)):
            assert not path.call(request).results
        if kind is not Kind.RESTORE:
            path.commit(manifest)
        now = path.state()
        assert (now.version, now.clean) == (0 if kind is Kind.RESTORE else 1, True)
        assert same(stored(path.model), expected)


def test_a_chain_of_versions_with_every_kind_of_change(tmp_path: Path) -> None:
    """Twelve transitions of one trainer, relative ones against folded baselines."""
    rng = random.Random(3)
    trained = Trained()
    set_bits(trained, rng, "all")
    with torch.no_grad():
        path = DataPath(trained, tmp_path / "p", chunk_elements=50, loaded=True)
        record = CommitRecord("r", 0, 0, "l", 1, path.baseline)
        for version, change in enumerate(["some", "one", "none", "run", "all", "some"] * 2):
            set_bits(trained, rng, change)
            base = Base(Kind.RELATIVE, version, path.baseline, f"c{version}")
            owner = OwnerRef(path.source.owner, INCARNATION)
            path.order = Prepare("r", version + 1, version + 1, base, (owner,), 1)
            (prepared,) = path.call(PrepareRank(path.order, msgspec.structs.replace(record, epoch=version + 1))).results
            assert isinstance(prepared, RankPrepared)
            path.open_apply()
            manifest, requests = path.emit(500, rng.choice(["add", "xor"]))
            for request in requests:
                path.call(request)
            assert same(stored(path.model), dense(state(trained)))
            digest = path.source.candidate_digest
            assert digest is not None
            path.source.fold(digest)
            path.baseline = digest.hex()
            root = manifest_root({manifest.owner: manifest.digest()})
            after = version + 1
            committed = Committed(after, after, base.candidate, (), root, f"op{after}")
            record = CommitRecord("r", after, after, "l", 1, path.baseline, committed=committed)
            answer = path.call(Learn(record))
            assert answer.state.clean
            assert answer.state.version == after


@pytest.mark.parametrize("bucket_bytes", [300, 700])
def test_a_tensor_that_spans_three_buckets(tmp_path: Path, bucket_bytes: int) -> None:
    trained = Trained()
    with torch.no_grad():
        path = DataPath(trained, tmp_path / "p", chunk_elements=1 << 20, loaded=True)
        bits(trained.wide).add_(1)
        path.prepare(1, Kind.RELATIVE)
        path.open_apply()
        manifest, requests = path.emit(bucket_bytes, "add")
        assert len(manifest.payloads) >= 3
        assert sum(p.entries for p in manifest.payloads) == trained.wide.numel()
        for request in reversed(requests):
            answer = path.call(request)
        assert isinstance(answer.results[-1], RankAcknowledged)
        assert same(stored(path.model), dense(state(trained)))
