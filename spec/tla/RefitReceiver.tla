--------------------------- MODULE RefitReceiver ----------------------------
(***************************************************************************)
(* An engine: the node agent with its gate, and the receivers, which are    *)
(* the engine's ranks with their resident storage.                          *)
(***************************************************************************)
EXTENDS RefitState

\* A payload's name, and the digest of its bytes.  The record, the target and the sequence are implied: an epoch
\* belongs to one transition, and an owner's payload of an epoch is the one for its cell.  (D7)
\* @type: ($payload) => $identity;
Identity(m) == [ owner |-> m.owner, incarnation |-> m.incarnation, cell |-> m.cell, digest |-> m.new ]

\* The payload is one that this attempt expects: of an owner that the order names, as that incarnation.  (D7)
\* @type: ($payload, $order) => Bool;
Expected(m, o) == m.epoch = o.epoch /\ Identity(m).incarnation = o.owners[m.owner]

\* What this incarnation acknowledged is what K says was committed.  (D12)
\* @type: ($rank) => Bool;
CommittedHere(k) == k.acknowledged # 0 /\ k.acknowledged = K.committed.epoch

\* Bits that came from elsewhere are a version only if they digest to it.  (D2)
\* @type: (Str, Str) => Bool;
Loaded(e, r) ==
  /\ rank[e][r].version = NOVERSION
  /\ rank[e][r].torn = {}
  /\ mem[e][r] = K.baseline

\* A rank that has read K: it knows what it holds, and an attempt older than K is dead.
\* @type: (Str, Str) => $rank;
Learned(e, r) ==
  LET k == rank[e][r]
      here == CommittedHere(k)
      fenced == K.epoch > k.fence
  IN [ k EXCEPT !.version = IF here \/ Loaded(e, r) THEN K.version ELSE @,
                !.torn = IF here THEN {} ELSE @,
                !.fence = IF fenced THEN K.epoch ELSE @,
                !.epoch = IF fenced THEN 0 ELSE @,
                !.stage = IF fenced THEN "idle" ELSE @ ]

\* Storage in this state may take this order's payloads.  (D4, D5)
\* @type: ($rank, $order) => Bool;
Armed(k, o) ==
  \/ o.kind = "relative" /\ k.version = o.version /\ k.torn = {}
  \/ o.kind = "absolute" /\ k.version = o.version /\ k.torn \subseteq { o.candidate }
  \/ o.kind \in { "dense", "restore" }

\* What a payload of this order marks storage with: only absolute payloads of the same candidate repair its tears,
\* while dense and restore writes touch cells that no changed set holds.  (D4)
\* @type: ($order) => Int;
Mark(o) == IF o.kind = "dense" THEN DENSE ELSE IF o.kind = "restore" THEN RESTORE ELSE o.candidate

\* What a rank tells the leader of an epoch, as the incarnation that it is.
\* @type: (Str, Str, Int) => $report;
Report(e, r, epoch) == [ epoch |-> epoch, engine |-> e, rank |-> r, incarnation |-> node[e].incarnation ]

\* What this order brings is staged while the old version is served.  A restore has nothing to serve meanwhile.  (D15, D18)
\* @type: ($order) => Bool;
Staging(o) == Async /\ o.kind # "restore"

\* @type: (Str) => Bool;
Idle(e) == \A r \in Ranks : rank[e][r].writing.epoch = 0

-----------------------------------------------------------------------------
(* The gate.                                                                *)

\* The gate starts to close: on an order to prepare, or because K names a newer version than is served; K is read
\* before either.  Requests that are inside go on reading storage.  In the asynchronous mode preparing leaves the gate
\* open.  (D9, D18)
\* @type: (Str) => Bool;
CloseGate(e) ==
  /\ node[e].gate = "open"
  /\ \/ \E o \in orders :
          /\ o.members[e] = node[e].incarnation
          /\ o.epoch = K.epoch
          /\ o.epoch > node[e].fence
          /\ ~Staging(o)
     \/ node[e].serving # K.version
  /\ node' = [ node EXCEPT ![e].gate = "closing", ![e].fence = K.epoch ]
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, rank, mem, prepared, acks >>

\* K was not reached for so long that what is served may be stale: the gate closes until K is read again.  (D16)
\* @type: (Str) => Bool;
LoseRecord(e) ==
  /\ node[e].gate = "open"
  /\ faults.waits > 0
  /\ faults' = [ faults EXCEPT !.waits = @ - 1 ]
  /\ node' = [ node EXCEPT ![e].gate = "closing" ]
  /\ UNCHANGED << recordVars, coord, orders, applies, push, ownerVars, failed, rank, mem, prepared, acks >>

\* The last request has left: nobody reads storage.  (D9)
\* @type: (Str) => Bool;
GateClosed(e) ==
  /\ node[e].gate = "closing"
  /\ node' = [ node EXCEPT ![e].gate = "closed", ![e].serving = NOVERSION ]
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, rank, mem, prepared, acks >>

\* A gate order is carried out, perhaps late: refused if the fence of the gate has passed it, or if the engine was
\* prepared meanwhile, be it for the very epoch that K named when the order was given.  (D6, D9, D12)
\* @type: (Str) => Bool;
OpenGate(e) ==
  /\ node[e].gate = "closed"
  /\ node[e].opening # NOEPOCH
  /\ node[e].opening >= node[e].fence                              \* the gate's fence
  /\ \A r \in Ranks : rank[e][r].stage \notin { "fenced", "staged", "applying" }
  /\ node' = [ node EXCEPT ![e].gate = "open", ![e].serving = node[e].version, ![e].opening = NOEPOCH ]
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, rank, mem, prepared, acks >>

\* The engine reads K.  What it acknowledged and K says is committed is what its storage now holds; it drops an attempt
\* that K has passed.  If every rank is clean at K's version, and this incarnation acknowledged the committed epoch or
\* is admitted while no attempt is under way, the gate is ordered to open; nothing else ever opens it.  (D12, D15)
\* @type: (Str) => Bool;
LearnCommit(e) ==
  LET now == [ r \in Ranks |-> Learned(e, r) ]
      clean == \A r \in Ranks : now[r].version = K.version /\ now[r].torn = {}
      here == \A r \in Ranks : CommittedHere(now[r])
      admitted == K.members[e] = node[e].incarnation /\ ~UnderWay(K)
      busy == \E r \in Ranks : now[r].epoch = K.epoch /\ (UnderWay(K) \/ now[r].stage \in { "fenced", "staged", "applying" })
      opens == node[e].gate = "closed" /\ clean /\ (here \/ admitted) /\ ~busy
      gate == IF opens
              THEN [ node[e] EXCEPT !.opening = IF UnderWay(K) THEN K.committed.epoch ELSE K.epoch, !.version = K.version ]
              ELSE node[e]
  IN /\ Idle(e)
     /\ now # rank[e] \/ gate # node[e]                             \* something new
     /\ rank' = [ rank EXCEPT ![e] = now ]
     /\ node' = [ node EXCEPT ![e] = gate ]
     /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, mem, prepared, acks >>

-----------------------------------------------------------------------------
(* An attempt, or a restore session, at one rank.                           *)

\* Prepare: K is read first, what was staged for older epochs is dropped, and no older write can take effect any more.
\* The answer says whether this rank can take the attempt's payloads; if not, the attempt fails.  (D5, D6)
\* @type: (Str, Str, $order) => Bool;
FenceFor(e, r, o) ==
  /\ o.members[e] = node[e].incarnation
  /\ o.epoch = K.epoch                                             \* K is as new as the order
  /\ o.epoch >= node[e].fence
  /\ o.epoch >= rank[e][r].fence
  /\ rank[e][r].epoch # o.epoch
  /\ rank[e][r].writing.epoch = 0                                  \* drained
  /\ node[e].gate = "closed" \/ Staging(o)
  /\ LET k == Learned(e, r) IN
     /\ rank' = [ rank EXCEPT ![e][r] =
          [ k EXCEPT !.fence = o.epoch, !.epoch = o.epoch, !.seen = {},
                     !.stage = IF Armed(k, o) THEN "fenced" ELSE "failed" ] ]
     /\ failed' = IF Armed(k, o) THEN failed ELSE failed \union { o.epoch }
     /\ prepared' = IF Staging(o) \/ ~Armed(k, o) THEN prepared ELSE prepared \union { Report(e, r, o.epoch) }
  /\ node' = [ node EXCEPT ![e].fence = o.epoch ]
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, mem, acks >>

