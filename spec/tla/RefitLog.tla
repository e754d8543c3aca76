------------------------------ MODULE RefitLog ------------------------------
(***************************************************************************)
(* Is what a run wrote down a behaviour of the protocol?  The lines of its  *)
(* event logs, in an order that their contents prove, are taken one after   *)
(* the other: each must be a step of the specification, with what the line  *)
(* says, and the properties of Refit must hold after it.  `dcr spec         *)
(* validate` writes RefitLogData from the logs: the constants, the lines    *)
(* and the first K.  A line decides its step, so there is one state for     *)
(* each line, and the first line that has no step is where TLC ends.        *)
(* A long log is taken in parts, each of which begins where the one before  *)
(* it ended.                                                               *)
(*                                                                         *)
(* Where an action of the specification asks more than its party can know,  *)
(* or does more than the log tells, the action here says what is left out:  *)
(* docs/event-log.md lists it.  For TLC alone.                              *)
(***************************************************************************)
EXTENDS MCRefit, RefitLogData, Sequences, TLC

VARIABLES
  \* The line that is next.
  \* @type: Int;
  line

AnyEngines == SUBSET Engines

\* Nothing happens in the model: the line tells what the model has no state for, or what it has seen already.
Nothing == UNCHANGED vars

Begun ==
  /\ K = FirstRecord
  /\ writes = {}
  /\ coord = [ c \in Coordinators |->
       [ phase |-> IF c = FirstLeader THEN "idle" ELSE "standby",
         revision |-> IF c = FirstLeader THEN FirstRecord.revision ELSE 0, epoch |-> 0, candidate |-> 0 ] ]
  /\ orders = {}
  /\ applies = {}
  /\ failed = {}
  /\ told = {}
  /\ push = [ candidate |-> FirstRecord.open.candidate, over |-> FirstRecord.open.target = 0 ]
  /\ own = [ o \in Owners |->
       [ incarnation |-> 0, base |-> NOVERSION, folding |-> FALSE, folded |-> 0, fence |-> 0, emitting |-> 0,
         seal |-> NoSeal ] ]
  /\ tracker = [ p \in Cells |-> GARBAGE ]
  /\ weights = FirstContent
  /\ net = {}
  /\ manifests = {}
  /\ node = [ e \in Engines |->
       [ incarnation |-> 0, gate |-> "closed", fence |-> 0, serving |-> NOVERSION, opening |-> NOEPOCH, version |-> 0 ] ]
  /\ rank = [ e \in Engines |-> [ r \in Ranks |-> [ CleanRank(NOVERSION) EXCEPT !.torn = { UNKNOWN } ] ] ]
  /\ mem = [ e \in Engines |-> [ r \in Ranks |-> [ p \in Cells |-> GARBAGE ] ] ]
  /\ prepared = {}
  /\ acks = {}
  /\ commits = { [ version |-> K.version, epoch |-> K.committed.epoch, content |-> K.baseline ] }
  /\ licensed = Roster(K)
  /\ faults = [ engines |-> MaxEngineRestarts, owners |-> MaxOwnerRestarts, leaders |-> MaxTakeOvers,
                writes |-> MaxFailedWrites, waits |-> MaxTimeOuts, evictions |-> MaxEvictions,
                unknowns |-> MaxUnknowns, steps |-> MaxSteps, stops |-> MaxStops,
                abandons |-> MaxAbandons, rollbacks |-> MaxRollbacks ]

\* Where the part before this one ended.
Resumed(s) ==
  /\ K = s.K
  /\ writes = s.writes
  /\ coord = s.coord
  /\ orders = s.orders
  /\ applies = s.applies
  /\ failed = s.failed
  /\ told = s.told
  /\ push = s.push
  /\ own = s.own
  /\ tracker = s.tracker
  /\ weights = s.weights
  /\ net = s.net
  /\ manifests = s.manifests
  /\ node = s.node
  /\ rank = s.rank
  /\ mem = s.mem
  /\ prepared = s.prepared
  /\ acks = s.acks
  /\ commits = s.commits
  /\ licensed = s.licensed
  /\ faults = s.faults

