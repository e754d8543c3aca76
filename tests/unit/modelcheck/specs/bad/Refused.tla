---- MODULE Refused ----
\* Each line that ends in a mark must be found, under the rule of the mark, and no other line.
EXTENDS Integers, TLC, Bags, Sequences
CONSTANT
  \* @type: Int;
  N
VARIABLE
  \* @type: Int;
  x
Limit == N + 1
Allowed == 1..Limit
AlsoAllowed == { q \in 0..(N * 2) : q > x }
Member == x \in Nat /\ x \notin Int
RECURSIVE F(_) \* refused
\* @type: (Int) => Int;
F(n) == F(n - 1)
Factorial[n \in 1..3] == IF n = 0 THEN 1 ELSE n * Factorial[n - 1] \* refused
Square[n \in 1..3] == n * n
Unbounded == \E q : q = 1 \* refused
AllUnbounded == \A q : q = 1 \* refused
Chosen == CHOOSE q \in {1} : TRUE \* refused
ChosenFreely == CHOOSE q : TRUE \* refused
AnySequence == << >> \in Seq({1}) \* refused
AnyNumber == \E q \in Nat : q = 1 \* refused
AnyFunction == [Int -> {1}] \* refused
Filtered == { q \in Int : q > 1 } \* refused
Mapped == [ q \in Nat |-> 1 ] \* refused
AnyText == STRING \* refused
FromState == 1..x \* refused
\* @type: (Int) => Set(Int);
FromParameter(n) == n..N \* refused
Possible == ENABLED Member \* refused
Weak == WF_x(Member) \* refused
Strong == SF_x(Member) \* refused
Composed == Member \cdot Member \* refused
LeadsTo == Member ~> Member \* refused
Guarantees == Member -+-> Member \* refused
Hidden == \EE z : z = 1 \* refused
Printed == PrintT("x") \* refused
Assured == Assert(TRUE, "x") \* refused
Accent == "é" \* refused
\* @type: (Int) => Int;
Other(n) == INSTANCE Elsewhere WITH y <- n \* refused
====
