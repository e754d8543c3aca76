"""The specification's one-line bugs, made in the roles instead: which traces show each of them."""

from dataclasses import dataclass

from dcr.protocol import fleet, receiver, registrar
from dcr.protocol.conductor import Conductor
from dcr.protocol.leader import Leader
from dcr.protocol.node import Node
from dcr.protocol.owner import Owner
from dcr.protocol.rank_attempt import RankAttempt
from dcr.protocol.receiver import Receiver
from dcr.protocol.record import CommitRecord
from dcr.protocol.session import Session
from tests.mutation import Mutant


@dataclass(frozen=True)
class CodeMutant(Mutant):
    """The counterpart of a mutant of the specification, under the same name."""

    model: str
    """The model whose traces show it."""
    shows: str
    """The step at which it shows; `assertion` where a role notices by itself."""


_ADMITS = (receiver, fleet, registrar)

CODE_MUTANTS = [
    CodeMutant(
        "restore_before_publication",
        Conductor,
        "open_restore",
        "told or not folding",
        "True",
        "traces_eviction",
        "OpenRestore",
    ),
    CodeMutant(
        "failed_attempt_never_ends",
        Conductor,
        "fail_attempt",
        "why = self._s.broken or reason",
        "why = reason",
        "traces_stop_resume",
        "AttemptFailed",
    ),
    CodeMutant(
        "admitted_by_read_back",
        Node,
        "learned",
        "admitted = Member(self.engine, self.incarnation) in record.members and not under_way",
        'admitted = any(s.stage == "acknowledged" for s in ranks) or record.version == 0',
        "traces_unknown_outcome",
        "LearnCommit",
    ),
    CodeMutant(
        "relative_retry",
        Conductor,
        "open_attempt",
        "kind is not Kind.RELATIVE or not attempts",
        "True",
        "traces_rollback",
        "OpenAttempt",
    ),
    CodeMutant(
        "duplicate_written_again",
        Receiver,
        "payload",
        "if identity in arrived:",
        "if False:",
        "traces_rollback",
        "BeginWrite",
    ),
    CodeMutant(
        "commit_without_compare",
        Leader,
        "conflict",
        "if stored_operation_id == operation_id and revision is not None:",
        "if revision is not None:",
        "traces_failover",
        "OpenAttempt",
    ),
    CodeMutant(
        "ack_before_every_payload",
        RankAttempt,
        "lacks",
        "return any(m.identity(p.sequence) not in where for m in self.manifests.values() for p in m.payloads)",
        "return any(m.payloads and not where for m in self.manifests.values())",
        "traces_fold_restore",
        "Acknowledge",
    ),
    CodeMutant(
        "ack_before_synchronised",
        Receiver,
        "_complete",
        "or self._writing is not None:\n        return []\n    if a.lacks(a.written):",
        "or False:\n        return []\n    if a.lacks(a.seen):",
        "traces_two_ranks",
        "assertion",
    ),
    CodeMutant(
        "ack_without_manifest",
        RankAttempt,
        "lacks",
        "if set(self.manifests) != {o.owner for o in self.order.owners}:",
        "if False:",
        "traces_two_ranks",
        "OpenApply",
    ),
    CodeMutant(
        "stale_epoch_written",
        Receiver,
        "payload",
        "if identity.epoch < self.fence:\n        return []\n    a = self._attempt\n"
        "    if a is None or identity.epoch != a.order.epoch or",
        "a = self._attempt\n    if a is None or identity.epoch > a.order.epoch or",
        "traces_rollback",
        "BeginWrite",
    ),
    CodeMutant(
        "dedup_outlives_its_epoch",
        Receiver,
        "prepare",
        "dropped = self._drop()\n    self._hold(self.seen_through(record))\n    self.fence = order.epoch\n"
        "    a = self._attempt = RankAttempt(order, armed=admits(self.state, order.base))",
        "seen = {} if self._attempt is None else self._attempt.seen\n    dropped = self._drop()\n"
        "    self._hold(self.seen_through(record))\n    self.fence = order.epoch\n"
        "    a = self._attempt = RankAttempt(order, armed=admits(self.state, order.base), seen=seen)",
        "traces_stop_resume",
        "Fence",
    ),
    CodeMutant(
        "engine_opens_as_any_incarnation",
        Node,
        "learned",
        "Member(self.engine, self.incarnation) in record.members",
        "any(m.engine == self.engine for m in record.members)",
        "traces_join",
        "LearnCommit",
    ),
    CodeMutant(
        "baseline_at_emission",
        Owner,
        "emit",
        "self.base = base.version",
        "self.base = base.version + 1",
        "traces_candidate_stepped",
        "Emit",
    ),
    CodeMutant(
        "commit_on_any_acknowledgement",
        Session,
        "acknowledged",
        "set(self.roots) >= self.members",
        "bool(self.roots)",
        "traces_eviction",
        "Commit",
    ),
    CodeMutant(
        "attempts_forgotten_by_take_over",
        CommitRecord,
        "take_over",
        "epoch=self.epoch + 1)",
        "epoch=self.epoch + 1, open=self.open and msgspec.structs.replace(self.open, attempts=0))",
        "traces_failover",
        "TakeOver",
    ),
    CodeMutant(
        "open_by_version_alone",
        Node,
        "learned",
        "if clean and (here or admitted) and not busy:",
        "if clean and not busy:",
        "traces_join",
        "LearnCommit",
    ),
    CodeMutant(
        "open_by_committed_epoch_alone",
        Receiver,
        "_committed_here",
        "self._acknowledged == (c.epoch, c.version, c.manifest_root)",
        "True",
        "traces_join",
        r"(LearnCommit|Fence|OpenAttempt)",
    ),
    CodeMutant(
        "open_by_acknowledgement_alone",
        Receiver,
        "_committed_here",
        "c is not None and self._acknowledged == (c.epoch, c.version, c.manifest_root)",
        "self._acknowledged is not None",
        "traces_two_ranks",
        "LearnCommit",
    ),
    CodeMutant(
        "read_back_believed",
        Leader,
        "record_read",
        'return [Step(self.leader, "WriteAgain", w.record.epoch, operation_id=w.operation_id), w]',
        "return self.written(w.operation_id, (revision or 0) + 1)",
        "traces_unknown_outcome",
        "WriteAgain",
    ),
    CodeMutant(
        "tears_of_another_candidate",
        _ADMITS,
        "admits",
        "return at_base and set(state.torn_by) <= {base.candidate}",
        "return at_base",
        "traces_everything_stale",
        "Fence",
    ),
    CodeMutant(
        "relative_over_tears",
        _ADMITS,
        "admits",
        "return at_base and state.clean",
        "return at_base",
        "traces_stop_resume",
        "OpenAttempt",
    ),
    CodeMutant(
        "identity_without_incarnation_and_digest",
        RankAttempt,
        "expects",
        "OwnerRef(owner, incarnation) in self.order.owners",
        "owner in {o.owner for o in self.order.owners}",
        "traces_owner_restart",
        "BeginWrite",
    ),
    CodeMutant(
        "restore_while_folding",
        Owner,
        "emit",
        "if self.folding or self._owes_fold(base):",
        "if self._owes_fold(base):",
        "traces_eviction",
        "Emit",
    ),
    CodeMutant(
        "emission_repeated",
        Owner,
        "emit",
        "if order.epoch == self.fence:",
        "if False:",
        "traces_candidate_stepped",
        "Emit",
    ),
    CodeMutant(
        "gate_order_without_epoch",
        Node,
        "gate_ready",
        "if epoch < self.fence:",
        "if False:",
        "traces_rollback",
        "OpenGate",
    ),
    CodeMutant(
        "failed_payload_retried_in_its_epoch",
        Receiver,
        "write_failed",
        '*self._fail(a, f"payload {name_of(identity)}: {reason}"),',
        "*([] if a.seen.pop(identity) else []),",
        "traces_stop_resume",
        "FailWrite",
    ),
    CodeMutant(
        "no_mark_before_first_byte",
        Receiver,
        "payload",
        "self.torn_by |= {_TEARS.get(base.kind, base.candidate)}",
        "pass",
        "traces_rollback",
        "BeginWrite",
    ),
    CodeMutant(
        "acknowledgement_outlives_a_write",
        Receiver,
        "payload",
        "self._acknowledged = None",
        "pass",
        "traces_two_ranks",
        "BeginWrite",
    ),
    CodeMutant(
        "write_under_open_gate",
        Node,
        "_open_apply",
        'if self.gate == "closed":',
        "if True:",
        "traces_gate_async",
        "OpenApply",
    ),
    CodeMutant(
        "dense_tears_marked_as_candidate",
        Receiver,
        "payload",
        "_TEARS.get(base.kind, base.candidate)",
        "RESTORE if base.kind is Kind.RESTORE else base.candidate",
        "traces_owner_restart",
        "BeginWrite",
    ),
    CodeMutant(
        "fold_of_other_weights",
        Owner,
        "folded",
        "if baseline_digest != self._fold_content:",
        "if False:",
        "traces_candidate_stepped",
        "LoseBaseline",
    ),
    CodeMutant(
        "stepped_candidate_sealed",
        Owner,
        "emitted",
        "and sealed.content_digest != found:",
        "and False:",
        "traces_candidate_stepped",
        "EmitFailed",
    ),
    CodeMutant(
        "pin_released_before_the_fold",
        Conductor,
        "finish_transition",
        "not self._owing",
        "True",
        "traces_fold_restore",
        "FinishTransition",
    ),
    CodeMutant(
        "mark_cleared_before_the_last_byte",
        Owner,
        "learned",
        "self.folding = True",
        "self.folding = False",
        "traces_rollback",
        "BeginFold",
    ),
    CodeMutant(
        "abandon_without_epoch",
        CommitRecord,
        "abandon",
        "epoch=self.epoch + 1, ",
        "",
        "traces_two_candidates",
        "Abandon",
    ),
    CodeMutant("stop_without_epoch", CommitRecord, "stop", "epoch=self.epoch + 1, ", "", "traces_stop_resume", "Stop"),
    CodeMutant(
        "rollback_turned_forward",
        Conductor,
        "open_attempt",
        "Direction.BACK if back else Direction.FORWARD",
        "Direction.FORWARD",
        "traces_everything_stale",
        "assertion",
    ),
    CodeMutant(
        "take_over_without_epoch",
        CommitRecord,
        "take_over",
        ", epoch=self.epoch + 1",
        "",
        "traces_failover",
        "TakeOver",
    ),
    CodeMutant(
        "commit_without_members",
        Conductor,
        "_open_attempt",
        "len(engines) >= self.members_min",
        "True",
        "traces_everything",
        "assertion",
    ),
    CodeMutant(
        "restore_from_weights",
        Conductor,
        "_new_session",
        "target=record.version + 1 if forward else record.version,",
        "target=record.version + 1,",
        "traces_fold_restore",
        "Emit",
    ),
    CodeMutant(
        "fence_not_raised_by_reading_K",
        Receiver,
        "learn",
        "if record.epoch > self.fence:",
        "if False:",
        "traces_two_candidates",
        "LearnCommit",
    ),
]
"""Each is shown by a trace of its model."""