LogInit == line = 1 /\ (IF Continues THEN Resumed(Before) ELSE Begun)

(* What the next part begins with: this state, without messages that were sent more than Kept epochs ago and that no    *)
(* rank and no owner is at, and without commits so long past that nobody holds them.  Nothing comes of a message but    *)
(* what needs its order, which goes with it; no later commit can be of a version that is forgotten; so that to forget   *)
(* may reject a log, and never accepts one.                                                                            *)
Kept == 32
At == { own[o].emitting : o \in Owners } \union UNION { { rank[e][r].epoch : r \in Ranks } : e \in Engines }
Recent(epoch) == epoch >= K.epoch - Kept \/ epoch \in At
Held == { own[o].base : o \in Owners } \union { node[e].serving : e \in Engines }
          \union UNION { { rank[e][r].version : r \in Ranks } : e \in Engines }
Known(version) == version >= K.version - Kept \/ version \in Held

Left ==
  [ K |-> K, writes |-> writes, coord |-> coord, push |-> push, own |-> own, tracker |-> tracker, weights |-> weights,
    node |-> node, rank |-> rank, mem |-> mem, faults |-> faults,
    told |-> told \intersect { K.committed.epoch },
    applies |-> { epoch \in applies : Recent(epoch) },
    failed |-> { epoch \in failed : Recent(epoch) },
    orders |-> { x \in orders : Recent(x.epoch) },
    net |-> { x \in net : Recent(x.epoch) },
    manifests |-> { x \in manifests : Recent(x.epoch) },
    prepared |-> { x \in prepared : Recent(x.epoch) },
    acks |-> { x \in acks : Recent(x.epoch) },
    commits |-> { x \in commits : Known(x.version) },
    licensed |-> { x \in licensed : Known(x.version) } ]

-----------------------------------------------------------------------------
(* Leaders.  A line says what K was after the write: so it must be.         *)

AsWritten(x) == K' = x.record                                      \* K is what the line says

\* Which engines take part is the leader's to know, from reports that may be old (`StaleReports`).
LogOpenAttempt(x) ==
  /\ x.record.members # [ e \in Engines |-> 0 ]
  /\ IF x.record.open.direction = "back" /\ K.open.direction = "forward"
     THEN MayTurnBack(x.by) ELSE MayOpen(x.by, x.record.open.kind)
  /\ AttemptWith(x.by, x.record.open.kind, x.record.open.direction, x.record.members, faults)
  /\ AsWritten(x)

\* The seals that K names: an owner seals an epoch once in an incarnation.
Sealed == [ o \in Owners |-> CHOOSE m \in manifests : m.epoch = K.epoch /\ m.owner = o /\ m.incarnation = K.open.owners[o] ]

LogCommit(x) ==
  /\ \A o \in Owners : \E m \in manifests : m.epoch = K.epoch /\ m.owner = o /\ m.incarnation = K.open.owners[o]
  /\ x.sealed                                                      \* K names the digest of what was sealed
  /\ CommitOf(x.by, Sealed)
  /\ AsWritten(x)

LogOpenRestore(x) == OpenRestoreWith(x.by, x.members, faults) /\ AsWritten(x)

