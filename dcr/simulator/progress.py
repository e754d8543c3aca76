"""What happens by itself: messages arrive, parties do what is due, somebody looks at K, the trainer pushes."""

from typing import TYPE_CHECKING

from dcr.simulator.act import Table, move
from dcr.simulator.network import message_name

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment

PROGRESS: Table = {}


@move(PROGRESS, "hear", "{who}: the next report arrives")
def _hear(world: "Deployment", who: str, _: int) -> bool:
    leader, _colon, name = who.partition(":")
    c = world.coordinator(leader)
    if world.notes is not None and c is not None and c.inbox.get(name):
        world.notes.append(message_name(c.inbox[name][0]))
    return c is not None and not c.stalled and not c.cut and not c.fatal and c.hear(name)


@move(PROGRESS, "take", "{who} takes the next order")
def _take(world: "Deployment", who: str, _: int) -> bool:
    p = world.party(who)
    if p is None or p.stalled or p.cut or p.link is None or not p.link.down:
        return False
    if world.notes is not None:
        world.notes.append(message_name(p.link.down[0]))
    p.take(p.link.down.popleft())
    return True


@move(PROGRESS, "read", "{who} reads K, or is handed what it read")
def _read(world: "Deployment", who: str, n: int) -> bool:
    p = world.party(who) or world.coordinator(who)
    return p is not None and not p.stalled and not p.cut and p.read_step(n)


@move(PROGRESS, "answer", "{who}: its compare-and-set is answered")
def _answer(world: "Deployment", who: str, n: int) -> bool:
    c = world.coordinator(who)
    if c is None or c.stalled or c.cut or not (writes := c.writes()):
        return False
    c.answer(writes[n % len(writes)])
    return True


@move(PROGRESS, "lead", "{who}, which has no policy, does something that it may do")
def _lead(world: "Deployment", who: str, n: int) -> bool:
    c = world.coordinator(who)
    return c is not None and not c.stalled and not c.cut and c.lead(n)


@move(PROGRESS, "gate", "{who}: the gate moves")
def _gate(world: "Deployment", who: str, _: int) -> bool:
    e = world.engine(who)
    return e is not None and not e.stalled and e.gate_step()


@move(PROGRESS, "work", "{who}: rank {n} takes an order or a staged payload")
def _work(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    return e is not None and not e.stalled and e.ranks[n % e.width].work()


@move(PROGRESS, "deliver", "{who}: something of the epoch arrives at a rank")
def _deliver(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    if e is None or e.stalled or e.cut or e.fetching is None:
        return False
    items = world.delivery.of(e.fetching)
    return bool(items) and e.ranks[n % e.width].feed(items[n // e.width % len(items)][1])


@move(PROGRESS, "write", "{who}: rank {n} writes an entry, or ends its write")
def _write(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    return e is not None and not e.stalled and e.ranks[n % e.width].write_step()


@move(PROGRESS, "synchronise", "{who}: everything has reached the storage of rank {n}")
def _synchronise(world: "Deployment", who: str, n: int) -> bool:
    e = world.engine(who)
    return e is not None and not e.stalled and e.ranks[n % e.width].synchronise_step()


@move(PROGRESS, "emit", "{who} delivers the next payload, or its manifest")
def _emit(world: "Deployment", who: str, _: int) -> bool:
    o = world.owner(who)
    return o is not None and not o.stalled and not o.cut and o.emission_step()


@move(PROGRESS, "fold", "{who} copies a cell into its baseline, or ends its fold")
def _fold(world: "Deployment", who: str, _: int) -> bool:
    o = world.owner(who)
    return o is not None and not o.stalled and o.fold_step()


@move(PROGRESS, "connect", "{who} connects to the leader that is registered")
def _connect(world: "Deployment", who: str, _: int) -> bool:
    p = world.party(who)
    return p is not None and not p.stalled and not p.cut and world.connect(p)


@move(PROGRESS, "poll", "{who} looks at K of its own accord")
def _poll(world: "Deployment", who: str, _: int) -> bool:
    e = world.engine(who)
    if e is not None:
        return not e.stalled and not e.cut and e.poll()
    c = world.coordinator(who)
    return c is not None and not c.stalled and not c.cut and c.look()


@move(PROGRESS, "push", "the trainer pushes")
def _push(world: "Deployment", _: str, n: int) -> bool:
    owners = [o for o in world.owners if not o.stalled]
    if any(o.pushing for o in world.owners) or not owners:
        return False
    for o in owners:
        if n % 5:
            o.train(n)
        o.push()
    world.actions.add("CandidateReady")
    return True
