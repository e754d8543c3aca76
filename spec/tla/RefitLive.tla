----------------------------- MODULE RefitLive ------------------------------
(***************************************************************************)
(* What must happen once faults stop.  For TLC alone: Apalache knows no     *)
(* fairness.  Everything that is no fault and no operator's whim happens if *)
(* it may for ever; a coordinator that leads no more need do nothing.       *)
(***************************************************************************)
EXTENDS MCRefit

Fairness ==
  /\ WF_vars(CandidateReady)
  /\ \A c \in Coordinators :
       /\ WF_vars(OpenAttempt(c))
       /\ WF_vars(OrderOpenApply(c))
       /\ WF_vars(AttemptFailed(c))
       /\ WF_vars(Commit(c))
       /\ WF_vars(Abandon(c))
       /\ WF_vars(Publish(c))
       /\ WF_vars(FinishTransition(c))
       /\ WF_vars(OpenRestore(c))
       /\ WF_vars(EndRestore(c))
       /\ WF_vars(Admit(c))
       /\ WF_vars(ReadBack(c))
       /\ WF_vars(WriteAgain(c))
  /\ \A o \in Owners :
       /\ WF_vars(Emit(o))
       /\ WF_vars(Seal(o))
       /\ WF_vars(EmitFailed(o))
       /\ WF_vars(BeginFold(o))
       /\ WF_vars(FoldCell(o))
       /\ WF_vars(EndFold(o))
       /\ WF_vars(LoseBaseline(o))
  /\ \A e \in Engines :
       /\ WF_vars(CloseGate(e))
       /\ WF_vars(GateClosed(e))
       /\ WF_vars(OpenGate(e))
       /\ WF_vars(LearnCommit(e))
       /\ WF_vars(OpenApply(e))
  /\ \A e \in Engines, r \in Ranks :
       /\ WF_vars(Fence(e, r))
       /\ WF_vars(Stage(e, r))
       /\ WF_vars(BeginWrite(e, r))
       /\ WF_vars(EndWrite(e, r))
       /\ WF_vars(Acknowledge(e, r))

FairSpec == Spec /\ Fairness

\* The last version is committed, folded by every owner but one that lost its baseline by a restart or a broken pin, and
\* served by every engine.
Converges ==
  <>[](/\ K.version = MaxVersion
       /\ \A e \in Engines : node[e].gate = "open" /\ node[e].serving = MaxVersion
       /\ \A o \in Owners :
            /\ ~own[o].folding
            /\ own[o].base = MaxVersion \/ own[o].incarnation # 1 \/ faults.steps # MaxSteps)
=============================================================================