LogAdmit(x) ==
  /\ AdmitThese(x.by, { e \in Engines : x.record.members[e] # K.members[e] }, faults)
  /\ AsWritten(x)

LogStop(x) == Stop(x.by) /\ AsWritten(x)
LogAbandon(x) == Abandon(x.by) /\ AsWritten(x)
LogTakeOver(x) == TakeOver(x.by) /\ AsWritten(x)

LogOrderOpenApply(x) == coord[x.by].epoch = x.epoch /\ OrderOpenApply(x.by)
LogAttemptFailed(x) == coord[x.by].epoch = x.epoch /\ AttemptFailed(x.by)
LogEndRestore(x) == coord[x.by].epoch = x.epoch /\ EndRestore(x.by)

\* Who publishes again writes nothing, and whoever hears of it reads K.
LogPublish(x) ==
  /\ coord[x.by].phase = "folding"
  /\ IF K.committed.epoch \in told \union { 0 } THEN Nothing ELSE Publish(x.by)

LogFinishTransition(x) == FinishTransition(x.by)

\* A coordinator may give up for other reasons than the specification's.
LogFatal(x) ==
  /\ coord' = [ coord EXCEPT ![x.by].phase = "fatal" ]
  /\ UNCHANGED << recordVars, orders, applies, push, faults, failed, ownerVars, engineVars >>

-----------------------------------------------------------------------------
(* The trainer and its owners.                                              *)

\* An owner starts, with a baseline that digests to a version's, or with none that is known.
LogOwnerStart(x) ==
  /\ x.incarnation > own[x.owner].incarnation
  /\ own' = [ own EXCEPT ![x.owner] =
       [ incarnation |-> x.incarnation, base |-> x.version, folding |-> FALSE, folded |-> 0, fence |-> 0,
         emitting |-> 0, seal |-> NoSeal ] ]
  /\ tracker' = [ p \in Cells |-> IF OwnerOf[p] = x.owner THEN x.content[p] ELSE tracker[p] ]
  /\ weights' = [ p \in Cells |-> IF OwnerOf[p] = x.owner THEN x.content[p] ELSE weights[p] ]
  /\ UNCHANGED << recordVars, leaderVars, told, failed, net, manifests, engineVars >>

\* New weights are offered: their name, and which payloads they change, are known from what was emitted of them.
LogCandidateReady(x) ==
  /\ push.over
  /\ K.open.target = 0
  /\ push' = [ candidate |-> x.candidate, over |-> FALSE ]
  /\ weights' = x.content
  /\ UNCHANGED << recordVars, coord, orders, applies, failed, told, own, tracker, net, manifests, engineVars, faults >>

LogEmit(x) == \E order \in orders : order.epoch = x.epoch /\ EmitFor(x.owner, order)
LogSeal(x) == own[x.owner].emitting = x.epoch /\ Seal(x.owner)

\* An epoch may fail for any reason: that forbids, and allows nothing.
LogEmitFailed(x) ==
  /\ failed' = failed \union { x.epoch }
  /\ own' = [ own EXCEPT ![x.owner].emitting = 0, ![x.owner].fence = IF x.epoch > @ THEN x.epoch ELSE @ ]
  /\ UNCHANGED << recordVars, coord, orders, applies, push, faults, told, tracker, weights, net, manifests, engineVars >>

LogBeginFold(x) == K.committed.epoch = x.epoch /\ BeginFold(x.owner)

\* Every cell at once: nobody looks at the baseline meanwhile.
LogFoldCells(x) ==
  /\ own[x.owner].folding
  /\ tracker' = [ p \in Cells |-> IF OwnerOf[p] = x.owner THEN weights[p] ELSE tracker[p] ]
  /\ UNCHANGED << recordVars, leaderVars, told, failed, own, weights, net, manifests, engineVars >>

LogEndFold(x) == own[x.owner].folded = x.epoch /\ EndFold(x.owner)

LogLoseBaseline(x) ==
  /\ own[x.owner].folding
  /\ own' = [ own EXCEPT ![x.owner].folding = FALSE, ![x.owner].base = NOVERSION ]
  /\ tracker' = [ p \in Cells |-> IF OwnerOf[p] = x.owner THEN GARBAGE ELSE tracker[p] ]
  /\ UNCHANGED << recordVars, leaderVars, told, failed, weights, net, manifests, engineVars >>

LogStepCandidate(x) == StepCandidate(x.owner)

-----------------------------------------------------------------------------
(* Engines.                                                                 *)

\* An engine starts, with what its loader was fed or with nothing that is known.
LogEngineStart(x) ==
  /\ node[x.engine].incarnation + 1 = x.incarnation
  /\ EngineRestartFrom(x.engine, x.content, IF x.known THEN {} ELSE { UNKNOWN })

\* A node agent starts anew beside ranks that live on: it begins with a closed gate.
LogNodeStart(x) ==
  /\ node' = [ node EXCEPT ![x.engine] = [ @ EXCEPT !.gate = "closed", !.serving = NOVERSION, !.opening = NOEPOCH, !.fence = 0 ] ]
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, rank, mem, prepared, acks >>

LogCloseGate(x) == K.epoch = x.epoch /\ CloseGate(x.engine)
LogLoseRecord(x) == LoseRecord(x.engine)
LogGateClosed(x) == GateClosed(x.engine)

\* Those who are inside would not leave: it is open as it was, and an epoch that waited for it fails.
LogGateStuck(x) ==
  /\ node[x.engine].gate = "closing"
  /\ node' = [ node EXCEPT ![x.engine].gate = "open" ]
  /\ failed' = failed \union { x.epoch }
  /\ UNCHANGED << recordVars, coord, orders, applies, push, faults, ownerVars, rank, mem, prepared, acks >>

LogOpenGate(x) ==
  /\ node[x.engine].opening = x.epoch                              \* ordered to open, for this epoch
  /\ node[x.engine].version = x.version                            \* at this version
  /\ OpenGate(x.engine)

\* The engine reads K; it may find nothing new.
LogLearnCommit(x) == IF ENABLED LearnCommit(x.engine) THEN LearnCommit(x.engine) ELSE Nothing

\* A rank says that what it holds is what K says is committed.
LogHolds(x) ==
  /\ K.committed.epoch = x.epoch
  /\ rank[x.engine][x.rank].acknowledged = x.epoch                 \* it acknowledged this epoch
  /\ Nothing

LogFence(x) ==
  /\ \E o \in orders : o.epoch = x.epoch /\ FenceFor(x.engine, x.rank, o)
  /\ rank'[x.engine][x.rank].stage = IF x.armed THEN "fenced" ELSE "failed"

LogStage(x) == rank[x.engine][x.rank].epoch = x.epoch /\ Stage(x.engine, x.rank)

\* The engine's ranks say so one by one; the first one is the engine's step.
LogOpenApply(x) ==
  IF rank[x.engine][x.rank].stage = "applying"
  THEN rank[x.engine][x.rank].epoch = x.epoch /\ Nothing
  ELSE x.epoch \in applies /\ OpenApplyFor(x.engine, x.epoch)

LogDeliverManifest(x) ==
  /\ \E m \in manifests : m.epoch = x.epoch /\ m.owner = x.owner /\ m.incarnation = x.sealed_as
  /\ Nothing

LogBeginWrite(x) ==
  \E m \in net :
    /\ m.epoch = x.epoch /\ m.owner = x.owner /\ m.incarnation = x.sealed_as /\ m.cell = x.cell
    /\ BeginWriteOf(x.engine, x.rank, m)

LogEndWrite(x) ==
  /\ rank[x.engine][x.rank].writing.epoch = x.epoch
  /\ rank[x.engine][x.rank].writing.cell = x.cell
  /\ EndWrite(x.engine, x.rank)

LogFailWrite(x) ==
  /\ rank[x.engine][x.rank].writing.epoch = x.epoch
  /\ rank[x.engine][x.rank].writing.cell = x.cell
  /\ FailWrite(x.engine, x.rank)

\* An epoch may fail at a rank for any reason: that forbids, and allows nothing.
LogFailAttempt(x) ==
  /\ failed' = failed \union { x.epoch }
  /\ rank' = [ rank EXCEPT ![x.engine][x.rank].stage = IF rank[x.engine][x.rank].epoch = x.epoch THEN "failed" ELSE @ ]
  /\ UNCHANGED << recordVars, coord, orders, applies, push, faults, ownerVars, node, mem, prepared, acks >>

LogAcknowledge(x) == rank[x.engine][x.rank].epoch = x.epoch /\ Acknowledge(x.engine, x.rank)

-----------------------------------------------------------------------------

Took(x) ==
  \/ x.name = "OpenAttempt" /\ LogOpenAttempt(x)
  \/ x.name = "Commit" /\ LogCommit(x)
  \/ x.name = "OpenRestore" /\ LogOpenRestore(x)
  \/ x.name = "Admit" /\ LogAdmit(x)
  \/ x.name = "Stop" /\ LogStop(x)
  \/ x.name = "Abandon" /\ LogAbandon(x)
  \/ x.name = "TakeOver" /\ LogTakeOver(x)
  \/ x.name = "OrderOpenApply" /\ LogOrderOpenApply(x)
  \/ x.name = "AttemptFailed" /\ LogAttemptFailed(x)
  \/ x.name = "EndRestore" /\ LogEndRestore(x)
  \/ x.name = "Publish" /\ LogPublish(x)
  \/ x.name = "FinishTransition" /\ LogFinishTransition(x)
  \/ x.name = "Fatal" /\ LogFatal(x)
  \/ x.name = "OwnerStart" /\ LogOwnerStart(x)
  \/ x.name = "CandidateReady" /\ LogCandidateReady(x)
  \/ x.name = "Emit" /\ LogEmit(x)
  \/ x.name = "Seal" /\ LogSeal(x)
  \/ x.name = "EmitFailed" /\ LogEmitFailed(x)
  \/ x.name = "BeginFold" /\ LogBeginFold(x)
  \/ x.name = "FoldCells" /\ LogFoldCells(x)
  \/ x.name = "EndFold" /\ LogEndFold(x)
  \/ x.name = "LoseBaseline" /\ LogLoseBaseline(x)
  \/ x.name = "StepCandidate" /\ LogStepCandidate(x)
  \/ x.name = "EngineStart" /\ LogEngineStart(x)
  \/ x.name = "NodeStart" /\ LogNodeStart(x)
  \/ x.name = "CloseGate" /\ LogCloseGate(x)
  \/ x.name = "LoseRecord" /\ LogLoseRecord(x)
  \/ x.name = "GateClosed" /\ LogGateClosed(x)
  \/ x.name = "GateStuck" /\ LogGateStuck(x)
  \/ x.name = "OpenGate" /\ LogOpenGate(x)
  \/ x.name = "LearnCommit" /\ LogLearnCommit(x)
  \/ x.name = "Holds" /\ LogHolds(x)
  \/ x.name = "Fence" /\ LogFence(x)
  \/ x.name = "Stage" /\ LogStage(x)
  \/ x.name = "OpenApply" /\ LogOpenApply(x)
  \/ x.name = "DeliverManifest" /\ LogDeliverManifest(x)
  \/ x.name = "BeginWrite" /\ LogBeginWrite(x)
  \/ x.name = "EndWrite" /\ LogEndWrite(x)
  \/ x.name = "FailWrite" /\ LogFailWrite(x)
  \/ x.name = "FailAttempt" /\ LogFailAttempt(x)
  \/ x.name = "Acknowledge" /\ LogAcknowledge(x)

\* The properties of Refit, after the step; what a step leaves as it is needs no second look.
Holding ==
  /\ ServingExact'
  /\ CommitStored'
  /\ CommitHeld'
  /\ (tracker' # tracker \/ own' # own \/ commits' # commits) => BaselineExact'
  /\ RelativeOnce'
  /\ FencedWrites'
  /\ commits' # commits => OneCommit'
  /\ RecordStep

LogNext ==
  /\ line <= Len(Lines)
  /\ line' = line + 1
  /\ Took(Lines[line])
  /\ Holding
  /\ line' > Len(Lines) /\ Continued => PrintT(<< "left", Left' >>)

LogSpec == LogInit /\ [][LogNext]_<< vars, line >>

\* A line decides its step, so the line tells the state.
Reached == line
=============================================================================
