-------------------------- MODULE RefitCoordinator --------------------------
(***************************************************************************)
(* The coordinators: one leads, at most one; the others are dead, asleep or *)
(* zombies that do not know it yet.  Every change of K is a compare-and-set *)
(* from the revision that the writer knows.                                 *)
(***************************************************************************)
EXTENDS RefitState

\* What K says after a write, history kept beside it.
\* @type: ($record) => Bool;
Store(k) ==
  /\ K' = k
  /\ commits' = IF k.reason # "Commit" \/ k.committed.direction = "back" THEN commits
                ELSE commits \union { [ version |-> k.version, epoch |-> k.committed.epoch, content |-> k.baseline ] }
  /\ licensed' = licensed \union Roster(k)

\* Storage of this engine is the committed version, whether it has learned so or not.
\* @type: (Str) => Bool;
Holds(e) ==
  \A r \in Ranks :
    LET k == rank[e][r] IN
    \/ k.version = K.version /\ k.torn = {}
    \/ k.acknowledged # 0 /\ k.acknowledged = K.committed.epoch
    \/ k.version = NOVERSION /\ k.torn = {} /\ mem[e][r] = K.baseline

\* This engine was ordered to prepare for the epoch that K is at, and has not acknowledged it: once it is prepared its gate
\* stays closed, and it may write, until the epoch moves or it has acknowledged.
\* @type: (Str) => Bool;
Engaged(e) ==
  \E o \in orders :
    /\ o.epoch = K.epoch
    /\ o.members[e] = node[e].incarnation
    /\ \E r \in Ranks : rank[e][r].acknowledged # o.epoch

\* This engine can be taken in as it is: it holds the committed version, and no order may change that.
\* @type: (Str) => Bool;
Settled(e) == Holds(e) /\ ~Engaged(e)

\* Storage of this engine may take payloads of this kind.  (D4)
\* @type: (Str, Str, Int) => Bool;
Admits(e, kind, candidate) ==
  \/ kind = "dense"
  \/ Holds(e)
  \/ kind = "absolute" /\ \A r \in Ranks : rank[e][r].version = K.version /\ rank[e][r].torn \subseteq { candidate }

\* Every owner holds the baseline of the committed version.
BaselineHeld == \A o \in Owners : own[o].base = K.version /\ ~own[o].folding

\* The weights of the open transition live as long as the owners that pinned them.  (D10)
CandidateAlive == \A o \in Owners : K.open.owners[o] = own[o].incarnation

\* @type: ($record) => $order;
AttemptOf(k) ==
  [ epoch |-> k.epoch, kind |-> k.open.kind, version |-> k.version, candidate |-> k.open.candidate,
    direction |-> k.open.direction, owners |-> k.open.owners, members |-> k.members ]

\* @type: ($record, $roster) => $order;
RestoreOf(k, members) ==
  [ epoch |-> k.epoch, kind |-> "restore", version |-> k.version, candidate |-> 0, direction |-> "none",
    owners |-> [ o \in Owners |-> own[o].incarnation ], members |-> members ]

NoOrder == [ epoch |-> 0, kind |-> "none", version |-> 0, candidate |-> 0, direction |-> "none",
             owners |-> [ o \in Owners |-> 0 ], members |-> [ e \in Engines |-> 0 ] ]

\* @type: ($record) => Str;
PhaseAfter(k) ==
  CASE k.reason = "OpenAttempt" -> "attempt"
    [] k.reason = "OpenRestore" -> "restore"
    [] k.reason = "Commit" /\ k.committed.direction = "forward" -> "folding"
    [] k.reason = "TakeOver" /\ k.open.target = 0 -> "folding"
    [] OTHER -> "idle"

\* The writer knows that its write took effect: only now does it send what follows from it, to whom it had in mind when
\* it wrote.
\* @type: (Str, $record, $order) => Bool;
After(c, k, order) ==
  /\ coord' = [ coord EXCEPT ![c] =
       [ phase |-> PhaseAfter(k), revision |-> k.revision,
         epoch |-> IF k.reason \in { "OpenAttempt", "OpenRestore" } THEN k.epoch ELSE @.epoch,
         candidate |-> IF k.open.target # 0 THEN k.open.candidate
                       ELSE IF k.reason = "TakeOver" THEN k.committed.candidate ELSE @.candidate ] ]
  /\ orders' = IF order.epoch # 0 THEN orders \union { order } ELSE orders
  /\ push' = IF push.candidate = coord[c].candidate
                /\ (k.reason = "Abandon" \/ (k.reason = "Commit" /\ k.committed.direction = "back"))
             THEN [ push EXCEPT !.over = TRUE ] ELSE push

