"""Model checking: runs TLC and Apalache on the TLA+ specification, reads their traces, tells counterexamples."""
