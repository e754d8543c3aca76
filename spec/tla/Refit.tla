------------------------------- MODULE Refit --------------------------------
(***************************************************************************)
(* Moving a fleet of engines from committed version v to v + 1 in place.    *)
(*                                                                         *)
(* A leader opens numbered attempts on the commit record K.  Owners send    *)
(* what changed: relative to version v at first, as absolute values when an *)
(* attempt has failed, every element when the baseline is lost.  Engines    *)
(* close their gates, mark their storage, write in place and acknowledge;   *)
(* one compare-and-set commits for all of them; each engine opens its gate  *)
(* when it reads in K that what it holds is committed.                      *)
(*                                                                         *)
(* This module: all steps, and what must hold.  RefitState: the parties.    *)
(* RefitCoordinator, RefitOwner, RefitReceiver: their actions.              *)
(***************************************************************************)
EXTENDS RefitCoordinator, RefitOwner, RefitReceiver

LateWrites == \E w \in writes : LateWrite(w)

CoordinatorNext ==
  \E c \in Coordinators :
    \/ OpenAttempt(c)
    \/ RollBack(c)
    \/ OrderOpenApply(c)
    \/ AttemptFailed(c)
    \/ Commit(c)
    \/ Stop(c)
    \/ Abandon(c)
    \/ Publish(c)
    \/ FinishTransition(c)
    \/ OpenRestore(c)
    \/ EndRestore(c)
    \/ Admit(c)
    \/ TakeOver(c)
    \/ ReadBack(c)
    \/ WriteAgain(c)
    \/ Fatal(c)

OwnerNext ==
  \E o \in Owners :
    \/ Emit(o)
    \/ Seal(o)
    \/ EmitFailed(o)
    \/ BeginFold(o)
    \/ FoldCell(o)
    \/ EndFold(o)
    \/ LoseBaseline(o)
    \/ StepCandidate(o)
    \/ OwnerRestart(o)

NodeNext ==
  \E e \in Engines :
    \/ CloseGate(e)
    \/ LoseRecord(e)
    \/ GateClosed(e)
    \/ OpenGate(e)
    \/ LearnCommit(e)
    \/ OpenApply(e)
    \/ EngineRestart(e)

RankNext ==
  \E e \in Engines, r \in Ranks :
    \/ Fence(e, r)
    \/ Stage(e, r)
    \/ BeginWrite(e, r)
    \/ EndWrite(e, r)
    \/ FailWrite(e, r)
    \/ Acknowledge(e, r)

Next ==
  \/ CoordinatorNext
  \/ LateWrites
  \/ CandidateReady
  \/ OwnerNext
  \/ NodeNext
  \/ RankNext

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
(* Safety.                                                                  *)

\* An open gate means that storage holds the bits of a committed version, that nothing is being written, and that K let
\* this incarnation serve it: as a member that acknowledged its commit, or as one admitted.
ServingExact ==
  \A e \in Engines : node[e].gate # "closed" =>
    /\ \E x \in commits : x.version = node[e].serving /\ \A r \in Ranks : mem[e][r] = x.content
    /\ \A r \in Ranks : rank[e][r].writing.epoch = 0
    /\ [ engine |-> e, incarnation |-> node[e].incarnation, version |-> node[e].serving ] \in licensed

\* What a member acknowledged and K says is committed is in its storage, learned or not.
CommitStored ==
  \A e \in Engines, r \in Ranks :
    CommittedHere(rank[e][r]) /\ K.committed.members[e] = node[e].incarnation =>
      rank[e][r].writing.epoch = 0 /\ mem[e][r] = K.baseline

\* Storage that is not marked holds the version that it says; and a member of the last commit holds it until a mark
\* says otherwise.
CommitHeld ==
  \A e \in Engines, r \in Ranks :
    /\ rank[e][r].version # NOVERSION /\ rank[e][r].torn = {} =>
         \E x \in commits : x.version = rank[e][r].version /\ x.content = mem[e][r]
    /\ K.committed.epoch # 0 /\ K.committed.members[e] = node[e].incarnation =>
         \/ CommittedHere(rank[e][r])
         \/ rank[e][r].torn # {}
         \/ rank[e][r].version = K.version

\* A baseline that is not marked is the committed version that it says, bit for bit, and never one that is not committed.
BaselineExact ==
  \A o \in Owners : ~own[o].folding /\ own[o].base # NOVERSION =>
    \E x \in commits : x.version = own[o].base /\ \A p \in Cells : OwnerOf[p] = o => tracker[p] = x.content[p]

\* A relative entry meets the bits that it was made against, hence once.
RelativeOnce ==
  \A e \in Engines, r \in Ranks : rank[e][r].writing.operation = "add" => rank[e][r].writing.result # GARBAGE

\* Once a rank has answered prepare, no write of an older epoch is under way or begins.
FencedWrites ==
  \A e \in Engines, r \in Ranks :
    rank[e][r].writing.epoch # 0 => rank[e][r].writing.epoch >= rank[e][r].fence

\* A version is committed once, with one content.
OneCommit == \A x \in commits, y \in commits : x.version = y.version => x = y

\* How K may change, as an action invariant: one write after the other, by the leader or by who takes over; the epoch
\* and the token never fall, the version grows by one and only with a commit; within a transition the candidate stays,
\* attempts are counted, only the first is relative, and a rollback is never turned forward.
RecordStep ==
  K' # K =>
    /\ K'.revision = K.revision + 1
    /\ K'.version \in { K.version, K.version + 1 }
    /\ K'.version # K.version => K'.reason = "Commit" /\ K.open.target = K'.version
    /\ K'.epoch = K.epoch + (IF K'.reason \in { "Commit", "Admit" } THEN 0 ELSE 1)
    /\ K'.leader # K.leader => K'.token = K.token + 1
    /\ K'.committed # K.committed => K'.reason = "Commit" /\ K'.committed.epoch = K.epoch /\ UnderWay(K)
    /\ K'.open.target # 0 /\ K.open.target # 0 =>
         /\ K'.open.candidate = K.open.candidate
         /\ K'.open.attempts = K.open.attempts + (IF K'.reason = "OpenAttempt" THEN 1 ELSE 0)
         /\ K.open.direction = "back" => K'.open.direction = "back"
    /\ K'.open.kind = "relative" => K'.open.attempts = 1
    /\ K'.open.target # 0 => \E e \in Engines : K'.members[e] # 0
=============================================================================