\* A compare-and-set: it takes effect and the writer is told so, or its answer is lost and it stays in flight.  (D1, D3)
\* @type: (Str, $record, $order, $faults) => Bool;
CompareAndSet(c, k, order, f) ==
  /\ coord[c].revision = K.revision                                \* compare
  /\ \/ Store(k) /\ After(c, k, order) /\ faults' = f /\ UNCHANGED writes
     \/ /\ f.unknowns > 0
        /\ faults' = [ f EXCEPT !.unknowns = @ - 1 ]
        /\ writes' = writes \union { [ by |-> c, record |-> k, order |-> order ] }
        /\ coord' = [ coord EXCEPT ![c].phase = "unknown" ]
        /\ UNCHANGED << K, commits, licensed, orders, push >>
  /\ UNCHANGED << applies, failed, ownerVars, engineVars >>

-----------------------------------------------------------------------------
(* Attempts.                                                                *)

\* The candidate that the next attempt is about.
Offered == IF K.open.target = 0 THEN push.candidate ELSE K.open.candidate

\* The compare-and-set that opens an attempt counts it, names its members as incarnations, and only then sends
\* anything.  (D4)
\* @type: (Str, Str, Str, $roster, $faults) => Bool;
AttemptWith(c, kind, direction, roster, f) ==
  LET k == [ K EXCEPT !.revision = @ + 1,
                      !.epoch = @ + 1,
                      !.members = roster,
                      !.open = [ target |-> K.version + 1, candidate |-> Offered, attempts |-> @.attempts + 1,
                                 kind |-> kind, direction |-> direction,
                                 owners |-> [ o \in Owners |-> own[o].incarnation ], stopped |-> FALSE ],
                      !.reason = "OpenAttempt" ]
  IN CompareAndSet(c, k, AttemptOf(k), f)

