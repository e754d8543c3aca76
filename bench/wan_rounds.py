"""The rounds of the WAN bench: what is measured at each size of the deployment, and the rows that come of it."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from table import Row, report
from wan_arithmetic import LinkRate, link_rate, paper_ratio, payload_bound_s, reference_bound_s
from wan_fleet import Fleet, Refit, Store, Transfer
from wan_model import LAYER_BYTES, write_checkpoint
from wan_network import PREFIX, Network, build_switch
from wan_process import OBJECT_BYTES
from wan_timeline import write_picture, write_trace
from workload import cores

ROOT = Path(__file__).resolve().parents[1]

NAME = "wan"
GIB = 1 << 30
RATES = (0.01, 0.03, 0.05)
STRESS = (0.03, 0.05)
"""Change rates of the paper's section 8."""
TRANSPORTS = ("store", "relay")
WARMUPS = 2
CONSTRUCTIONS = 3
SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Times the link's rate."""
SWEEP_ROUNDS = 3
LINK_BYTES_S_MAX = 15e6
"""A faster link would ask more of this switch and this store than two cores give, and slow down the reference."""
AIM_SPEED_UP = {0.03: 45.0, 0.05: 28.0}
PAPER_SPEED_UP = {("relay", 0.03): 33.2, ("relay", 0.05): 18.0, ("store", 0.03): 30.6, ("store", 0.05): 15.1}
PAPER_PAYLOAD = {0.03: 2.37, 0.05: 3.79}
AIM_SHARE = 95.0
PAPER_SHARE = 77.0
"""Least share of the relay's latency that transport's lower bound covers, percent."""
CROSSED_MAX = 1.02
NOT_MEASURED = (
    "a GPU, vLLM, and engines of several ranks: engines are plain torch models on the CPU",
    "nodes that do not share cores: all of them have the cores above together",
    "a real WAN and Amazon's S3, competing traffic, and rates that change",
    "a store within a cluster: this one is reached over every node's own link, half the delay away",
    "the control channel's own traffic: a bridge carries it between the namespaces' loopbacks, with the WAN's delay",
    "the way to the commit record: it is a file of this machine",
    "saving and loading the checkpoint around the reference, which is in its favour",
)
NOTES = (
    "all nodes share these cores: detection, and the fold after the last payload, wait for a core as well as work",
    "with a thousandth of the paper's checkpoint, round trips and processes that wake up count too: see docs/wan.md",
)


@dataclass(frozen=True)
class Point:
    """One size of the deployment."""

    bytes: int
    trainers: int
    nodes: int
    rates: tuple[float, ...]
    rounds: int
    swept: bool = False

    def __str__(self) -> str:
        return f"{self.bytes / GIB:g} GiB, {self.trainers} + {self.nodes} nodes"