\* @type: (Str, Str) => Bool;
Fence(e, r) == \E o \in orders : FenceFor(e, r, o)

\* Asynchronous mode: every payload and manifest of the epoch lies in host memory; the old version is served on.  (D18)
\* @type: (Str, Str) => Bool;
Stage(e, r) ==
  /\ rank[e][r].stage = "fenced"
  /\ \E o \in orders :
       /\ o.epoch = rank[e][r].epoch
       /\ Staging(o)
       /\ \A w \in Owners : \E m \in manifests : m.epoch = o.epoch /\ m.owner = w /\ m.incarnation = o.owners[w]
  /\ rank' = [ rank EXCEPT ![e][r].stage = "staged" ]
  /\ prepared' = prepared \union { Report(e, r, rank[e][r].epoch) }
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, node, mem, acks >>

\* The engine may write, once its gate is closed; in the asynchronous mode the gate starts to close only now.  (D6, D18)
\* @type: (Str, Int) => Bool;
OpenApplyFor(e, epoch) ==
  /\ epoch >= node[e].fence
  /\ \E o \in orders :
       /\ o.epoch = epoch
       /\ \A r \in Ranks : rank[e][r].epoch = epoch /\ rank[e][r].stage = (IF Staging(o) THEN "staged" ELSE "fenced")
  /\ rank' = [ rank EXCEPT ![e] = [ r \in Ranks |-> [ rank[e][r] EXCEPT !.stage = "applying" ] ] ]
  /\ node' = [ node EXCEPT ![e].gate = IF @ = "open" THEN "closing" ELSE @ ]
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, mem, prepared, acks >>

