------------------------------ MODULE MCRefit -------------------------------
(* What TLC's configurations need beside the protocol.                      *)
EXTENDS Refit

\* @type: Str -> Str;
OneOwner == [ p \in Cells |-> "o1" ]
\* @type: Str -> Str;
TwoOwners == [ p \in Cells |-> IF p = "p1" THEN "o1" ELSE "o2" ]

MonotoneRecord == [][RecordStep]_K

\* Apalache's `--cinit`: the constants of gate_sync.cfg.
GateSyncConstants ==
  /\ Engines = { "e1", "e2" }
  /\ Ranks = { "r1" }
  /\ Owners = { "o1" }
  /\ Cells = { "p1", "p2" }
  /\ OwnerOf = [ p \in { "p1", "p2" } |-> "o1" ]
  /\ Coordinators = { "c1" }
  /\ FirstLeader = "c1"
  /\ Narrow = { "p1" }
  /\ Enough = { { "e1" }, { "e2" }, { "e1", "e2" } }
  /\ Kinds = { "relative", "absolute" }
  /\ Async = FALSE
  /\ StaleReports = FALSE
  /\ Reload = FALSE
  /\ MaxVersion = 1
  /\ MaxCandidates = 1
  /\ MaxAttempts = 2
  /\ MaxEngineRestarts = 0
  /\ MaxOwnerRestarts = 0
  /\ MaxTakeOvers = 0
  /\ MaxFailedWrites = 1
  /\ MaxTimeOuts = 0
  /\ MaxEvictions = 0
  /\ MaxUnknowns = 0
  /\ MaxSteps = 0
  /\ MaxStops = 0
  /\ MaxAbandons = 0
  /\ MaxRollbacks = 0
=============================================================================
