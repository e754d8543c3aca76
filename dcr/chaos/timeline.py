"""One HTML file that shows a run: a lane a process, and on it what was served, answered, stepped, struck and committed.

It needs nothing beside itself: no script, font or picture is loaded from anywhere, and every name in it is escaped.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template

from dcr.chaos.journal import REQUESTS, SUFFIX, Entry, answers, entries
from dcr.chaos.report import RunReport

_PAGE = Path(__file__).with_suffix(".html")
STEPS_MAX = 20_000
"""How many steps are drawn; a longer run shows its first ones and every fault, and says so."""
_QUIET_S = 0.05
"""Longer without an answer than this, and the band of answers has a gap."""
_LANE_PX = 46


@dataclass
class Lane:
    """What is drawn in one row.

    Attributes:
        name: of the process, or of the engine.
        lives: from when to when a process was there, and which start that was.
        served: from when to when the gate was open, and at which version.
        answered: from when to when requests were answered, and with which version.
        marks: steps and faults.
    """

    name: str
    lives: list[tuple[float, float, str]] = field(default_factory=list)
    served: list[tuple[float, float, str]] = field(default_factory=list)
    answered: list[tuple[float, float, str]] = field(default_factory=list)
    marks: list[Entry] = field(default_factory=list)


@dataclass
class _Drawn:
    """What is drawn, gathered from one journal after the other: of a long run so much as a page can show."""

    lanes: dict[str, Lane] = field(default_factory=dict)
    commits: list[tuple[float, str]] = field(default_factory=list)
    faults: list[tuple[str, Entry]] = field(default_factory=list)
    steps: list[tuple[str, Entry]] = field(default_factory=list)
    """By lane; the first ``STEPS_MAX`` of the run, once all were gathered."""
    count: int = 0
    """Of all steps and faults."""
    starts: dict[str, list[tuple[float, float, str]]] = field(default_factory=lambda: defaultdict(list))

    def journal(self, path: Path) -> None:
        """Gather what one process said."""
        name, _, start = path.stem.rpartition("-")
        first = last = 0.0
        serving: dict[str, list[Entry]] = defaultdict(list)
        for e in entries(path):
            first, last = first or e.t, e.t
            match e.what:
                case "serving":
                    serving[e.who].append(e)
                case "pushed" if e.action != "error":
                    self.commits.append((e.t, e.detail))
                case "fault":
                    self.count += 1
                    self.faults.append((name, e))
                case "step":
                    self.count += 1
                    taker = _engine(e.who) if e.who.startswith(("engine", "receiver")) else name
                    self.steps.append((taker, e))
                    if len(self.steps) >= 2 * STEPS_MAX:
                        self.cut()
        if first:
            self.starts[name].append((first, last, start))
            self.lane(name)
        for who, some in serving.items():
            self.lane(_engine(who)).served += _spans(some, last)

    def lane(self, name: str) -> Lane:
        """The row of this name."""
        return self.lanes.setdefault(name, Lane(name))

    def cut(self) -> None:
        """Leave only the first steps."""
        self.steps.sort(key=lambda step: step[1].t)
        del self.steps[STEPS_MAX:]

    def end(self, folder: Path, end: float) -> list[Lane]:
        """All rows, once every journal was gathered."""
        self.cut()
        self.commits.sort()
        for name, e in (*self.steps, *self.faults):
            self.lane(name).marks.append(e)
        for name, lives in self.starts.items():
            lives.sort()
            followed = [*lives, (end, end, "")]
            self.lanes[name].lives = [(a[0], min(max(a[1], a[0] + 0.01), b[0]), a[2]) for a, b in pairwise(followed)]
        for path in sorted(folder.glob(f"*{REQUESTS}")):
            self.lane(path.stem.rpartition("-")[0]).answered += _answered(path)
        return [self.lanes[name] for name in sorted(self.lanes, key=_order)]


def write_timeline(folder: Path, report: RunReport) -> Path:
    """Draw a run from the journals in its folder.

    Args:
        folder: of the run.
        report: what it came to; the left edge is when its first process was started.
    """
    drawn = _Drawn()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        drawn.journal(path)
    lives = [life for some in drawn.starts.values() for life in some]
    began_s = min([first for first, _, _ in lives] + [report.began_s])
    end = max([last for _, last, _ in lives] + [began_s + 0.001])
    lanes = drawn.end(folder, end)
    steps = sorted([e for _, e in (*drawn.steps, *drawn.faults)], key=lambda e: e.t)
    scale = _Scale(began_s, max(end - began_s, 0.001))
    cut = drawn.count > len(steps)
    page = Template(_PAGE.read_text()).substitute(
        title=escape(report.name),
        verdict="ok" if report.ok else "wrong",
        said=_said(report),
        facts=_facts(report),
        problems="".join(f"<li>{escape(p)}</li>" for p in report.problems),
        notes="".join(f"<li>{escape(n)}</li>" for n in report.notes),
        faults=_faults(report),
        axis=_axis(scale),
        commits="".join(_commit(scale, t, detail) for t, detail in drawn.commits),
        lanes="".join(_lane(scale, lane) for lane in lanes),
        height=len(lanes) * _LANE_PX + 24,
        steps="".join(_step(scale, e) for e in steps),
        cut=f"the first {STEPS_MAX:,} of {drawn.count:,} steps, and every fault" if cut else f"{drawn.count:,} steps",
    )
    path = folder / "timeline.html"
    path.write_text(page)
    return path


def _said(report: RunReport) -> str:
    if not report.ok:
        return f"{len(report.problems)} problems"
    return "every check held" if report.validated else "every check held that was made; event logs not validated"


@dataclass(frozen=True)
class _Scale:
    began_s: float
    long_s: float

    def at(self, t: float) -> str:
        """Where it is drawn, in percent."""
        return f"{100 * (t - self.began_s) / self.long_s:.4f}%"

    def wide(self, since: float, until: float) -> str:
        """How wide it is drawn, in percent."""
        return f"{max(100 * (until - since) / self.long_s, 0.02):.4f}%"


def _order(name: str) -> tuple[int, str]:
    kinds = ("trainer", "coordinator", "node", "engine", "")
    return next((n, name) for n, kind in enumerate(kinds) if name.startswith(kind))


def _engine(who: str) -> str:
    return f"engine-{who.partition('[')[2].rstrip(']')}"


def _spans(serving: Sequence[Entry], end: float) -> Iterable[tuple[float, float, str]]:
    following = [*serving[1:], None]
    for e, after in zip(serving, following, strict=True):
        if e.detail:
            yield e.t, end if after is None else after.t, e.detail


def _answered(path: Path) -> Iterable[tuple[float, float, str]]:
    since = last = 0.0
    version = ""
    for a in answers(path):
        if version and (str(a.version) != version or a.t - last > _QUIET_S):
            yield since, last, version
            version = ""
        if not version:
            since, version = a.t, str(a.version)
        last = a.t
    if version:
        yield since, last, version


def _hue(version: str) -> int:
    return (int(version) * 67 + 200) % 360 if version.isdecimal() else 0


def _lane(scale: _Scale, lane: Lane) -> str:
    drawn = []
    for since, until, start in lane.lives:
        drawn.append(
            f'<rect class="life" x="{scale.at(since)}" y="6" width="{scale.wide(since, until)}" height="34" rx="3">'
            f"<title>{escape(lane.name)}, start {escape(start)}</title></rect>"
        )
    for since, until, version in lane.served:
        drawn.append(
            f'<rect x="{scale.at(since)}" y="14" width="{scale.wide(since, until)}" height="13" rx="2" '
            f'fill="hsl({_hue(version)} 55% 55%)"><title>serves version {escape(version)}</title></rect>'
        )
    for since, until, version in lane.answered:
        drawn.append(
            f'<rect x="{scale.at(since)}" y="8" width="{scale.wide(since, until)}" height="4" '
            f'fill="hsl({_hue(version)} 70% 40%)"><title>answers with version {escape(version)}</title></rect>'
        )
    drawn += [_mark(scale, e) for e in lane.marks]
    svg = f'<svg width="100%" height="{_LANE_PX}">{"".join(drawn)}</svg>'
    return f'<div class="lane"><b>{escape(lane.name)}</b>{svg}</div>'


def _mark(scale: _Scale, e: Entry) -> str:
    at = scale.at(e.t)
    if e.what == "fault":
        return (
            f'<g class="fault"><rect x="{at}" y="2" width="2.5" height="42"/>'
            f"<title>{escape(e.action)} at {e.t - scale.began_s:.3f} s, epoch {e.epoch}</title></g>"
        )
    told = f"{e.who} {e.action}, epoch {e.epoch}, {e.t - scale.began_s:.3f} s {e.detail}"
    role = e.who.partition("[")[0]
    place = f'x="{at}" y="29" width="1.5" height="11"'
    return f'<rect class="step {escape(role)}" {place}><title>{escape(told)}</title></rect>'


def _commit(scale: _Scale, t: float, detail: str) -> str:
    at = scale.at(t)
    label = escape(detail.replace("version ", "v"))
    return (
        f'<line x1="{at}" x2="{at}" y1="16" y2="100%"/><text x="{at}" y="12" dx="-4" text-anchor="end">{label}</text>'
    )


def _axis(scale: _Scale) -> str:
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1e9) if scale.long_s / s <= 24)  # noqa: PLR2004
    count = int(scale.long_s / step)
    return "".join(
        f'<text x="{100 * n * step / scale.long_s:.4f}%" y="12">{n * step:g} s</text>' for n in range(count + 1)
    )


def _step(scale: _Scale, e: Entry) -> str:
    row = (f"{e.t - scale.began_s:.3f}", e.who, e.action, str(e.epoch), e.detail)
    css = ' class="struck"' if e.what == "fault" else ""
    return f"<tr{css}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"


def _facts(r: RunReport) -> str:
    facts = {
        "deployment": r.deployment,
        "commits": r.commits,
        "kills": r.kills,
        "retries": r.retries,
        "restarts": r.restarts,
        "answers compared": f"{r.requests:,}",
        "resident bytes compared": f"{r.bytes_compared:,}",
        "slowest recovery": f"{r.recovery_s:.1f} s",
        "event logs": r.logs.partition("\n")[0],
    }
    return "".join(f"<div><span>{escape(k)}</span><strong>{escape(str(v))}</strong></div>" for k, v in facts.items())


def _faults(r: RunReport) -> str:
    def cell(seconds: float | None) -> str:
        return "&ndash;" if seconds is None else f"{seconds:.2f} s"

    return "".join(
        f"<tr><td>{escape(f.what)}</td><td>{cell(f.fired_s)}</td><td>{cell(f.commit_s)}</td><td>{cell(f.recovered_s)}</td></tr>"
        for f in r.faults
    )
