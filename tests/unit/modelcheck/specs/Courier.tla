------------------------------ MODULE Courier ------------------------------
(* Couriers take parcels from a desk, one at a time, and may drop them.     *)
EXTENDS Integers, Sequences

CONSTANTS
  \* @type: Set(Str);
  Couriers,
  \* @type: Int;
  Parcels

VARIABLES
  \* @type: Seq(Int);
  desk,
  \* @type: Str -> { st: Str, parcel: Int };
  courier,
  \* @type: Set({ who: Str, parcel: Int });
  delivered,
  \* @type: { name: Str, who: Str };
  step

vars == << desk, courier, delivered, step >>

Init ==
  /\ desk = [ i \in 1..Parcels |-> i ]
  /\ courier = [ c \in Couriers |-> [ st |-> "idle", parcel |-> 0 ] ]
  /\ delivered = {}
  /\ step = [ name |-> "Init", who |-> "" ]

\* @type: (Str) => Bool;
Take(c) ==
  /\ courier[c].st = "idle"
  /\ desk # << >>
  /\ courier' = [ courier EXCEPT ![c] = [ st |-> "loaded", parcel |-> Head(desk) ] ]
  /\ desk' = Tail(desk)
  /\ step' = [ name |-> "Take", who |-> c ]
  /\ UNCHANGED delivered

\* @type: (Str) => Bool;
Deliver(c) ==
  /\ courier[c].st = "loaded"
  /\ delivered' = delivered \union { [ who |-> c, parcel |-> courier[c].parcel ] }
  /\ courier' = [ courier EXCEPT ![c] = [ st |-> "idle", parcel |-> 0 ] ]
  /\ step' = [ name |-> "Deliver", who |-> c ]
  /\ UNCHANGED desk

\* The parcel goes back to the end of the queue.
\* @type: (Str) => Bool;
Return(c) ==
  /\ courier[c].st = "loaded"
  /\ desk' = Append(desk, courier[c].parcel)
  /\ courier' = [ courier EXCEPT ![c] = [ st |-> "idle", parcel |-> 0 ] ]
  /\ step' = [ name |-> "Return", who |-> c ]
  /\ UNCHANGED delivered

CourierStep == \E c \in Couriers : Take(c) \/ Deliver(c) \/ Return(c)

Next == CourierStep

Spec == Init /\ [][Next]_vars

\* No parcel is delivered twice.
Once == \A x \in delivered : \A y \in delivered : x.parcel = y.parcel => x = y

\* Negated goal: its violation shows that everything can be delivered.
NeverDone == desk # << >> \/ \E c \in Couriers : courier[c].st = "loaded"

DeskShrinks == [][Len(desk') <= Len(desk)]_desk
=============================================================================
