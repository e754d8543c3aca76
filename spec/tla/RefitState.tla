----------------------------- MODULE RefitState -----------------------------
(***************************************************************************)
(* What a refit deployment consists of: the commit record K, the parties,   *)
(* the messages that were ever sent, and what storage really holds.         *)
(*                                                                         *)
(* A digest is modelled by the bits that it digests: two contents are equal *)
(* if and only if their digests are.  A cell stands for the elements of one *)
(* payload; its value says whose bits it holds: 0 the first version's, c    *)
(* those of candidate c, 10 and more those of weights that broke their pin, *)
(* GARBAGE those of nobody.                                                 *)
(*                                                                         *)
(* Messages stay in their sets for ever: to be delayed, repeated, reordered *)
(* and lost is to be read late, again, in any order, or not at all.  A      *)
(* party that is dead takes no further step.                                *)
(***************************************************************************)
EXTENDS Integers

(*
  @typeAlias: content = Str -> Int;
  @typeAlias: roster = Str -> Int;
  @typeAlias: open = { target: Int, candidate: Int, attempts: Int, kind: Str, direction: Str, owners: $roster, stopped: Bool };
  @typeAlias: committed = { version: Int, epoch: Int, candidate: Int, direction: Str, members: $roster, root: $roster };
  @typeAlias: record = { revision: Int, version: Int, epoch: Int, leader: Str, token: Int, baseline: $content, members: $roster, open: $open, committed: $committed, reason: Str };
  @typeAlias: order = { epoch: Int, kind: Str, version: Int, candidate: Int, direction: Str, owners: $roster, members: $roster };
  @typeAlias: write = { by: Str, record: $record, order: $order };
  @typeAlias: coordinator = { phase: Str, revision: Int, epoch: Int, candidate: Int };
  @typeAlias: report = { epoch: Int, engine: Str, rank: Str, incarnation: Int };
  @typeAlias: payload = { epoch: Int, owner: Str, incarnation: Int, cell: Str, operation: Str, old: Int, new: Int };
  @typeAlias: identity = { owner: Str, incarnation: Int, cell: Str, digest: Int };
  @typeAlias: manifest = { epoch: Int, owner: Str, incarnation: Int, bits: $content };
  @typeAlias: seal = { candidate: Int, bits: $content };
  @typeAlias: owner = { incarnation: Int, base: Int, folding: Bool, folded: Int, fence: Int, emitting: Int, seal: $seal };
  @typeAlias: node = { incarnation: Int, gate: Str, fence: Int, serving: Int, opening: Int, version: Int };
  @typeAlias: writing = { epoch: Int, cell: Str, operation: Str, result: Int };
  @typeAlias: rank = { fence: Int, epoch: Int, stage: Str, seen: Set($identity), writing: $writing, version: Int, torn: Set(Int), acknowledged: Int };
  @typeAlias: faults = { engines: Int, owners: Int, leaders: Int, writes: Int, waits: Int, evictions: Int, unknowns: Int, steps: Int, stops: Int, abandons: Int, rollbacks: Int };
*)
RefitTypeAliases == TRUE

CONSTANTS
  \* The deployment.
  \* @type: Set(Str);
  Engines,
  \* @type: Set(Str);
  Ranks,
  \* @type: Set(Str);
  Owners,
  \* @type: Set(Str);
  Cells,
  \* @type: Str -> Str;
  OwnerOf,
  \* @type: Set(Str);
  Coordinators,
  \* @type: Str;
  FirstLeader,
  \* Cells that every candidate changes; those with an even number change no other.
  \* @type: Set(Str);
  Narrow,
  \* Sets of engines that have `members_min` or more.
  \* @type: Set(Set(Str));
  Enough,
  \* Kinds of attempt that are used: relative, absolute, dense.
  \* @type: Set(Str);
  Kinds,
  \* Asynchronous gate: payloads are staged while the old version is served.
  \* @type: Bool;
  Async,
  \* The leader opens attempts on reports that may be old: any engine, clean or not.
  \* @type: Bool;
  StaleReports,
  \* A restarted engine loads a checkpoint, of whatever version; otherwise it holds nothing.
  \* @type: Bool;
  Reload,
  \* Bounds.
  \* @type: Int;
  MaxVersion,
  \* @type: Int;
  MaxCandidates,
  \* @type: Int;
  MaxAttempts,
  \* How often each fault, or each whim of an operator, may happen.
  \* @type: Int;
  MaxEngineRestarts,
  \* @type: Int;
  MaxOwnerRestarts,
  \* @type: Int;
  MaxTakeOvers,
  \* @type: Int;
  MaxFailedWrites,
  \* @type: Int;
  MaxTimeOuts,
  \* @type: Int;
  MaxEvictions,
  \* @type: Int;
  MaxUnknowns,
  \* @type: Int;
  MaxSteps,
  \* @type: Int;
  MaxStops,
  \* @type: Int;
  MaxAbandons,
  \* @type: Int;
  MaxRollbacks

VARIABLES
  \* The commit record (D1).
  \* @type: $record;
  K,
  \* Compare-and-sets whose answer was lost and that may still take effect (D3).
  \* @type: Set($write);
  writes,
  \* @type: Str -> $coordinator;
  coord,
  \* Prepare, emit and restore orders: one for each epoch that was opened.
  \* @type: Set($order);
  orders,
  \* Epochs for which open_apply was ordered (D18).
  \* @type: Set(Int);
  applies,
  \* Epochs that somebody reported as failed.
  \* @type: Set(Int);
  failed,
  \* Epochs whose commit was published: fold orders (D13).
  \* @type: Set(Int);
  told,
  \* The trainer: the last candidate that it offered, and whether that push is over.
  \* @type: { candidate: Int, over: Bool };
  push,
  \* @type: Str -> $owner;
  own,
  \* The owners' baseline, bit for bit.
  \* @type: $content;
  tracker,
  \* The trainer's weights: the pinned candidate while a push is under way.
  \* @type: $content;
  weights,
  \* @type: Set($payload);
  net,
  \* @type: Set($manifest);
  manifests,
  \* Node agents: one gate for each engine.
  \* @type: Str -> $node;
  node,
  \* @type: Str -> (Str -> $rank);
  rank,
  \* What storage really holds.
  \* @type: Str -> (Str -> $content);
  mem,
  \* Who reported to be prepared or, in the asynchronous mode, to have staged an epoch (D6, D18).
  \* @type: Set($report);
  prepared,
  \* Who acknowledged an epoch (D8).
  \* @type: Set($report);
  acks,
  \* History, which no party reads: what was committed, and who was let serve it.
  \* @type: Set({ version: Int, epoch: Int, content: $content });
  commits,
  \* @type: Set({ engine: Str, incarnation: Int, version: Int });
  licensed,
  \* Faults that may still happen.
  \* @type: $faults;
  faults

vars == << K, writes, coord, orders, applies, failed, told, push, own, tracker, weights, net, manifests, node, rank,
           mem, prepared, acks, commits, licensed, faults >>

recordVars == << K, commits, licensed, writes >>
leaderVars == << coord, orders, applies, push, faults >>
ownerVars == << own, tracker, weights, net, manifests, told >>
engineVars == << node, rank, mem, prepared, acks >>

-----------------------------------------------------------------------------

GARBAGE == -1
NOVERSION == -1
NOEPOCH == -1

\* Marks beside candidates' numbers: what wrote on storage since it held a version.
DENSE == -1
RESTORE == -2
UNKNOWN == -3

NoOpen == [ target |-> 0, candidate |-> 0, attempts |-> 0, kind |-> "none", direction |-> "none",
            owners |-> [ o \in Owners |-> 0 ], stopped |-> FALSE ]

NoWriting == [ epoch |-> 0, cell |-> "", operation |-> "", result |-> 0 ]

FirstContent == [ p \in Cells |-> 0 ]

\* @type: $seal;
NoSeal == [ candidate |-> 0, bits |-> FirstContent ]

\* The weights of this owner are not what it sealed in the name of this candidate.  (D10)
\* @type: (Str, Int) => Bool;
Stepped(o, candidate) ==
  /\ own[o].seal.candidate = candidate
  /\ candidate # 0
  /\ \E p \in Cells : OwnerOf[p] = o /\ weights[p] # own[o].seal.bits[p]

\* @type: (Int) => $rank;
CleanRank(version) ==
  [ fence |-> 0, epoch |-> 0, stage |-> "idle", seen |-> {}, writing |-> NoWriting,
    version |-> version, torn |-> {}, acknowledged |-> 0 ]

\* An attempt is under way: opened, not committed, abandoned or stopped.
\* @type: ($record) => Bool;
UnderWay(k) == k.open.target # 0 /\ ~k.open.stopped

\* Engines that may serve what K now names, as incarnations (D12).
\* @type: ($record) => Set({ engine: Str, incarnation: Int, version: Int });
Roster(k) ==
  IF UnderWay(k) THEN {}
  ELSE { [ engine |-> e, incarnation |-> k.members[e], version |-> k.version ] : e \in { x \in Engines : k.members[x] # 0 } }

\* This owner, as the incarnation whose seal was committed, has the candidate that K names and has not folded it.  (D13)
\* @type: (Str) => Bool;
OwesFold(o) ==
  /\ K.committed.direction = "forward"
  /\ K.committed.root[o] = own[o].incarnation                      \* its own seal
  /\ own[o].folded # K.committed.epoch

\* K and every engine at version 0, every owner's baseline in place (CreateRecord, D2).
Init ==
  /\ K = [ revision |-> 1, version |-> 0, epoch |-> 0, leader |-> FirstLeader, token |-> 1,
           baseline |-> FirstContent, members |-> [ e \in Engines |-> 1 ], open |-> NoOpen,
           committed |-> [ version |-> 0, epoch |-> 0, candidate |-> 0, direction |-> "none",
                           members |-> [ e \in Engines |-> 0 ], root |-> [ o \in Owners |-> 0 ] ],
           reason |-> "CreateRecord" ]
  /\ writes = {}
  /\ coord = [ c \in Coordinators |->
       [ phase |-> IF c = FirstLeader THEN "idle" ELSE "standby",
         revision |-> IF c = FirstLeader THEN 1 ELSE 0, epoch |-> 0, candidate |-> 0 ] ]
  /\ orders = {}
  /\ applies = {}
  /\ failed = {}
  /\ told = {}
  /\ push = [ candidate |-> 0, over |-> TRUE ]
  /\ own = [ o \in Owners |->
       [ incarnation |-> 1, base |-> 0, folding |-> FALSE, folded |-> 0, fence |-> 0, emitting |-> 0,
         seal |-> NoSeal ] ]
  /\ tracker = FirstContent
  /\ weights = FirstContent
  /\ net = {}
  /\ manifests = {}
  /\ node = [ e \in Engines |->
       [ incarnation |-> 1, gate |-> "open", fence |-> 0, serving |-> 0, opening |-> NOEPOCH, version |-> 0 ] ]
  /\ rank = [ e \in Engines |-> [ r \in Ranks |-> CleanRank(0) ] ]
  /\ mem = [ e \in Engines |-> [ r \in Ranks |-> FirstContent ] ]
  /\ prepared = {}
  /\ acks = {}
  /\ commits = { [ version |-> 0, epoch |-> 0, content |-> FirstContent ] }
  /\ licensed = Roster(K)
  /\ faults = [ engines |-> MaxEngineRestarts, owners |-> MaxOwnerRestarts, leaders |-> MaxTakeOvers,
                writes |-> MaxFailedWrites, waits |-> MaxTimeOuts, evictions |-> MaxEvictions,
                unknowns |-> MaxUnknowns, steps |-> MaxSteps, stops |-> MaxStops,
                abandons |-> MaxAbandons, rollbacks |-> MaxRollbacks ]
=============================================================================