ON_A_GRAPH = [
    CodeMutant(
        "delta_against_an_unfolded_baseline",
        Owner,
        "emit",
        " or self._owes_fold(base):",
        ":",
        "traces_fold_restore",
        "Emit",
    ),
    CodeMutant(
        "fold_of_another_seal",
        Owner,
        "learned",
        "OwnerRef(self.name, self.incarnation) in c.owners",
        "self.name in {o.owner for o in c.owners}",
        "traces_owner_restart",
        "BeginFold",
    ),
    CodeMutant(
        "gate_opens_after_a_prepare",
        Node,
        "gate_ready",
        "if self._work is not None and not _BUSY.isdisjoint(self._work.stages.values()):",
        "if False:",
        "traces_restore_twice",
        "OpenGate",
    ),
    CodeMutant(
        "prepared_in_vain_is_admitted",
        fleet.Engine,
        "holds_committed",
        " and (self.engaged == 0 or self.engaged != record.epoch)",
        "",
        "traces_restore_in_vain",
        r"(Admit|OpenRestore)",
    ),
    CodeMutant(
        "join_without_baseline_check",
        Receiver,
        "seen_through",
        "self.content_digest == record.baseline_id",
        "True",
        "traces_join",
        r"(LearnCommit|Fence|OpenAttempt)",
    ),
]
"""No trace of the files comes there, but the whole graph of their model does."""