QUICK = (
    Point(GIB // 4, 2, 2, RATES, 3, swept=True),
    Point(GIB // 4, 4, 4, STRESS, 2),
    Point(GIB // 2, 2, 2, STRESS, 1),
)
FULL = tuple(
    Point(size, count, count, RATES, 3, swept=(size, count) == (GIB // 4, 2))
    for size in (GIB // 4, GIB // 2, GIB)
    for count in (2, 3, 4)
)


@dataclass
class Found:
    """What was measured at one point; refits by transport and change rate."""

    point: Point
    link: LinkRate
    reference: list[tuple[float, float]] = field(default_factory=list)
    refits: dict[tuple[str, float], list[Refit]] = field(default_factory=dict)
    swept: dict[float, list[Refit]] = field(default_factory=dict)
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)


def say(text: str) -> None:
    """Progress, for whoever watches."""
    print(text, file=sys.stderr, flush=True)


def measure(point: Point, switch: Path, run: Path, asked: argparse.Namespace) -> Found:
    """Everything at one point, in a network that is there for it alone."""
    run.mkdir()
    checkpoint = run / "checkpoint"
    checkpoint.mkdir()
    layers = point.bytes // LAYER_BYTES
    write_checkpoint(checkpoint, layers)
    with ExitStack() as opened:
        network = Network(
            switch,
            point.trainers,
            point.nodes,
            delay_ms=asked.delay_ms,
            loss=asked.loss,
            log=run / "switch.log",
        )
        opened.callback(network.close)
        store = Store(network, run)
        opened.callback(store.close)
        transfer = Transfer(network, store, run, point.bytes)
        opened.callback(transfer.close)
        fleets = []
        for number, transport in enumerate(TRANSPORTS):
            fleet = Fleet(network, transport, store, run, checkpoint=checkpoint, layers=layers, number=number)
            opened.callback(fleet.close)
            fleets.append(fleet)
            say(f"{point}: owners and engines of the {transport} are there")
        for fleet in fleets:
            for _ in range(WARMUPS):
                fleet.refit(STRESS[0])
        link = link_rate(point.bytes, median(fleets[0].construction_s(STRESS[0], CONSTRUCTIONS)), asked.ratio)
        if link.bytes_s > LINK_BYTES_S_MAX:
            link = link_rate(point.bytes, link.construct_s, point.bytes / LINK_BYTES_S_MAX / link.construct_s)
        print(f"{point}: {link}", flush=True)
        network.set_rate(link.bytes_s)
        found = Found(point, link)
        for fleet in fleets:
            fleet.refit(STRESS[0])
            fleet.settle()
        for number in range(point.rounds):
            race(found, transfer, fleets)
            say(f"{point}: round {number + 1} of {point.rounds}")
        found.peaks = {fleet.transport: fleet.peaks() for fleet in fleets}
        if point.swept:
            for _ in range(SWEEP_ROUNDS):
                for times in SWEEP:
                    network.set_rate(times * link.bytes_s)
                    found.swept.setdefault(times, []).append(fleets[-1].refit(STRESS[0]))
        for fleet in fleets:
            fleet.verify()
    return found


def race(found: Found, transfer: Transfer, fleets: Sequence[Fleet]) -> None:
    """One round: the reference, then every change rate over every transport."""
    found.reference.append(transfer.run())
    for rate in found.point.rates:
        for fleet in fleets:
            found.refits.setdefault((fleet.transport, rate), []).append(fleet.refit(rate))


def rows_of(found: Found) -> Iterator[Row]:
    """Rows of one point."""
    point, link = found.point, found.link
    bound_s = reference_bound_s(point.bytes, point.trainers, link.bytes_s)
    total_s = median(up + down for up, down in found.reference)
    yield Row(f"{point}: a link's rate", link.bytes_s * 8e-6, "Mbit/s", paper=5000.0)
    yield Row(f"{point}: single-core construction of a share, 3 %", link.construct_s, "s")
    yield Row(
        f"{point}: checkpoint over one link / that", link.ratio, "x", paper=paper_ratio(), aim=paper_ratio() - 0.01
    )
    yield Row(f"{point}: reference", total_s, "s", paper=750.0)
    yield Row(f"{point}: reference, its downloads alone", median(down for _, down in found.reference), "s")
    yield Row(f"{point}: reference / what its links allow", total_s / bound_s, "x")
    for (transport, rate), refits in found.refits.items():
        yield from rows_of_case(found, transport, rate, refits)
    for transport, (owner, node) in found.peaks.items():
        yield Row(f"{point}, {transport}: peak memory of an owner", owner / 1e6, "MB")
        yield Row(f"{point}, {transport}: peak memory of a node", node / 1e6, "MB")


def rows_of_case(found: Found, transport: str, rate: float, refits: Sequence[Refit]) -> Iterator[Row]:
    """Rows of one transport and change rate."""
    point, relay = found.point, transport == "relay"
    claim = f"{point}, {transport}, {100 * rate:g} %"

    def middle(values: Iterator[float]) -> float:
        return median(list(values))

    speed_ups = [(up + down) / refit.latency_s for (up, down), refit in zip(found.reference, refits, strict=True)]
    downloads = [down / refit.latency_s for (_, down), refit in zip(found.reference, refits, strict=True)]
    aim = AIM_SPEED_UP.get(rate) if relay else None
    yield Row(
        f"{claim}: reference / refit", median(speed_ups), "x", paper=PAPER_SPEED_UP.get((transport, rate)), aim=aim
    )
    yield Row(f"{claim}: reference's downloads alone / refit", median(downloads), "x")
    yield Row(f"{claim}: refit", middle(r.latency_s for r in refits), "s")
    copies = 1 if relay else point.nodes
    payload_bytes = middle(r.payload_bytes for r in refits)
    yield Row(
        f"{claim}: what links ask of its payloads",
        payload_bound_s(int(payload_bytes), point.trainers, point.nodes, found.link.bytes_s, copies=copies),
        "s",
    )
    yield Row(
        f"{claim}: V_payload", 100 * payload_bytes / point.bytes, "% of the checkpoint", paper=PAPER_PAYLOAD.get(rate)
    )
    yield Row(
        f"{claim}: V_cross / V_payload" + ("" if relay else f", of {point.nodes} nodes"),
        middle(r.crossed_bytes / r.payload_bytes for r in refits),
        "x",
        paper=1.0 if relay else None,
        aim=CROSSED_MAX * copies,
        at_least=False,
    )
    yield Row(
        f"{claim}: V_cross with the heads of frames / V_payload",
        middle(r.frame_bytes / r.payload_bytes for r in refits),
        "x",
    )
    yield Row(
        f"{claim}: transport's lower bound / refit",
        100 * middle(r.transport_s / r.latency_s for r in refits),
        "%",
        paper=PAPER_SHARE if relay and rate in STRESS else None,
        aim=AIM_SHARE if relay and rate in STRESS else None,
    )
    yield Row(
        f"{claim}: construction's lower bound / refit",
        100 * middle(r.construction_s / r.latency_s for r in refits),
        "%",
    )
    for kind in ("owner", "node", "store", "switch"):
        yield Row(f"{claim}: processor time, {kind}", middle(r.processor_s[kind] for r in refits), "s")


def rows_of_sweep(found: Found) -> Iterator[Row]:
    """Where construction starts to matter: the relay at 3 % over slower and faster links."""
    for times, refits in found.swept.items():
        bytes_s = times * found.link.bytes_s
        claim = f"{found.point}, relay, 3 %, {bytes_s * 8e-6:.0f} Mbit/s"
        latency_s = median(r.latency_s for r in refits)
        bound_s = reference_bound_s(found.point.bytes, found.point.trainers, bytes_s)
        yield Row(f"{claim}: refit", latency_s, "s")
        yield Row(f"{claim}: what links ask of the reference / refit", bound_s / latency_s, "x")
        yield Row(
            f"{claim}: transport's lower bound / refit", 100 * median(r.transport_s / r.latency_s for r in refits), "%"
        )
        share = 100 * median(r.construction_s / r.latency_s for r in refits)
        yield Row(f"{claim}: construction's lower bound / refit", share, "%")


def draw(found: Found, folder: Path) -> None:
    """The middle refit at 3 % over each transport, as a trace and as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for transport in TRANSPORTS:
        refits = sorted(found.refits[transport, STRESS[0]], key=lambda r: r.latency_s)
        refit = refits[len(refits) // 2]
        name = f"wan-{found.point.bytes // (1 << 20)}MiB-{found.point.nodes}nodes-{transport}"
        title = f"{found.point}, {transport}, 3 %: {refit.latency_s:.3f} s, {refit.payloads} payloads"
        write_trace(folder / f"{name}.json", refit)
        write_picture(folder / f"{name}.png", refit, title)
        say(f"timeline: {folder / name}.json (open it at https://ui.perfetto.dev) and .png")


def keep_logs(folder: Path) -> Path:
    """Copy the logs, and nothing else, to where they stay; where that is."""
    kept = ROOT / "run" / "wan-failed"
    shutil.rmtree(kept, ignore_errors=True)
    for log in folder.rglob("*.log"):
        copy = kept / log.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, copy)
    return kept


def run(asked: argparse.Namespace) -> None:
    """Measure all points, and report what was measured, whether or not it came to its end."""
    rows = [Row("cores, shared by all nodes", float(cores()), "")]
    rows += [Row("delay one way", asked.delay_ms, "ms"), Row("loss of frames on a link", asked.loss, "%")]
    not_measured = list(NOT_MEASURED)
    points = FULL if asked.full else QUICK
    if asked.gib or asked.nodes:
        size, count = round((asked.gib or 0.25) * GIB / OBJECT_BYTES) * OBJECT_BYTES, asked.nodes or 2
        points = (Point(size, count, count, RATES, asked.rounds),)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        switch = build_switch(folder)
        for number, point in enumerate(points):
            not_measured.append(f"{point}: the run ended before")
            found = measure(point, switch, folder / str(number), asked)
            not_measured.pop()
            shutil.rmtree(folder / str(number))
            rows += [*rows_of(found), *rows_of_sweep(found)]
            draw(found, asked.timeline)
    except Exception:
        say(f"the logs are in {keep_logs(folder)}")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        report(NAME, rows, not_measured, as_json=asked.json, notes=NOTES)