\* Engines that cannot take this kind are left out; so is one that is silent, by name.  (D4, D14, D15)
\* @type: (Str, Str, Str, Str, $faults) => Bool;
Attempt(c, kind, direction, silent, f) ==
  LET members == { e \in Engines : e # silent /\ (StaleReports \/ Admits(e, kind, Offered)) } IN
  /\ members \in Enough
  /\ AttemptWith(c, kind, direction, [ e \in Engines |-> IF e \in members THEN node[e].incarnation ELSE 0 ], f)

\* A fault that may be drawn on: engine `silent` is left out, unless it is nobody.
\* @type: (Str) => Bool;
MayLeaveOut(silent) == silent = "" \/ faults.evictions > 0
\* @type: (Str) => $faults;
LeftOut(silent) == IF silent = "" THEN faults ELSE [ faults EXCEPT !.evictions = @ - 1 ]

\* An attempt of this kind may be next.  The first of a transition may be relative; a later one is absolute, or dense.
\* Once a rollback has begun nobody turns it forward.  A stopped transition is resumed the same way.  (D4, D14, D17)
\* @type: (Str, Str) => Bool;
MayOpen(c, kind) ==
  /\ coord[c].phase = "idle"
  /\ K.open.attempts < MaxAttempts
  /\ IF K.open.target = 0 THEN ~push.over ELSE CandidateAlive
  /\ kind = "relative" => K.open.attempts = 0                      \* only the first
  /\ kind = "absolute" => K.open.attempts > 0 \/ "relative" \notin Kinds
  /\ kind # "dense" => BaselineHeld
  /\ K.open.direction = "back" => kind = "absolute"

\* The next attempt.
\* @type: (Str, Str, Str) => Bool;
OpenAttemptOf(c, kind, silent) ==
  /\ MayOpen(c, kind)
  /\ MayLeaveOut(silent)
  /\ Attempt(c, kind, IF K.open.direction = "back" THEN "back" ELSE "forward", silent, LeftOut(silent))

\* @type: (Str) => Bool;
OpenAttempt(c) == \E kind \in Kinds, silent \in Engines \union { "" } : OpenAttemptOf(c, kind, silent)

\* The open transition may be turned back.  (D17)
\* @type: (Str) => Bool;
MayTurnBack(c) ==
  /\ coord[c].phase = "idle"
  /\ K.open.target # 0
  /\ K.open.direction = "forward"
  /\ K.open.attempts < MaxAttempts
  /\ CandidateAlive
  /\ BaselineHeld

\* The operator turns the open transition back: an absolute attempt that carries the baseline's bits.  (D17)
\* @type: (Str) => Bool;
RollBack(c) ==
  /\ MayTurnBack(c)
  /\ faults.rollbacks > 0
  /\ Attempt(c, "absolute", "back", "", [ faults EXCEPT !.rollbacks = @ - 1 ])

\* Every member has reported to be prepared, or in the asynchronous mode to have staged the epoch: now they may write.
\* Engines of a restore do not wait for one another: nothing is committed by it.  (D6, D15, D18)
\* @type: (Str) => Bool;
OrderOpenApply(c) ==
  /\ coord[c].phase \in { "attempt", "restore" }
  /\ coord[c].epoch \notin applies
  /\ \E o \in orders :
       /\ o.epoch = coord[c].epoch
       /\ o.kind # "restore" => \A e \in Engines : o.members[e] # 0 => \A r \in Ranks :
            [ epoch |-> o.epoch, engine |-> e, rank |-> r, incarnation |-> o.members[e] ] \in prepared
  /\ applies' = applies \union { coord[c].epoch }
  /\ UNCHANGED << recordVars, coord, orders, push, faults, failed, ownerVars, engineVars >>

\* Somebody failed the epoch, or a member or an owner is another incarnation than it was.
\* @type: ($order) => Bool;
Broken(o) ==
  \/ o.epoch \in failed
  \/ \E e \in Engines : o.members[e] \notin { 0, node[e].incarnation }
  \/ \E w \in Owners : o.owners[w] # own[w].incarnation

\* The attempt cannot be committed any more, or a time-out says that it takes too long.  (D14, D15)
\* @type: (Str) => Bool;
AttemptFailed(c) ==
  /\ coord[c].phase = "attempt"
  /\ \/ /\ \E o \in orders : o.epoch = coord[c].epoch /\ Broken(o)
        /\ UNCHANGED faults
     \/ /\ faults.waits > 0
        /\ faults' = [ faults EXCEPT !.waits = @ - 1 ]
  /\ coord' = [ coord EXCEPT ![c].phase = "idle" ]
  /\ UNCHANGED << recordVars, orders, applies, push, failed, ownerVars, engineVars >>

\* The joint commit: from the revision that the attempt was opened at, after every owner's seal and an acknowledgement
\* of every rank of every member.  A rollback keeps the version.  (D8, D11, D17)
\* @type: (Str, Str -> $manifest) => Bool;
CommitOf(c, seals) ==
  /\ coord[c].phase = "attempt"
  /\ \A e \in Engines : K.members[e] # 0 => \A r \in Ranks :
       [ epoch |-> coord[c].epoch, engine |-> e, rank |-> r, incarnation |-> K.members[e] ] \in acks
  /\ \A o \in Owners : seals[o].owner = o /\ seals[o].incarnation = K.open.owners[o]
  /\ CompareAndSet(c,
       [ K EXCEPT !.revision = @ + 1,
                  !.version = IF K.open.direction = "forward" THEN K.open.target ELSE @,
                  !.baseline = [ p \in Cells |-> seals[OwnerOf[p]].bits[p] ],
                  !.open = NoOpen,
                  !.committed = [ version |-> IF K.open.direction = "forward" THEN K.open.target ELSE K.version,
                                  epoch |-> coord[c].epoch, candidate |-> K.open.candidate,
                                  direction |-> K.open.direction, members |-> K.members, root |-> K.open.owners ],
                  !.reason = "Commit" ], NoOrder, faults)

\* @type: (Str) => Bool;
Commit(c) == \E seals \in [ Owners -> { m \in manifests : m.epoch = coord[c].epoch } ] : CommitOf(c, seals)

\* The transition stops: the last attempt is fenced, clean members go on serving, torn ones stay gated.  (D14)
\* @type: (Str) => Bool;
Stop(c) ==
  /\ coord[c].phase = "idle"
  /\ UnderWay(K)
  /\ faults.stops > 0
  /\ CompareAndSet(c, [ K EXCEPT !.revision = @ + 1, !.epoch = @ + 1, !.open.stopped = TRUE, !.reason = "Stop" ],
                   NoOrder, [ faults EXCEPT !.stops = @ - 1 ])

\* The transition is cleared and its epoch fenced, before anybody is told: on an operator's word, after a stop, or
\* because the candidate died with an owner.  (D17)
\* @type: (Str) => Bool;
Abandon(c) ==
  /\ coord[c].phase = "idle"
  /\ K.open.target # 0
  /\ \/ ~CandidateAlive \/ K.open.stopped \/ \E o \in Owners : Stepped(o, K.open.candidate)
     \/ faults.abandons > 0
  /\ CompareAndSet(c, [ K EXCEPT !.revision = @ + 1, !.epoch = @ + 1, !.open = NoOpen, !.reason = "Abandon" ],
       NoOrder,
       IF ~CandidateAlive \/ K.open.stopped \/ \E o \in Owners : Stepped(o, K.open.candidate) THEN faults
       ELSE [ faults EXCEPT !.abandons = @ - 1 ])

-----------------------------------------------------------------------------
(* After a commit.                                                          *)

\* The commit is published: owners may fold.  Engines find it in K even if nobody tells them.  (D12, D13, D16)
\* @type: (Str) => Bool;
Publish(c) ==
  /\ coord[c].phase = "folding"
  /\ coord[c].revision = K.revision
  /\ K.committed.epoch \notin told \union { 0 }
  /\ told' = told \union { K.committed.epoch }
  /\ UNCHANGED << recordVars, leaderVars, failed, own, tracker, weights, net, manifests, engineVars >>

\* Every owner has folded, or has lost its baseline: the push is over and the pin is released.  Who says so writes
\* nothing, hence need not know that it still leads.  (D10, D13)
\* @type: (Str) => Bool;
FinishTransition(c) ==
  /\ coord[c].phase = "folding"
  /\ \A o \in Owners : ~own[o].folding /\ ~OwesFold(o)
  /\ coord' = [ coord EXCEPT ![c].phase = "idle" ]
  /\ push' = IF push.candidate = coord[c].candidate THEN [ push EXCEPT !.over = TRUE ] ELSE push
  /\ UNCHANGED << recordVars, orders, applies, faults, failed, ownerVars, engineVars >>

-----------------------------------------------------------------------------
(* Membership.                                                              *)

\* A restore session gets an epoch of its own.
\* Owners answer once they have folded, so if one has still to, the last commit must have been published.  (D6, D13, D15)
\* @type: (Str, $roster, $faults) => Bool;
OpenRestoreWith(c, roster, f) ==
  LET k == [ K EXCEPT !.revision = @ + 1, !.epoch = @ + 1, !.reason = "OpenRestore" ] IN
  /\ coord[c].phase \in { "idle", "folding" }
  /\ K.open.target = 0
  /\ (\E o \in Owners : OwesFold(o)) => K.committed.epoch \in told
  /\ \A o \in Owners : own[o].base # NOVERSION \/ OwesFold(o)
  /\ \E e \in Engines : roster[e] # 0
  /\ CompareAndSet(c, k, RestoreOf(k, roster), f)

\* It takes in every engine that does not hold the committed version, or that an earlier session has prepared in vain.
\* @type: (Str, Str) => Bool;
OpenRestoreBut(c, silent) ==
  /\ MayLeaveOut(silent)
  /\ OpenRestoreWith(c, [ e \in Engines |-> IF Settled(e) \/ e = silent THEN 0 ELSE node[e].incarnation ], LeftOut(silent))

\* @type: (Str) => Bool;
OpenRestore(c) == \E silent \in Engines \union { "" } : OpenRestoreBut(c, silent)

\* The session is over: everybody in it acknowledged, or one failed, or it takes too long.  An engine that turns out to
\* hold the version already is restored like the others.  (D15)
\* @type: (Str) => Bool;
EndRestore(c) ==
  /\ coord[c].phase = "restore"
  /\ \/ /\ \E o \in orders :
             /\ o.epoch = coord[c].epoch
             /\ \/ Broken(o)
                \/ \A e \in Engines : o.members[e] # 0 => \A r \in Ranks :
                     [ epoch |-> o.epoch, engine |-> e, rank |-> r, incarnation |-> o.members[e] ] \in acks
        /\ UNCHANGED faults
     \/ /\ faults.waits > 0
        /\ faults' = [ faults EXCEPT !.waits = @ - 1 ]
  /\ coord' = [ coord EXCEPT ![c].phase = "folding" ]
  /\ UNCHANGED << recordVars, orders, applies, push, failed, ownerVars, engineVars >>

\* Engines that hold the committed version become members, as the incarnation that holds it: while no transition is open,
\* so that what they hold is what K names when the write takes effect.  (D2, D15)
\* @type: (Str, Set(Str), $faults) => Bool;
AdmitThese(c, engines, f) ==
  /\ coord[c].phase = "idle"
  /\ K.open.target = 0
  /\ \A e \in engines : Settled(e)
  /\ \E e \in engines : K.members[e] # node[e].incarnation
  /\ CompareAndSet(c,
       [ K EXCEPT !.revision = @ + 1,
                  !.members = [ e \in Engines |-> IF e \in engines THEN node[e].incarnation ELSE K.members[e] ],
                  !.reason = "Admit" ], NoOrder, f)

\* @type: (Str, Str) => Bool;
AdmitBut(c, silent) ==
  /\ MayLeaveOut(silent)
  /\ AdmitThese(c, { e \in Engines : Settled(e) /\ e # silent }, LeftOut(silent))

\* @type: (Str) => Bool;
Admit(c) == \E silent \in Engines \union { "" } : AdmitBut(c, silent)

-----------------------------------------------------------------------------
(* Leadership, and writes of unknown outcome.                               *)

\* A standby writes itself in: the lease ran out, whether the leader is dead or not.  It goes on with the open
\* transition, abandons it, or finishes the publication of the last commit.  (D16)
\* @type: (Str) => Bool;
TakeOver(c) ==
  /\ coord[c].phase = "standby"
  /\ faults.leaders > 0
  /\ LET k == [ K EXCEPT !.revision = @ + 1, !.epoch = @ + 1, !.leader = c, !.token = @ + 1, !.reason = "TakeOver" ] IN
     /\ Store(k)
     /\ After(c, k, NoOrder)
  /\ faults' = [ faults EXCEPT !.leaders = @ - 1 ]
  /\ UNCHANGED << writes, applies, failed, ownerVars, engineVars >>

\* A write of unknown outcome took effect: K, read back, holds it.  (D3)
\* @type: (Str) => Bool;
ReadBack(c) ==
  /\ coord[c].phase = "unknown"
  /\ \E w \in writes :
       /\ w.by = c
       /\ w.record.revision = coord[c].revision + 1
       /\ K.revision = w.record.revision                           \* our write, not the old revision
       /\ K = w.record
       /\ After(c, w.record, w.order)
  /\ UNCHANGED << recordVars, applies, failed, faults, ownerVars, engineVars >>

\* K, read back, is at the old revision.  That proves nothing: the same write is made again, and only one of the two can
\* take effect.  (D3)
\* @type: (Str) => Bool;
WriteAgain(c) ==
  /\ coord[c].phase = "unknown"
  /\ coord[c].revision = K.revision
  /\ \E w \in writes :
       /\ w.by = c
       /\ w.record.revision = coord[c].revision + 1
       /\ Store(w.record)
       /\ After(c, w.record, w.order)
  /\ UNCHANGED << writes, applies, failed, faults, ownerVars, engineVars >>

\* A write in flight arrives at last: it takes effect, or finds another revision and is refused.  (D1)
\* @type: ($write) => Bool;
LateWrite(w) ==
  /\ IF w.record.revision = K.revision + 1                         \* compare, late
     THEN Store(w.record)
     ELSE UNCHANGED << K, commits, licensed >>
  /\ writes' = IF coord[w.by].phase = "unknown" THEN writes ELSE writes \ { w }
  /\ UNCHANGED << leaderVars, failed, ownerVars, engineVars >>

\* A coordinator finds that somebody else wrote K: it leads no more.  (D16)
\* @type: (Str) => Bool;
Fatal(c) ==
  /\ coord[c].phase \notin { "standby", "fatal" }
  /\ K.leader # c
  /\ coord' = [ coord EXCEPT ![c].phase = "fatal" ]
  /\ UNCHANGED << recordVars, orders, applies, push, faults, failed, ownerVars, engineVars >>
=============================================================================
