------------------------------- MODULE Values -------------------------------
(* One value of each kind that TLC prints in a way of its own.               *)
EXTENDS Integers, Sequences

CONSTANTS
  \* @type: NODE;
  n1,
  \* @type: NODE;
  n2

VARIABLES
  \* @type: Str;
  text,
  \* @type: Int -> Str;
  fromZero,
  \* @type: Str -> Int;
  oddKeys,
  \* @type: Str -> Int;
  nobody,
  \* @type: Seq(Int);
  nothing,
  \* @type: NODE -> Set(Int);
  byNode,
  \* @type: Int -> Int;
  fromOne,
  \* @type: <<Str, Int, Bool>>;
  mixed,
  \* @type: Set(<<Int, Int>>);
  pairs,
  \* @type: { a: Set(Set(Int)), b: { c: Seq(Str) } };
  deep,
  \* @type: Int;
  count

vars == << text, fromZero, oddKeys, nobody, nothing, byNode, fromOne, mixed, pairs, deep, count >>

Init ==
  /\ text = "a \"quoted\" word, a \\ and\na second line"
  /\ fromZero = [ i \in {0, 1} |-> "x" ]
  /\ oddKeys = [ s \in {"node-a", "", "7"} |-> -5 ]
  /\ nobody = [ s \in {} |-> 0 ]
  /\ nothing = << >>
  /\ byNode = [ n \in {n1, n2} |-> 1..3 ]
  /\ fromOne = [ i \in 1..3 |-> i * i ]
  /\ mixed = << "a", -1, TRUE >>
  /\ pairs = {1, 2} \X {-3}
  /\ deep = [ a |-> SUBSET {1, 2}, b |-> [ c |-> << "x", "a rather long string that TLC wraps into two lines" >> ] ]
  /\ count = 0

Count ==
  /\ count < 2
  /\ count' = count + 1
  /\ UNCHANGED << text, fromZero, oddKeys, nobody, nothing, byNode, fromOne, mixed, pairs, deep >>

Next == Count

Spec == Init /\ [][Next]_vars

Below == count < 1
Reaches == <>(count = 5)
NoSuchField == count < 1 \/ deep.z = 1
=============================================================================
