----------------------------- MODULE RefitOwner -----------------------------
(***************************************************************************)
(* The trainer and its owners: they detect what changed against the         *)
(* baseline, emit it, seal it, and after the commit fold the candidate into *)
(* the baseline.                                                            *)
(***************************************************************************)
EXTENDS RefitState

\* Whether candidate c changes cell p; even ones leave the cells outside `Narrow` as they are.
\* @type: (Int, Str) => Bool;
Changes(c, p) == p \in Narrow \/ c % 2 = 1

\* push() on every rank: new weights are offered as a candidate and pinned.  The trainer does so only once the last push
\* is over; until then it takes no optimizer step.  (D10)
CandidateReady ==
  /\ push.over
  /\ push.candidate < MaxCandidates
  /\ K.version < MaxVersion
  /\ push' = [ candidate |-> push.candidate + 1, over |-> FALSE ]
  /\ weights' = [ p \in Cells |-> IF Changes(push.candidate + 1, p) THEN push.candidate + 1 ELSE K.baseline[p] ]
  /\ UNCHANGED << recordVars, coord, orders, applies, failed, told, own, tracker, net, manifests, engineVars, faults >>

\* The payloads of one owner for one order.  Changes are found by comparing stored bits with the baseline.
\* @type: (Str, $order) => Set($payload);
Payloads(o, order) ==
  LET mine == { p \in Cells : OwnerOf[p] = o }
      forward == order.direction = "forward"
      sent == IF order.kind \in { "dense", "restore" } THEN mine ELSE { p \in mine : weights[p] # tracker[p] }
  IN { [ epoch |-> order.epoch, owner |-> o, incarnation |-> own[o].incarnation, cell |-> p,
         operation |-> IF order.kind = "relative" THEN "add" ELSE "set",
         old |-> IF order.kind = "relative" THEN tracker[p] ELSE 0,
         new |-> IF forward THEN weights[p] ELSE tracker[p] ] : p \in sent }

\* An owner emits its share: once per epoch, never while it folds, and without its baseline at the order's version only
\* what needs none.  Detection, conversion and delivery take their time: payloads arrive whenever they do.  (D4, D7, D13)
\* @type: (Str, $order) => Bool;
EmitFor(o, order) ==
  /\ order.epoch > own[o].fence                                    \* once per epoch
  /\ ~own[o].folding                                               \* not while it folds
  /\ order.kind = "dense" \/ own[o].base = order.version
  /\ net' = net \union Payloads(o, order)
  /\ own' = [ own EXCEPT ![o].fence = order.epoch, ![o].emitting = order.epoch ]
  /\ UNCHANGED << recordVars, leaderVars, told, failed, tracker, weights, manifests, engineVars >>

\* @type: (Str) => Bool;
Emit(o) == \E order \in orders : EmitFor(o, order)

\* @type: (Str, $content) => $content;
Share(o, content) == [ p \in Cells |-> IF OwnerOf[p] = o THEN content[p] ELSE 0 ]

\* The owner's manifest: everything it emitted, and its share of the target's content digest.  A candidate whose digest
\* is no longer what an earlier attempt found is not sealed.  (D8, D10)
\* @type: (Str) => Bool;
Seal(o) ==
  \E order \in orders :
    /\ own[o].emitting = order.epoch
    /\ ~Stepped(o, order.candidate)                                \* the same candidate
    /\ manifests' = manifests \union
         { [ epoch |-> order.epoch, owner |-> o, incarnation |-> own[o].incarnation,
             bits |-> Share(o, IF order.direction = "forward" THEN weights ELSE tracker) ] }
    /\ own' = [ own EXCEPT ![o].emitting = 0, ![o].seal =
         IF order.direction = "forward" THEN [ candidate |-> order.candidate, bits |-> Share(o, weights) ] ELSE @ ]
    /\ UNCHANGED << recordVars, leaderVars, told, failed, tracker, weights, net, engineVars >>

\* The candidate is not what it was when an earlier attempt sealed it, or the order needs a baseline and there is none:
\* this epoch fails, by name.  (D10, D17)
\* @type: (Str, $order) => Bool;
EmitFailedFor(o, order) ==
  /\ \/ own[o].emitting = order.epoch /\ Stepped(o, order.candidate)
     \/ /\ order.epoch > own[o].fence
        /\ order.kind # "dense"
        /\ own[o].base = NOVERSION
        /\ ~OwesFold(o)
  /\ failed' = failed \union { order.epoch }
  /\ own' = [ own EXCEPT ![o].emitting = 0, ![o].fence = order.epoch ]
  /\ UNCHANGED << recordVars, coord, orders, applies, push, faults, told, tracker, weights, net, manifests, engineVars >>

