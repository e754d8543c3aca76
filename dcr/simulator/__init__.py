"""Whole deployments of the pure roles in one process, from a seed.

What is simulated: trainers (a coordinator and one or two owners each), engines of one or two ranks, the control plane
and the delivery store, as the real hosts of ``dcr.runtime`` carry out the roles' effects: one small step at a time, in
any order.  Messages of one connection stay in order; connections break, what was on its way is lost or late, and the
loss is noticed late.  Payloads and manifests come in any order, again, and from epochs that are over.  Compare-and-sets
lose their answer before or after their effect, or take effect when nobody waits any more.  Readings of K are old when
they are handed in.  Processes stall, are cut off, and start again with what a real one knows: an engine its checkpoint,
of whatever version, or nothing; an owner the weights it loaded.  Coordinators are replaced by another one of the same
trainer or by another trainer, while the old one lives on and does not know.  Writes, syncs, gates, emissions and folds
fail.  Operators abandon, turn back and order dense attempts; trainers give pushes up, step under them, and push alone.

What is not: bytes (a weight is an integer, a digest is of integers), durations (a time-out runs out when the schedule
says so), the channel's proofs of identity, the memory bounds, readback, and everything else that ``dcr.runtime`` does
around the roles; tests/faults has the real processes.

A schedule is data: a deployment and a list of moves (``schedule.py``); a move that is not possible does nothing.
``generator.py`` makes one from a seed, ``moves.py`` has everything that can happen, ``deployment.py`` the parties.
After every move the party that moved is held to ``invariants.py``, on concrete cells; K at every write.  When the last
move is done faults stop, and ``liveness.py`` wants every engine to serve what is committed.  ``shrink.py`` makes a
failure small, ``story.py`` tells it, ``coverage.py`` counts which actions of the specification were taken.
docs/simulator.md leads through it.
"""