\* @type: (Str) => Bool;
OpenApply(e) == \E epoch \in applies : OpenApplyFor(e, epoch)

\* A payload arrives, for the first time or again.  Duplicates change nothing.  Storage is marked before the first byte,
\* and what was acknowledged before is void from here on; until the write ends the cell is torn.  (D5, D7)
\* @type: (Str, Str, $payload) => Bool;
BeginWriteOf(e, r, m) ==
  \E o \in orders :
    LET k == rank[e][r]
        x == mem[e][r][m.cell]
        result == IF m.operation = "set" THEN m.new ELSE IF x = m.old THEN m.new ELSE GARBAGE
    IN /\ o.epoch = k.epoch
       /\ Expected(m, o)
       /\ k.stage = "applying"
       /\ k.writing.epoch = 0
       /\ node[e].gate = "closed"                                  \* no rank writes under an open gate
       /\ Identity(m) \notin k.seen                                \* duplicates
       /\ rank' = [ rank EXCEPT ![e][r] =
            [ k EXCEPT !.seen = @ \union { Identity(m) },
                       !.torn = @ \union { Mark(o) },              \* before the first byte
                       !.acknowledged = 0,                         \* void
                       !.writing = [ epoch |-> m.epoch, cell |-> m.cell, operation |-> m.operation, result |-> result ] ] ]
       /\ mem' = [ mem EXCEPT ![e][r][m.cell] = GARBAGE ]
       /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, node, prepared, acks >>

\* @type: (Str, Str) => Bool;
BeginWrite(e, r) == \E m \in net : BeginWriteOf(e, r, m)

