"""One example of everything that leaves a process: K, a manifest, and each message."""

from dcr.protocol import messages as m
from dcr.protocol.identity import Base, Kind, Manifest, SealedPayload
from dcr.protocol.layer_changes import LAYERS_REST, LayerChanges
from dcr.protocol.record import CommitRecord, Committed, Direction, Member, OpenTransition, OwnerRef

D0, D1 = "0" * 31 + "a", "0" * 31 + "b"
BASE = Base(Kind.RELATIVE, 6, D0, "v7-c1-3")
LAYERS = (LayerChanges("model.layers.0", 4, 90), LayerChanges(LAYERS_REST, 0, 10))
STATE = m.StorageState(6, D0, ("v7-c1-3",))

RECORD = CommitRecord(
    record_id="policy",
    version=6,
    epoch=11,
    leader="c1",
    fencing_token=2,
    baseline_id=D0,
    members=(Member("e0", 1), Member("e1", 4)),
    open=OpenTransition(
        target=7,
        candidate="v7-c1-3",
        attempts=2,
        kind=Kind.ABSOLUTE,
        owners=(OwnerRef("o0", 9),),
        wire_version=1,
        operations=("add", "xor"),
        content_digest=D1,
        stopped=True,
        direction=Direction.BACK,
        pushes=(5,),
    ),
    committed=Committed(6, 9, "v6-c1-2", (Member("e0", 1),), "f" * 64, "c1-17", (OwnerRef("o0", 9),), pushes=(4,)),
)

MANIFEST = Manifest(
    record_id="policy",
    target=7,
    epoch=10,
    owner="o0",
    owner_incarnation=9,
    base=BASE,
    payloads=(SealedPayload(0, "aa", 3, 40), SealedPayload(1, "bb", 1, 24)),
    content_digest=D1,
    changed_entries=4,
    owned_elements=100,
)

COMPARED = m.ContentsCompared(
    "e0", 1, 10, 5, 100, {"lm_head.weight": "its bits differ"}, 1, {"bias": "no way back"}, 1, "", 0.5
)

ORDERS = (
    m.Prepare("policy", 10, 7, BASE, (OwnerRef("o0", 9),), 4, stage=True),
    m.OpenApply("policy", 10),
    m.Published("policy", 10),
    m.Refuse("policy", 10, "it reads wire version 0"),
    m.Emit("policy", 10, 7, BASE, "add", ("lm_head.weight",), 9),
    m.Fold("policy", 10),
    m.Outcome("policy", 10, 7, "v7-c1-3", "", {"payloads": 2, "members": ["e0"]}, 9, 5, LAYERS),
    m.ShowContents("policy", 10),
    m.CompareContents("policy", 10, 6, (m.TableRef("policy/10/contents/o0/9/d0", "ee"),)),
    m.Verified("policy", 6, 1, COMPARED, 2, ""),
    m.Intervened(
        "policy",
        "c1",
        RECORD,
        "idle",
        "a push waits",
        ("o0",),
        ("the loader raised",),
        "not stopped",
        (m.Standing("e1", "gated", "holds version 6, torn by v7-c1-3"),),
        3,
        again=True,
    ),
)

REPORTS = (
    m.Join("e0", 1, 1, 1, ("add", "xor"), STATE, ("norm.weight",), {"bias": "unknown operator"}),
    m.Prepared("e0", 1, 10, STATE),
    m.Staged("e0", 1, 10),
    m.Acknowledged("e0", 1, 10, "f" * 64, {"apply": 0.5}),
    m.AttemptFailed("e0", 1, 10, "the loader raised", STATE),
    m.Serving("e0", 1, 10, 7),
    m.OwnerJoin("o0", 9, 1, D0),
    m.CandidateReady("o0", 9, 5, "o0 holds 3 NaN", dense=True),
    m.Withdraw("o0", 9, 5),
    m.Sealed("o0", 9, 10, "cc", D1, 2, 64, 4, 100, {"encode": 0.25}, LAYERS),
    m.EmitFailed("o0", 9, 10, "its push was given up", fatal=True, given_up=5),
    m.Folded("o0", 9, 10, D1, "", {"fold": 0.125}),
    m.Verify("policy"),
    m.ContentsShown("o0", 9, 10, m.TableRef("policy/10/contents/o0/9/d0", "ee"), D0, ""),
    COMPARED,
    m.Intervene("policy", m.Intervention.ROLL_BACK, "0f1e2d3c4b5a6978"),
)
