---- MODULE Untyped ----
EXTENDS Integers
CONSTANTS
  \* @type: Int;
  Typed,
  Bare, \* type
  \* @type: Set(;
  Broken \* type
VARIABLES
  \* not a type
  a, \* type

  \* @type: $unknown;
  b, \* type
  \* @type: Int;
  c
NoParameters == 1
WithParameters(n) == n \* type
\* @type: (Int) => Int;
TypedOne(n) ==
  LET Inner(m) == m \* type
  IN Inner(n)
LOCAL Private(n) == n \* type
\* @type: (Int) => Int;

\* Words between, still directly before.
StillTyped(n) == n
====
