---------------------------- MODULE RefitTraces -----------------------------
(***************************************************************************)
(* The same protocol with the step that was taken written into the state,   *)
(* so that a behaviour can be replayed step by step, and with every step    *)
(* that could have been taken instead: what is not in there is forbidden,   *)
(* and must be refused by whoever replays it.  A field that a step has no   *)
(* use for is empty; what else it chose shows in what it changed.           *)
(* For TLC alone: Apalache knows no ENABLED.                                *)
(***************************************************************************)
EXTENDS MCRefit

VARIABLES
  (*
    @typeAlias: step = { name: Str, coordinator: Str, owner: Str, engine: Str, rank: Str, epoch: Int, incarnation: Int,
                         cell: Str, kind: Str, silent: Str };
  *)
  \* The step that led here.
  \* @type: $step;
  step,
  \* The steps that were enabled where it was taken.
  \* @type: Set($step);
  could,
  \* The model's constants, for whoever replays.
  \* @type: { owner_of: Str -> Str, kinds: Set(Str), enough: Set(Set(Str)), attempts: Int,
  \*         async: Bool, stale_reports: Bool, reload: Bool };
  setting

\* @type: (Str) => $step;
Named(name) == [ name |-> name, coordinator |-> "", owner |-> "", engine |-> "", rank |-> "", epoch |-> 0,
                 incarnation |-> 0, cell |-> "", kind |-> "", silent |-> "" ]
\* @type: (Str, Str) => $step;
ByCoordinator(name, c) == [ Named(name) EXCEPT !.coordinator = c ]
\* @type: (Str, Str) => $step;
ByOwner(name, o) == [ Named(name) EXCEPT !.owner = o ]
\* @type: (Str, Str) => $step;
ByEngine(name, e) == [ Named(name) EXCEPT !.engine = e ]
\* @type: (Str, Str, Str) => $step;
ByRank(name, e, r) == [ Named(name) EXCEPT !.engine = e, !.rank = r ]

-----------------------------------------------------------------------------
(* Every step by name, with what it chose.                                  *)

