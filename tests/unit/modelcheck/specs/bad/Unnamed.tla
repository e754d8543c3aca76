---- MODULE Unnamed ----
EXTENDS Integers
VARIABLE
  \* @type: Int;
  x
Up == x < 3 /\ x' = x + 1
\* @type: (Int) => Bool;
By(n) == x' = x + n
Either ==
  \/ x = 1 /\ x' = 2
  \/ x = 2 /\ x' = 1
Group == Up \/ \E n \in 1..2 : By(n)
Mixed ==
  \/ Up
  \/ x' = 7 \* action
Guarded == x = 1 /\ Up
Next ==
  \/ Up
  \/ Either
  \/ Group
  \/ Mixed
  \/ Guarded
  \/ UNCHANGED x \* action
  \/ /\ x = 3 \* action
     /\ Up
  \/ \E n \in 1..2 : n > 1 /\ By(n) \* action
  \/ Nowhere \* action
StepNext == x' = 1 \* action
====
