---------------------------- MODULE RefitTraces -----------------------------
(***************************************************************************)
(* The same protocol with the step that was taken written into the state,   *)
(* so that a behaviour can be replayed step by step.  A field that a step   *)
(* has no use for is empty; what else it chose shows in what it changed.    *)
(***************************************************************************)
EXTENDS MCRefit

VARIABLE
  \* @type: { name: Str, coordinator: Str, owner: Str, engine: Str, rank: Str };
  step

\* @type: (Str, Str, Str, Str, Str) => Bool;
Is(name, c, o, e, r) == step' = [ name |-> name, coordinator |-> c, owner |-> o, engine |-> e, rank |-> r ]
\* @type: (Str, Str) => Bool;
ByCoordinator(name, c) == Is(name, c, "", "", "")
\* @type: (Str, Str) => Bool;
ByOwner(name, o) == Is(name, "", o, "", "")
\* @type: (Str, Str) => Bool;
ByEngine(name, e) == Is(name, "", "", e, "")
\* @type: (Str, Str, Str) => Bool;
ByRank(name, e, r) == Is(name, "", "", e, r)

StepInit == Init /\ step = [ name |-> "Init", coordinator |-> "", owner |-> "", engine |-> "", rank |-> "" ]

StepCandidateReady == CandidateReady /\ Is("CandidateReady", "", "", "", "")
StepLateWrite == \E w \in writes : LateWrite(w) /\ ByCoordinator("LateWrite", w.by)
\* @type: (Str) => Bool;
StepOpenAttempt(c) == OpenAttempt(c) /\ ByCoordinator("OpenAttempt", c)
\* @type: (Str) => Bool;
StepRollBack(c) == RollBack(c) /\ ByCoordinator("RollBack", c)
\* @type: (Str) => Bool;
StepOrderOpenApply(c) == OrderOpenApply(c) /\ ByCoordinator("OrderOpenApply", c)
\* @type: (Str) => Bool;
StepAttemptFailed(c) == AttemptFailed(c) /\ ByCoordinator("AttemptFailed", c)
\* @type: (Str) => Bool;
StepCommit(c) == Commit(c) /\ ByCoordinator("Commit", c)
\* @type: (Str) => Bool;
StepStop(c) == Stop(c) /\ ByCoordinator("Stop", c)
\* @type: (Str) => Bool;
StepAbandon(c) == Abandon(c) /\ ByCoordinator("Abandon", c)
\* @type: (Str) => Bool;
StepPublish(c) == Publish(c) /\ ByCoordinator("Publish", c)
\* @type: (Str) => Bool;
StepFinishTransition(c) == FinishTransition(c) /\ ByCoordinator("FinishTransition", c)
\* @type: (Str) => Bool;
StepOpenRestore(c) == OpenRestore(c) /\ ByCoordinator("OpenRestore", c)
\* @type: (Str) => Bool;
StepEndRestore(c) == EndRestore(c) /\ ByCoordinator("EndRestore", c)
\* @type: (Str) => Bool;
StepAdmit(c) == Admit(c) /\ ByCoordinator("Admit", c)
\* @type: (Str) => Bool;
StepTakeOver(c) == TakeOver(c) /\ ByCoordinator("TakeOver", c)
\* @type: (Str) => Bool;
StepReadBack(c) == ReadBack(c) /\ ByCoordinator("ReadBack", c)
\* @type: (Str) => Bool;
StepWriteAgain(c) == WriteAgain(c) /\ ByCoordinator("WriteAgain", c)
\* @type: (Str) => Bool;
StepFatal(c) == Fatal(c) /\ ByCoordinator("Fatal", c)
\* @type: (Str) => Bool;
StepEmit(o) == Emit(o) /\ ByOwner("Emit", o)
\* @type: (Str) => Bool;
StepSeal(o) == Seal(o) /\ ByOwner("Seal", o)
\* @type: (Str) => Bool;
StepEmitFailed(o) == EmitFailed(o) /\ ByOwner("EmitFailed", o)
\* @type: (Str) => Bool;
StepBeginFold(o) == BeginFold(o) /\ ByOwner("BeginFold", o)
\* @type: (Str) => Bool;
StepFoldCell(o) == FoldCell(o) /\ ByOwner("FoldCell", o)
\* @type: (Str) => Bool;
StepEndFold(o) == EndFold(o) /\ ByOwner("EndFold", o)
\* @type: (Str) => Bool;
StepLoseBaseline(o) == LoseBaseline(o) /\ ByOwner("LoseBaseline", o)
\* @type: (Str) => Bool;
StepStepCandidate(o) == StepCandidate(o) /\ ByOwner("StepCandidate", o)
\* @type: (Str) => Bool;
StepOwnerRestart(o) == OwnerRestart(o) /\ ByOwner("OwnerRestart", o)
\* @type: (Str) => Bool;
StepCloseGate(e) == CloseGate(e) /\ ByEngine("CloseGate", e)
\* @type: (Str) => Bool;
StepGateClosed(e) == GateClosed(e) /\ ByEngine("GateClosed", e)
\* @type: (Str) => Bool;
StepOpenGate(e) == OpenGate(e) /\ ByEngine("OpenGate", e)
\* @type: (Str) => Bool;
StepLearnCommit(e) == LearnCommit(e) /\ ByEngine("LearnCommit", e)
\* @type: (Str) => Bool;
StepOpenApply(e) == OpenApply(e) /\ ByEngine("OpenApply", e)
\* @type: (Str) => Bool;
StepEngineRestart(e) == EngineRestart(e) /\ ByEngine("EngineRestart", e)
\* @type: (Str, Str) => Bool;
StepFence(e, r) == Fence(e, r) /\ ByRank("Fence", e, r)
\* @type: (Str, Str) => Bool;
StepStage(e, r) == Stage(e, r) /\ ByRank("Stage", e, r)
\* @type: (Str, Str) => Bool;
StepBeginWrite(e, r) == BeginWrite(e, r) /\ ByRank("BeginWrite", e, r)
\* @type: (Str, Str) => Bool;
StepEndWrite(e, r) == EndWrite(e, r) /\ ByRank("EndWrite", e, r)
\* @type: (Str, Str) => Bool;
StepFailWrite(e, r) == FailWrite(e, r) /\ ByRank("FailWrite", e, r)
\* @type: (Str, Str) => Bool;
StepAcknowledge(e, r) == Acknowledge(e, r) /\ ByRank("Acknowledge", e, r)

StepNext ==
  \/ StepCandidateReady
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

StepSpec == StepInit /\ [][StepNext]_<< vars, step >>
=============================================================================