\* @type: $step;
CandidateReadyStep == Named("CandidateReady")
\* @type: ($write) => $step;
LateWriteStep(w) == [ ByCoordinator("LateWrite", w.by) EXCEPT !.epoch = w.record.revision ]
\* @type: (Str, Str, Str) => $step;
OpenAttemptStep(c, kind, s) == [ ByCoordinator("OpenAttempt", c) EXCEPT !.kind = kind, !.silent = s ]
\* @type: (Str) => $step;
RollBackStep(c) == ByCoordinator("RollBack", c)
\* @type: (Str) => $step;
OrderOpenApplyStep(c) == ByCoordinator("OrderOpenApply", c)
\* @type: (Str) => $step;
AttemptFailedStep(c) == ByCoordinator("AttemptFailed", c)
\* @type: (Str) => $step;
CommitStep(c) == ByCoordinator("Commit", c)
\* @type: (Str) => $step;
StopStep(c) == ByCoordinator("Stop", c)
\* @type: (Str) => $step;
AbandonStep(c) == ByCoordinator("Abandon", c)
\* @type: (Str) => $step;
PublishStep(c) == ByCoordinator("Publish", c)
\* @type: (Str) => $step;
FinishTransitionStep(c) == ByCoordinator("FinishTransition", c)
\* @type: (Str, Str) => $step;
OpenRestoreStep(c, s) == [ ByCoordinator("OpenRestore", c) EXCEPT !.silent = s ]
\* @type: (Str) => $step;
EndRestoreStep(c) == ByCoordinator("EndRestore", c)
\* @type: (Str, Str) => $step;
AdmitStep(c, s) == [ ByCoordinator("Admit", c) EXCEPT !.silent = s ]
\* @type: (Str) => $step;
TakeOverStep(c) == ByCoordinator("TakeOver", c)
\* @type: (Str) => $step;
ReadBackStep(c) == ByCoordinator("ReadBack", c)
\* @type: (Str) => $step;
WriteAgainStep(c) == ByCoordinator("WriteAgain", c)
\* @type: (Str) => $step;
FatalStep(c) == ByCoordinator("Fatal", c)
\* @type: (Str, $order) => $step;
EmitStep(o, order) == [ ByOwner("Emit", o) EXCEPT !.epoch = order.epoch ]
\* @type: (Str) => $step;
SealStep(o) == ByOwner("Seal", o)
\* @type: (Str, $order) => $step;
EmitFailedStep(o, order) == [ ByOwner("EmitFailed", o) EXCEPT !.epoch = order.epoch ]
\* @type: (Str) => $step;
BeginFoldStep(o) == ByOwner("BeginFold", o)
\* @type: (Str) => $step;
FoldCellStep(o) == ByOwner("FoldCell", o)
\* @type: (Str) => $step;
EndFoldStep(o) == ByOwner("EndFold", o)
\* @type: (Str) => $step;
LoseBaselineStep(o) == ByOwner("LoseBaseline", o)
\* @type: (Str) => $step;
StepCandidateStep(o) == ByOwner("StepCandidate", o)
\* @type: (Str) => $step;
OwnerRestartStep(o) == ByOwner("OwnerRestart", o)
\* @type: (Str) => $step;
CloseGateStep(e) == ByEngine("CloseGate", e)
\* @type: (Str) => $step;
LoseRecordStep(e) == ByEngine("LoseRecord", e)
\* @type: (Str) => $step;
GateClosedStep(e) == ByEngine("GateClosed", e)
\* @type: (Str) => $step;
OpenGateStep(e) == ByEngine("OpenGate", e)
\* @type: (Str) => $step;
LearnCommitStep(e) == ByEngine("LearnCommit", e)
\* @type: (Str, Int) => $step;
OpenApplyStep(e, epoch) == [ ByEngine("OpenApply", e) EXCEPT !.epoch = epoch ]
\* @type: (Str) => $step;
EngineRestartStep(e) == ByEngine("EngineRestart", e)
\* @type: (Str, Str, $order) => $step;
FenceStep(e, r, order) == [ ByRank("Fence", e, r) EXCEPT !.epoch = order.epoch ]
\* @type: (Str, Str) => $step;
StageStep(e, r) == ByRank("Stage", e, r)
\* @type: (Str, Str, $payload) => $step;
BeginWriteStep(e, r, m) == [ ByRank("BeginWrite", e, r) EXCEPT
     !.epoch = m.epoch, !.owner = m.owner, !.incarnation = m.incarnation, !.cell = m.cell ]
\* @type: (Str, Str) => $step;
EndWriteStep(e, r) == ByRank("EndWrite", e, r)
\* @type: (Str, Str) => $step;
FailWriteStep(e, r) == ByRank("FailWrite", e, r)
\* @type: (Str, Str) => $step;
AcknowledgeStep(e, r) == ByRank("Acknowledge", e, r)

-----------------------------------------------------------------------------
(* What could be done.                                                      *)