\* Every entry of the payload is in place.  (D5)
\* @type: (Str, Str) => Bool;
EndWrite(e, r) ==
  /\ rank[e][r].writing.epoch # 0
  /\ mem' = [ mem EXCEPT ![e][r][rank[e][r].writing.cell] = rank[e][r].writing.result ]
  /\ rank' = [ rank EXCEPT ![e][r].writing = NoWriting ]
  /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, node, prepared, acks >>

\* A payload failed part-way: the cell stays torn, the epoch fails here and is never acknowledged.  (D5)
\* @type: (Str, Str) => Bool;
FailWrite(e, r) ==
  /\ rank[e][r].writing.epoch # 0
  /\ faults.writes > 0
  /\ faults' = [ faults EXCEPT !.writes = @ - 1 ]
  /\ failed' = failed \union { rank[e][r].writing.epoch }
  /\ rank' = [ rank EXCEPT ![e][r].writing = NoWriting, ![e][r].stage = "failed" ]
  /\ UNCHANGED << recordVars, coord, orders, applies, push, ownerVars, node, mem, prepared, acks >>

\* Every owner's manifest is complete, every payload that it lists is in place and synchronised.  A restore needs no
\* commit: what it brought was committed before.  (D8, D9, D15)
\* @type: (Str, Str) => Bool;
Acknowledge(e, r) ==
  \E o \in orders :
    /\ o.epoch = rank[e][r].epoch
    /\ rank[e][r].stage = "applying"
    /\ node[e].gate = "closed"
    /\ rank[e][r].writing.epoch = 0                                \* synchronised
    /\ \A w \in Owners : \E s \in manifests : s.epoch = o.epoch /\ s.owner = w /\ s.incarnation = o.owners[w]
    /\ \A m \in net : Expected(m, o) => Identity(m) \in rank[e][r].seen
    /\ acks' = acks \union { Report(e, r, o.epoch) }
    /\ rank' = [ rank EXCEPT ![e][r] =
         [ @ EXCEPT !.stage = "acknowledged", !.acknowledged = o.epoch,
                    !.version = IF o.kind = "restore" THEN o.version ELSE @,
                    !.torn = IF o.kind = "restore" THEN {} ELSE @ ] ]
    /\ UNCHANGED << recordVars, leaderVars, ownerVars, failed, node, mem, prepared >>

-----------------------------------------------------------------------------
(* Faults.                                                                  *)

\* What an engine may find when it starts: a checkpoint of any version that was committed, or of the trainer's weights,
\* which may become the next version or never be one.  (D2, D15)
\* @type: Set($content);
Checkpoints == { c.content : c \in commits } \union { weights }

\* @type: (Str, $content, Set(Int)) => Bool;
EngineRestartFrom(e, content, torn) ==
  /\ faults.engines > 0
  /\ faults' = [ faults EXCEPT !.engines = @ - 1 ]
  /\ node' = [ node EXCEPT ![e] =
       [ incarnation |-> @.incarnation + 1, gate |-> "closed", fence |-> 0, serving |-> NOVERSION, opening |-> NOEPOCH,
         version |-> 0 ] ]
  /\ rank' = [ rank EXCEPT ![e] = [ r \in Ranks |-> [ CleanRank(NOVERSION) EXCEPT !.torn = torn ] ] ]
  /\ mem' = [ mem EXCEPT ![e] = [ r \in Ranks |-> content ] ]
  /\ UNCHANGED << recordVars, coord, orders, applies, push, ownerVars, failed, prepared, acks >>

\* One rank is lost and with it the engine; it comes back as another incarnation, gate closed, with some checkpoint or
\* with nothing in storage.  What the dead incarnation sent may still arrive.  (D9, D15)
\* @type: (Str) => Bool;
EngineRestart(e) ==
  IF Reload THEN \E content \in Checkpoints : EngineRestartFrom(e, content, {})
  ELSE EngineRestartFrom(e, [ p \in Cells |-> GARBAGE ], { UNKNOWN })
=============================================================================