UNSHOWN = {
    "engine_opens_at_older_version": (
        "no trace has an engine that is a member and clean at an older version; `Node.learned` asks for K's version"
    ),
    "fold_after_rollback": (
        "guarded twice: an owner keeps no seal of a rollback; a leader would show it that takes over right after one"
    ),
    "seal_of_another_incarnation": (
        "guarded twice: the leader counts the first seal alone, and compares its root with the acknowledgements"
    ),
}
"""The counterpart is there, but a replay does not tell it from the code: why."""

WITHOUT_COUNTERPART = {
    "commit_twice": "the control plane compares revisions; no role does",
    "late_write_without_compare": "the control plane compares revisions; no role does",
    "prepare_without_drain": "the shell drains before it hands in an order to prepare; the receiver asserts it",
    "restart_keeps_incarnation": "the shell gives a process its incarnation",
}
"""Bugs of what surrounds the roles."""

GUARDED_TWICE = {
    "conductor.py: commit: did not seal,": "names who did not; a session without every seal is not complete either",
    "conductor.py: open_restore: holds no baseline,": (
        "names who does not; without an owner that owes a fold, the baseline is not the committed version either"
    ),
    "node.py: _check_fence: : order of epoch refused: the gate's fence is at": (
        "orders of older epochs are not of the epoch that was prepared, and K has passed them"
    ),
    "receiver.py: _check_order: : order of epoch refused: the fence is at": (
        "an order of an older epoch is not of K's, nor of the epoch that was prepared"
    ),
}
"""Guards without which the next check gives the same result."""