Could ==
  UNION {
    IF ENABLED CandidateReady THEN { CandidateReadyStep } ELSE {},
    UNION { IF ENABLED LateWrite(w) THEN { LateWriteStep(w) } ELSE {} : w \in writes },
    UNION { IF ENABLED OpenAttemptOf(c, kind, s) THEN { OpenAttemptStep(c, kind, s) } ELSE {} :
            c \in Coordinators, kind \in Kinds, s \in Engines \union { "" } },
    UNION { IF ENABLED RollBack(c) THEN { RollBackStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED OrderOpenApply(c) THEN { OrderOpenApplyStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED AttemptFailed(c) THEN { AttemptFailedStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED Commit(c) THEN { CommitStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED Stop(c) THEN { StopStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED Abandon(c) THEN { AbandonStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED Publish(c) THEN { PublishStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED FinishTransition(c) THEN { FinishTransitionStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED OpenRestoreBut(c, s) THEN { OpenRestoreStep(c, s) } ELSE {} :
            c \in Coordinators, s \in Engines \union { "" } },
    UNION { IF ENABLED EndRestore(c) THEN { EndRestoreStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED AdmitBut(c, s) THEN { AdmitStep(c, s) } ELSE {} :
            c \in Coordinators, s \in Engines \union { "" } },
    UNION { IF ENABLED TakeOver(c) THEN { TakeOverStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED ReadBack(c) THEN { ReadBackStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED WriteAgain(c) THEN { WriteAgainStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED Fatal(c) THEN { FatalStep(c) } ELSE {} : c \in Coordinators },
    UNION { IF ENABLED EmitFor(o, order) THEN { EmitStep(o, order) } ELSE {} : o \in Owners, order \in orders },
    UNION { IF ENABLED Seal(o) THEN { SealStep(o) } ELSE {} : o \in Owners },
    UNION { IF ENABLED EmitFailedFor(o, order) THEN { EmitFailedStep(o, order) } ELSE {} :
            o \in Owners, order \in orders },
    UNION { IF ENABLED BeginFold(o) THEN { BeginFoldStep(o) } ELSE {} : o \in Owners },
    UNION { IF ENABLED FoldCell(o) THEN { FoldCellStep(o) } ELSE {} : o \in Owners },
    UNION { IF ENABLED EndFold(o) THEN { EndFoldStep(o) } ELSE {} : o \in Owners },
    UNION { IF ENABLED LoseBaseline(o) THEN { LoseBaselineStep(o) } ELSE {} : o \in Owners },
    UNION { IF ENABLED StepCandidate(o) THEN { StepCandidateStep(o) } ELSE {} : o \in Owners },
    UNION { IF ENABLED OwnerRestart(o) THEN { OwnerRestartStep(o) } ELSE {} : o \in Owners },
    UNION { IF ENABLED CloseGate(e) THEN { CloseGateStep(e) } ELSE {} : e \in Engines },
    UNION { IF ENABLED LoseRecord(e) THEN { LoseRecordStep(e) } ELSE {} : e \in Engines },
    UNION { IF ENABLED GateClosed(e) THEN { GateClosedStep(e) } ELSE {} : e \in Engines },
    UNION { IF ENABLED OpenGate(e) THEN { OpenGateStep(e) } ELSE {} : e \in Engines },
    UNION { IF ENABLED LearnCommit(e) THEN { LearnCommitStep(e) } ELSE {} : e \in Engines },
    UNION { IF ENABLED OpenApplyFor(e, epoch) THEN { OpenApplyStep(e, epoch) } ELSE {} :
            e \in Engines, epoch \in applies },
    UNION { IF ENABLED EngineRestart(e) THEN { EngineRestartStep(e) } ELSE {} : e \in Engines },
    UNION { IF ENABLED FenceFor(e, r, order) THEN { FenceStep(e, r, order) } ELSE {} :
            e \in Engines, r \in Ranks, order \in orders },
    UNION { IF ENABLED Stage(e, r) THEN { StageStep(e, r) } ELSE {} : e \in Engines, r \in Ranks },
    UNION { IF ENABLED BeginWriteOf(e, r, m) THEN { BeginWriteStep(e, r, m) } ELSE {} :
            e \in Engines, r \in Ranks, m \in net },
    UNION { IF ENABLED EndWrite(e, r) THEN { EndWriteStep(e, r) } ELSE {} : e \in Engines, r \in Ranks },
    UNION { IF ENABLED FailWrite(e, r) THEN { FailWriteStep(e, r) } ELSE {} : e \in Engines, r \in Ranks },
    UNION { IF ENABLED Acknowledge(e, r) THEN { AcknowledgeStep(e, r) } ELSE {} : e \in Engines, r \in Ranks }
  }

StepInit ==
  /\ Init
  /\ step = Named("Init")
  /\ could = {}
  /\ setting = [ owner_of |-> OwnerOf, kinds |-> Kinds, enough |-> Enough, attempts |-> MaxAttempts,
                 async |-> Async, stale_reports |-> StaleReports, reload |-> Reload ]

-----------------------------------------------------------------------------

StepCandidateReady == CandidateReady /\ step' = CandidateReadyStep
StepLateWrite == \E w \in writes : LateWrite(w) /\ step' = LateWriteStep(w)
\* @type: (Str) => Bool;
StepOpenAttempt(c) == \E kind \in Kinds, s \in Engines \union { "" } : 
  OpenAttemptOf(c, kind, s) /\ step' = OpenAttemptStep(c, kind, s)
\* @type: (Str) => Bool;
StepRollBack(c) == RollBack(c) /\ step' = RollBackStep(c)
\* @type: (Str) => Bool;
StepOrderOpenApply(c) == OrderOpenApply(c) /\ step' = OrderOpenApplyStep(c)
\* @type: (Str) => Bool;
StepAttemptFailed(c) == AttemptFailed(c) /\ step' = AttemptFailedStep(c)
\* @type: (Str) => Bool;
StepCommit(c) == Commit(c) /\ step' = CommitStep(c)
\* @type: (Str) => Bool;
StepStop(c) == Stop(c) /\ step' = StopStep(c)
\* @type: (Str) => Bool;
StepAbandon(c) == Abandon(c) /\ step' = AbandonStep(c)
\* @type: (Str) => Bool;
StepPublish(c) == Publish(c) /\ step' = PublishStep(c)
\* @type: (Str) => Bool;
StepFinishTransition(c) == FinishTransition(c) /\ step' = FinishTransitionStep(c)
\* @type: (Str) => Bool;
StepOpenRestore(c) == \E s \in Engines \union { "" } : OpenRestoreBut(c, s) /\ step' = OpenRestoreStep(c, s)
\* @type: (Str) => Bool;
StepEndRestore(c) == EndRestore(c) /\ step' = EndRestoreStep(c)
\* @type: (Str) => Bool;
StepAdmit(c) == \E s \in Engines \union { "" } : AdmitBut(c, s) /\ step' = AdmitStep(c, s)
\* @type: (Str) => Bool;
StepTakeOver(c) == TakeOver(c) /\ step' = TakeOverStep(c)
\* @type: (Str) => Bool;
StepReadBack(c) == ReadBack(c) /\ step' = ReadBackStep(c)
\* @type: (Str) => Bool;
StepWriteAgain(c) == WriteAgain(c) /\ step' = WriteAgainStep(c)
\* @type: (Str) => Bool;
StepFatal(c) == Fatal(c) /\ step' = FatalStep(c)
\* @type: (Str) => Bool;
StepEmit(o) == \E order \in orders : EmitFor(o, order) /\ step' = EmitStep(o, order)
\* @type: (Str) => Bool;
StepSeal(o) == Seal(o) /\ step' = SealStep(o)
\* @type: (Str) => Bool;
StepEmitFailed(o) == \E order \in orders : EmitFailedFor(o, order) /\ step' = EmitFailedStep(o, order)
\* @type: (Str) => Bool;
StepBeginFold(o) == BeginFold(o) /\ step' = BeginFoldStep(o)
\* @type: (Str) => Bool;
StepFoldCell(o) == FoldCell(o) /\ step' = FoldCellStep(o)
\* @type: (Str) => Bool;
StepEndFold(o) == EndFold(o) /\ step' = EndFoldStep(o)
\* @type: (Str) => Bool;
StepLoseBaseline(o) == LoseBaseline(o) /\ step' = LoseBaselineStep(o)
\* @type: (Str) => Bool;
StepStepCandidate(o) == StepCandidate(o) /\ step' = StepCandidateStep(o)
\* @type: (Str) => Bool;
StepOwnerRestart(o) == OwnerRestart(o) /\ step' = OwnerRestartStep(o)
\* @type: (Str) => Bool;
StepCloseGate(e) == CloseGate(e) /\ step' = CloseGateStep(e)
\* @type: (Str) => Bool;
StepLoseRecord(e) == LoseRecord(e) /\ step' = LoseRecordStep(e)
\* @type: (Str) => Bool;
StepGateClosed(e) == GateClosed(e) /\ step' = GateClosedStep(e)
\* @type: (Str) => Bool;
StepOpenGate(e) == OpenGate(e) /\ step' = OpenGateStep(e)
\* @type: (Str) => Bool;
StepLearnCommit(e) == LearnCommit(e) /\ step' = LearnCommitStep(e)
\* @type: (Str) => Bool;
StepOpenApply(e) == \E epoch \in applies : OpenApplyFor(e, epoch) /\ step' = OpenApplyStep(e, epoch)
\* @type: (Str) => Bool;
StepEngineRestart(e) == EngineRestart(e) /\ step' = EngineRestartStep(e)
\* @type: (Str, Str) => Bool;
StepFence(e, r) == \E order \in orders : FenceFor(e, r, order) /\ step' = FenceStep(e, r, order)
\* @type: (Str, Str) => Bool;
StepStage(e, r) == Stage(e, r) /\ step' = StageStep(e, r)
\* @type: (Str, Str) => Bool;
StepBeginWrite(e, r) == \E m \in net : BeginWriteOf(e, r, m) /\ step' = BeginWriteStep(e, r, m)
\* @type: (Str, Str) => Bool;
StepEndWrite(e, r) == EndWrite(e, r) /\ step' = EndWriteStep(e, r)
\* @type: (Str, Str) => Bool;
StepFailWrite(e, r) == FailWrite(e, r) /\ step' = FailWriteStep(e, r)
\* @type: (Str, Str) => Bool;
StepAcknowledge(e, r) == Acknowledge(e, r) /\ step' = AcknowledgeStep(e, r)

StepNext ==
  /\ could' = Could
  /\ UNCHANGED setting
  /\ \/ StepCandidateReady
     \/ StepLateWrite
     \/ \E c \in Coordinators :
          \/ StepOpenAttempt(c)
          \/ StepRollBack(c)
          \/ StepOrderOpenApply(c)
          \/ StepAttemptFailed(c)
          \/ StepCommit(c)
          \/ StepStop(c)
          \/ StepAbandon(c)
          \/ StepPublish(c)
          \/ StepFinishTransition(c)
          \/ StepOpenRestore(c)
          \/ StepEndRestore(c)
          \/ StepAdmit(c)
          \/ StepTakeOver(c)
          \/ StepReadBack(c)
          \/ StepWriteAgain(c)
          \/ StepFatal(c)
     \/ \E o \in Owners :
          \/ StepEmit(o)
          \/ StepSeal(o)
          \/ StepEmitFailed(o)
          \/ StepBeginFold(o)
          \/ StepFoldCell(o)
          \/ StepEndFold(o)
          \/ StepLoseBaseline(o)
          \/ StepStepCandidate(o)
          \/ StepOwnerRestart(o)
     \/ \E e \in Engines :
          \/ StepCloseGate(e)
          \/ StepLoseRecord(e)
          \/ StepGateClosed(e)
          \/ StepOpenGate(e)
          \/ StepLearnCommit(e)
          \/ StepOpenApply(e)
          \/ StepEngineRestart(e)
     \/ \E e \in Engines, r \in Ranks :
          \/ StepFence(e, r)
          \/ StepStage(e, r)
          \/ StepBeginWrite(e, r)
          \/ StepEndWrite(e, r)
          \/ StepFailWrite(e, r)
          \/ StepAcknowledge(e, r)

StepSpec == StepInit /\ [][StepNext]_<< vars, step, could, setting >>

\* States that differ only in what could have been done before are one.
Seen == << vars, step >>
=============================================================================
