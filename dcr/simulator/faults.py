"""What is done to the deployment: faults, an operator's and a trainer's whims, time."""

from typing import TYPE_CHECKING

from dcr.protocol.messages import Intervention
from dcr.simulator.act import Table, move
from dcr.simulator.cells import Payload, other_payload
from dcr.simulator.network import Connected, Lost, message_name
from dcr.simulator.owner import SimulatedOwner

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment

FAULTS: Table = {}


# ---------------------------------------------------------------- the network


@move(FAULTS, "break", "{who}: the connection breaks; the last reports are lost, orders are lost or late")
def _break(world: "Deployment", who: str, n: int) -> bool:
    p = world.party(who)
    return p is not None and world.disconnect(p, lost=n % 4, kept=n // 4)


@move(FAULTS, "late", "{who} takes an order of a connection that is gone")
def _late(world: "Deployment", who: str, _: int) -> bool:
    p = world.party(who)
    if p is None or p.stalled or p.cut or not p.late:
        return False
    if world.notes is not None:
        world.notes.append(message_name(p.late[0]))
    p.take(p.late.popleft())
    return True


@move(FAULTS, "stray", "{who}, which began without a baseline, takes an order that its predecessor was sent")
def _stray(world: "Deployment", who: str, n: int) -> bool:
    o = world.owner(who)
    return o is not None and not o.stalled and not o.cut and o.stray(n)


@move(FAULTS, "twice", "{who}: a message comes twice")
def _twice(world: "Deployment", who: str, n: int) -> bool:
    p = world.party(who)
    if p is None or p.link is None:
        return False
    if n % 2:
        if not p.link.down:
            return False
        p.link.down.insert(0, p.link.down[0])
    else:
        if not p.link.inbox or isinstance(p.link.inbox[-1], Lost | Connected):
            return False
        p.link.inbox.append(p.link.inbox[-1])
    return True


@move(FAULTS, "replay", "{who}: a payload or a manifest comes late, or again")
def _replay(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    item = world.delivery.anything(n // 4)
    return e is not None and not e.stalled and item is not None and e.ranks[n % e.width].feed(item)


@move(
    FAULTS, "stranger", "{who}: a payload arrives that no manifest lists: of another incarnation, or with other bytes"
)
def _stranger(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    items = [] if e is None or e.fetching is None else world.delivery.of(e.fetching)
    payloads = [item for _, item in items if isinstance(item, Payload)]
    if e is None or e.stalled or not payloads:
        return False
    return e.ranks[n % e.width].feed(other_payload(payloads[n // 8 % len(payloads)], n))


@move(FAULTS, "cut", "{who} is cut off: nothing passes between it and anybody")
def _cut(world: "Deployment", who: str, _: int) -> bool:
    p = world.party(who) or world.coordinator(who)
    if p is None or p.cut:
        return False
    p.cut = True
    return True


@move(FAULTS, "mend", "{who} is reached again")
def _mend(world: "Deployment", who: str, _: int) -> bool:
    p = world.party(who) or world.coordinator(who)
    if p is None or not p.cut:
        return False
    p.cut = False
    return True


# ---------------------------------------------------------------- processes


@move(FAULTS, "stall", "{who} stalls: it takes no step")
def _stall(world: "Deployment", who: str, _: int) -> bool:
    p = world.party(who) or world.coordinator(who)
    if p is None or p.stalled:
        return False
    p.stalled = True
    return True


@move(FAULTS, "wake", "{who} goes on")
def _wake(world: "Deployment", who: str, _: int) -> bool:
    p = world.party(who) or world.coordinator(who)
    if p is None or not p.stalled:
        return False
    p.stalled = False
    return True


@move(FAULTS, "crash", "{who} dies and starts again as its next incarnation")
def _crash(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    if e is None:
        return False
    world.disconnect(e, lost=n % 3, kept=0)
    choice = n // 3
    content = None if choice % 3 == 0 else world.checkpoint(choice // 3)
    if choice % 9 == 1:  # weights that are not committed, and may come to be
        content = {i: v for o in world.owners for i, v in o.weights.items()}
    e.start(content)
    e.stalled = e.cut = False
    world.actions.add("EngineRestart")
    return True


@move(FAULTS, "restart", "{who} dies and starts again as its next incarnation")
def _restart(world: "Deployment", who: str, n: int) -> bool:
    o = world.owner(who)
    if o is None:
        return False
    world.disconnect(o, lost=n % 3, kept=0)
    choice = n // 3
    cells = world.checkpoint(choice // 4)
    baselined = choice % 4 != 0 or world.store.record is None  # K begins with the owners' baseline
    o.start({i: cells[i] for i in o.indices}, baselined=baselined)
    o.stalled = o.cut = False
    if choice % 2:  # it comes to the same push as the others, with weights of its own
        o.train(n)
        o.push()
    world.actions.add("OwnerRestart")
    return True


@move(FAULTS, "boot", "the trainer dies, or is cut off from its job; another one starts from a checkpoint")
def _boot(world: "Deployment", _: str, n: int) -> bool:
    world.boot_trainer(n // 2, old_lives=n % 2 == 1)
    world.actions.add("OwnerRestart")
    return True


@move(FAULTS, "succeed", "another coordinator of the same trainer takes over")
def _succeed(world: "Deployment", _: str, n: int) -> bool:
    world.succeed(n // 2, old_lives=n % 2 == 1)
    return True


# ---------------------------------------------------------------- the control plane


@move(FAULTS, "unanswered", "{who}: a compare-and-set has no answer")
def _unanswered(world: "Deployment", who: str, n: int) -> bool:
    c = world.coordinator(who)
    if c is None or c.stalled or not (writes := c.writes()):
        return False
    c.lose_answer(writes[n // 3 % len(writes)], n)
    return True


@move(FAULTS, "late_write", "a compare-and-set that nobody waits for arrives")
def _late_write(world: "Deployment", _: str, n: int) -> bool:
    return world.late_write(n)


@move(FAULTS, "answered_last", "{who}: its compare-and-set takes effect, and it dies before it hears so")
def _answered_last(world: "Deployment", who: str, n: int) -> bool:
    c = world.coordinator(who)
    if c is None or c is not world.leader or not (writes := c.writes()):
        return False
    world.store.take_effect(writes[n % len(writes)])
    world.succeed(n, old_lives=False)
    return True


# ---------------------------------------------------------------- time


@move(FAULTS, "run_out", "{who}: a time-out runs out")
def _run_out(world: "Deployment", who: str, n: int) -> bool:
    c = world.coordinator(who)
    return c is not None and not c.stalled and c.run_out(n)


@move(FAULTS, "lose_record", "{who} did not reach K for as long as it may serve")
def _lose_record(world: "Deployment", who: str, _: int) -> bool:
    e = world.engine(who)
    if e is None or e.stalled or not e.lose_record():
        return False
    world.actions.add("LoseRecord")
    return True


@move(FAULTS, "jump", "every clock jumps: whatever is waited for runs out")
def _jump(world: "Deployment", _: str, n: int) -> bool:
    moved = False
    for e in world.engines:
        moved |= _lose_record(world, e.id, 0)
    for c in [*world.coordinators()]:
        moved |= _run_out(world, c.id, n)
    return moved


# ---------------------------------------------------------------- what fails


@move(FAULTS, "fail_write", "{who}: the write of rank {n} fails part-way")
def _fail_write(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    return e is not None and not e.stalled and e.ranks[n % e.width].write_step(fail=True)


@move(FAULTS, "fail_synchronise", "{who}: the checks after the last write of rank {n} find an error")
def _fail_synchronise(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    return e is not None and not e.stalled and e.ranks[n % e.width].synchronise_step(fail=True)


@move(FAULTS, "stick", "{who}: the gate will not move")
def _stick(world: "Deployment", who: str, _: int) -> bool:
    e = world.engine(who)
    return e is not None and not e.stalled and e.gate_step(stuck=True)


@move(FAULTS, "fail_emit", "{who}: the delivery of its emission fails")
def _fail_emit(world: "Deployment", who: str, _: int) -> bool:
    o = world.owner(who)
    return o is not None and not o.stalled and o.emission_step(fail=True)


@move(FAULTS, "fail_fold", "{who}: its fold fails part-way")
def _fail_fold(world: "Deployment", who: str, _: int) -> bool:
    o = world.owner(who)
    return o is not None and not o.stalled and o.fold_step(fail=True)


# ---------------------------------------------------------------- people, and the trainer's program


@move(FAULTS, "abandon", "the operator abandons the transition")
def _abandon(world: "Deployment", _: str, __: int) -> bool:
    policy = world.leader.policy
    if world.leader.stalled or world.leader.fatal or policy is None:
        return False
    world.leader.run(policy.abandon())
    return True


@move(FAULTS, "roll_back", "the operator turns the transition back")
def _roll_back(world: "Deployment", _: str, __: int) -> bool:
    policy = world.leader.policy
    if world.leader.stalled or world.leader.fatal or policy is None:
        return False
    world.leader.run(policy.roll_back())
    return True


@move(FAULTS, "resume", "the operator has the stopped transition go on")
def _resume(world: "Deployment", _: str, __: int) -> bool:
    return not world.leader.stalled and world.leader.go_on(Intervention.RESUME)


@move(FAULTS, "dense", "the operator orders dense attempts")
def _dense(world: "Deployment", _: str, __: int) -> bool:
    policy = world.leader.policy
    if world.leader.stalled or world.leader.fatal or policy is None:
        return False
    if not world.leader.go_on(Intervention.DENSE):
        policy.dense_next()
    return True


@move(FAULTS, "step", "{who} steps its weights although they are offered")
def _step(world: "Deployment", who: str, n: int) -> bool:
    o = world.owner(who)
    if o is None or o.stalled or not o.step_candidate(n):
        return False
    world.actions.add("StepCandidate")
    return True


@move(FAULTS, "give_up", "{who} gives its push up")
def _give_up(world: "Deployment", who: str, n: int) -> bool:
    o = world.owner(who)
    if o is None or o.stalled or not o.pushing:
        return False
    o.give_up(n)
    return True


@move(FAULTS, "push_alone", "{who} pushes, whatever the other ranks do")
def _push_alone(world: "Deployment", who: str, n: int) -> bool:
    o = world.owner(who)
    if not isinstance(o, SimulatedOwner) or o.stalled or o.pushing:
        return False
    if n % 2:
        o.train(n)
    o.push()
    return True
