---------------------------- MODULE CourierLive ----------------------------
(* Fairness and liveness: for TLC alone.                                     *)
EXTENDS Courier

FairSpec == Spec /\ \A c \in Couriers : WF_vars(Take(c)) /\ WF_vars(Deliver(c))

Finishes == <>(desk = << >>)
=============================================================================
