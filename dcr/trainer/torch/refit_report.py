"""How a push went: what a trainer's user reads, prints and logs."""

import json
from dataclasses import asdict, dataclass, field

from dcr.data_plane.change_counts import ChangeCount, reading_order
from dcr.delivery.traffic import Traffic
from dcr.protocol.layer_changes import LAYERS_REST
from dcr.protocol.messages import Outcome
from dcr.runtime.refit_status import in_bytes

OTHER_LAYERS = "(other layers)"
"""What a report calls the layers together that are beyond the bound of ``dcr.protocol.layer_changes``."""
_NAMED_MAX = 8


@dataclass(frozen=True)
class RefitReport:
    """How a push went.  Sums are over all owners; times, in seconds, are those of the slowest.

    Attributes:
        version: the version now committed.
        kind: kind of the attempt that committed: relative, absolute or dense; unknown if a coordinator that is gone
            committed it, and then the counts below are 0.
        attempts: attempts that this push took.
        failures: what stopped the attempts before the last.
        warnings: what went wrong after the commit; the version stands all the same.
        members: names of the engines that hold the version.
        changed_entries: elements sent.
        elements: elements of the checkpoint.
        payloads: number of payloads.
        payload_bytes: their size.
        wall_s: the whole push, on this rank; after ``begin_push`` from its return to the outcome.
        stages: seconds of work by stage: detect, encode, deliver, decode, apply, synchronise, fold; and blocked, for
            how long detection waited for encoding and the store.  Stages run at the same time.
        traffic: what this rank asked of the delivery store during the push; the only field that is not the same on
            every rank.
        layers: elements changed and in all, by layer in reading order, unchanged layers too, and what is beyond 256
            layers as OTHER_LAYERS.  Empty if kind is dense, for such an attempt compares nothing, or unknown.
            ``TrainerRefit.changes`` has this rank's share by tensor.
        why_dense: why every element was sent; empty if kind is not dense.
    """

    version: int
    kind: str
    attempts: int
    failures: tuple[str, ...]
    warnings: tuple[str, ...]
    members: tuple[str, ...]
    changed_entries: int
    elements: int
    payloads: int
    payload_bytes: int
    wall_s: float
    stages: dict[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    layers: dict[str, ChangeCount] = field(default_factory=dict)
    why_dense: str = ""

    def json(self) -> str:
        """The report as one JSON object on one line, its fields by their names, with a rate (0 to 1) for each layer."""
        layers = {name: {**asdict(count), "rate": count.rate} for name, count in self.layers.items()}
        return json.dumps({**asdict(self), "layers": layers})

    def __str__(self) -> str:
        """A few lines for people; ``repr`` and ``json`` have everything."""
        share = f" ({100 * self.changed_entries / self.elements:.3g} %)" if self.elements else ""
        lines = {
            "dense": self.why_dense,
            "engines": _some(self.members),
            "sent": f"{self.changed_entries} of {self.elements} elements{share}, {self.payloads} payloads, "
            f"{in_bytes(self.payload_bytes)}",
            "stages": ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.stages.items()),
            "store": str(self.traffic),
            "layers": self._most_changed(),
            "failures": "; ".join(self.failures),
            "warnings": "; ".join(self.warnings),
        }
        tries = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        head = f"version {self.version}: {self.kind}, {tries}, {self.wall_s:.2f} s"
        return "\n".join([head, *(f"  {name:<9}{text}" for name, text in lines.items() if text)])

    def _most_changed(self) -> str:
        if not self.layers:
            return ""
        changed = sum(bool(count.changed) for count in self.layers.values())
        most = sorted(self.layers.items(), key=lambda one: -one[1].rate)[:3]
        named = ", ".join(f"{name} {100 * count.rate:.3g} %" for name, count in most)
        return f"{changed} of {len(self.layers)} changed, most {named}"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return f"{len(names)}: {', '.join(names[:_NAMED_MAX])}{more}"


def report_of(outcome: Outcome, wall_s: float, traffic: Traffic) -> RefitReport:
    """What the coordinator says of a push, with what this rank knows beside it."""
    s = dict(outcome.summary)

    def names(key: str) -> tuple[str, ...]:
        value = s.get(key, [])
        assert isinstance(value, list)
        return tuple(value)

    def count(key: str) -> int:
        value = s[key]
        assert isinstance(value, int)
        return value

    prefix = "seconds_"
    return RefitReport(
        version=outcome.version,
        kind=str(s["kind"]),
        attempts=count("attempts"),
        failures=names("failures"),
        warnings=names("warnings"),
        members=names("members"),
        changed_entries=count("changed_entries"),
        elements=count("elements"),
        payloads=count("payloads"),
        payload_bytes=count("payload_bytes"),
        wall_s=wall_s,
        stages={
            k.removeprefix(prefix): float(v) for k, v in s.items() if k.startswith(prefix) and isinstance(v, float)
        },
        traffic=traffic,
        layers=_layers(outcome),
        why_dense=str(s.get("why_dense", "")),
    )


def _layers(outcome: Outcome) -> dict[str, ChangeCount]:
    in_order = sorted(outcome.layers, key=lambda one: (one.layer == LAYERS_REST, reading_order(one.layer)))
    return {one.layer or OTHER_LAYERS: ChangeCount(one.changed, one.elements) for one in in_order}
