----------------------------- MODULE RefitGoals -----------------------------
(***************************************************************************)
(* Interesting states and steps, each denied.  A configuration that denies  *)
(* one must fail: its counterexample is the witness that the protocol gets  *)
(* there, and that the models check something.  For TLC alone.              *)
(***************************************************************************)
EXTENDS MCRefit

\* @type: (Int) => Bool;
AllServe(version) == \A e \in Engines : node[e].gate = "open" /\ node[e].serving = version

\* A torn engine was repaired in place by a later attempt and serves what was committed.
NeverRepaired == ~(AllServe(1) /\ MaxFailedWrites = 1 /\ faults.writes = 0 /\ \A e \in Engines : node[e].incarnation = 1)

\* A commit whose answer was lost took effect, and its leader learned so by reading K back.
NeverReadBack == [][~(K.reason = "Commit" /\ \E c \in Coordinators : ReadBack(c))]_vars

\* A commit of a leader that was replaced meanwhile arrived late and was refused.
NeverRefused ==
  [][~(\E w \in writes : w.record.reason = "Commit" /\ K.leader # w.by /\ K.open.target # 0 /\ LateWrite(w) /\ UNCHANGED K)]_vars

\* The leader died between the commit and its publication; the next one finished it.
NeverPublishedByAnother == [][~(coord["c1"].phase = "folding" /\ Publish("c2"))]_vars

\* An evicted engine came back by restore and serves the version that was committed without it.
NeverBackFromEviction == ~(AllServe(1) /\ \E e \in Engines : K.committed.members[e] = 0)

\* A restarted engine loaded the checkpoint of a later version, joined by its digest and serves it: nothing was written.
NeverLoaded ==
  ~(\E e \in Engines :
      /\ node[e].incarnation = 2 /\ node[e].gate = "open" /\ node[e].serving = 1
      /\ \A r \in Ranks : rank[e][r].acknowledged = 0 /\ rank[e][r].seen = {})

\* A transition was turned back and every engine serves the old version again.
NeverTurnedBack == ~(AllServe(0) /\ K.committed.direction = "back" /\ push.over)

\* A fenced engine dropped its stage and never stopped serving.
NeverDropped ==
  [][~(\E e \in Engines, r \in Ranks : rank[e][r].stage = "staged" /\ rank'[e][r].stage = "idle" /\ node'[e].gate = "open")]_vars

\* An owner that lost its baseline has one again, after a dense attempt.
NeverDense == ~(AllServe(1) /\ \E o \in Owners : own[o].incarnation = 2 /\ own[o].base = 1 /\ ~own[o].folding)

\* Another candidate was committed after an abandoned one had torn an engine.
NeverAnother == ~(AllServe(1) /\ K.committed.candidate = 2 /\ faults.writes = 0)
=============================================================================