\* @type: (Str) => Bool;
EmitFailed(o) == \E order \in orders : EmitFailedFor(o, order)

-----------------------------------------------------------------------------
(* The fold.                                                                *)

\* The mark stands before the first byte: from here to EndFold the baseline is no version's.  K is read first.  (D13)
\* @type: (Str) => Bool;
BeginFold(o) ==
  /\ K.committed.epoch \in told
  /\ ~own[o].folding
  /\ OwesFold(o)
  /\ own' = [ own EXCEPT ![o].folding = TRUE, ![o].base = K.version, ![o].folded = K.committed.epoch ]
  /\ UNCHANGED << recordVars, leaderVars, told, failed, tracker, weights, net, manifests, engineVars >>

\* One cell of the candidate is copied into the baseline, in place; copying it again would change nothing.  (D13)
\* @type: (Str) => Bool;
FoldCell(o) ==
  \E p \in Cells :
    /\ OwnerOf[p] = o
    /\ own[o].folding
    /\ tracker[p] # weights[p]
    /\ tracker' = [ tracker EXCEPT ![p] = weights[p] ]
    /\ UNCHANGED << recordVars, leaderVars, told, failed, own, weights, net, manifests, engineVars >>

\* The last byte is in place and the copy digests to what was committed: the mark is cleared.  (D13)
\* @type: (Str) => Bool;
EndFold(o) ==
  /\ own[o].folding
  /\ \A p \in Cells : OwnerOf[p] = o => tracker[p] = weights[p]    \* after the last byte
  /\ ~Stepped(o, K.committed.candidate)                            \* what was committed
  /\ own' = [ own EXCEPT ![o].folding = FALSE ]
  /\ UNCHANGED << recordVars, leaderVars, told, failed, tracker, weights, net, manifests, engineVars >>

\* What was folded is not what was committed: the baseline is lost, and the next transition is dense.  (D17)
\* @type: (Str) => Bool;
LoseBaseline(o) ==
  /\ own[o].folding
  /\ Stepped(o, K.committed.candidate)
  /\ own' = [ own EXCEPT ![o].folding = FALSE, ![o].base = NOVERSION ]
  /\ tracker' = [ p \in Cells |-> IF OwnerOf[p] = o THEN GARBAGE ELSE tracker[p] ]
  /\ UNCHANGED << recordVars, leaderVars, told, failed, weights, net, manifests, engineVars >>

-----------------------------------------------------------------------------
(* Faults.                                                                  *)

\* The trainer breaks its word and steps under a candidate that an attempt has sealed; before the first seal nothing but
\* the pin can tell the two apart.  What the step changes is another set of cells.  (D10)
\* @type: (Str) => Bool;
StepCandidate(o) ==
  /\ faults.steps > 0
  /\ ~push.over
  /\ own[o].seal.candidate = push.candidate
  /\ ~Stepped(o, push.candidate)
  /\ own[o].emitting = 0
  /\ ~own[o].folding
  /\ faults' = [ faults EXCEPT !.steps = @ - 1 ]
  /\ weights' = [ p \in Cells |->
       IF OwnerOf[p] # o THEN weights[p] ELSE IF p \in Narrow THEN weights[p] + 10 ELSE tracker[p] ]
  /\ UNCHANGED << recordVars, coord, orders, applies, push, own, told, failed, tracker, net, manifests, engineVars >>

\* An owner dies and comes back as another incarnation: without baseline, with weights that are no longer the candidate.
\* It obeys any order again, and packs what it emits in its own way.  Where the others wait with a push, it pushes again:
\* together that is another candidate.  (D7, D10, D17)
\* @type: (Str) => Bool;
OwnerRestart(o) ==
  /\ faults.owners > 0
  /\ faults' = [ faults EXCEPT !.owners = @ - 1 ]
  /\ own' = [ own EXCEPT ![o] =
       [ incarnation |-> @.incarnation + 1, base |-> NOVERSION, folding |-> FALSE, folded |-> 0, fence |-> 0,
         emitting |-> 0, seal |-> NoSeal ] ]
  /\ tracker' = [ p \in Cells |-> IF OwnerOf[p] = o THEN GARBAGE ELSE tracker[p] ]
  /\ weights' = [ p \in Cells |-> IF OwnerOf[p] = o THEN weights[p] + 10 ELSE weights[p] ]
  /\ push' = [ push EXCEPT !.candidate = IF push.over THEN @ ELSE @ + 1 ]
  /\ UNCHANGED << recordVars, coord, orders, applies, told, failed, net, manifests, engineVars >>
=============================================================================
