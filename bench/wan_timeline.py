"""A refit of the WAN bench as a timeline: trace events, which Perfetto and Chrome open, and a picture."""

import json
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from wan_fleet import Event, Refit

LANES = {
    "detect": ("detect", "#4c78a8"),
    "encode": ("encode", "#f58518"),
    "seal": ("encode", "#f58518"),
    "send": ("send", "#54a24b"),
    "fold": ("fold", "#b279a2"),
    "receive": ("arrive", "#72b7b2"),
    "validate": ("decode", "#eeca3b"),
    "apply": ("apply", "#e45756"),
}
"""Lane and colour of a stage."""
_LEFT, _TOP, _LANE, _GAP, _WIDTH = 120, 50, 15, 12, 1400
_TICKS = 10


def write_trace(path: Path, refit: Refit) -> None:
    """Trace events: a process for each of the refit's, a thread for each of its threads, times in microseconds."""
    events: list[dict[str, object]] = []
    for number, (process, stages) in enumerate(sorted(refit.events.items()), start=1):
        role = "owner" if process.startswith("t") else "node"
        events.append(_named("process_name", number, 0, f"{process} {role}"))
        threads = {thread: place for place, thread in enumerate(sorted({e[3] for e in stages}), start=1)}
        events += [_named("thread_name", number, place, thread) for thread, place in threads.items()]
        events += [
            {
                "name": LANES.get(name, (name, ""))[0],
                "cat": name,
                "ph": "X",
                "ts": 1e6 * (begins - refit.began),
                "dur": 1e6 * (ends - begins),
                "pid": number,
                "tid": threads[thread],
            }
            for name, begins, ends, thread in stages
        ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def write_picture(path: Path, refit: Refit, title: str) -> None:
    """A PNG with a lane for each stage of each process."""
    rows = list(_rows(refit))
    height = _TOP + sum(_LANE if lane else _GAP for _, lane, _ in rows) + 30
    font = ImageFont.load_default(12)
    image = Image.new("RGB", (_WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((10, 8), title, fill="black", font=font)
    end = max((ends for _, _, events in rows for _, _, ends, _ in events), default=refit.began) - refit.began
    scale = (_WIDTH - _LEFT - 20) / max(end, refit.latency_s)
    for tick in range(_TICKS + 1):
        at = refit.latency_s * tick / _TICKS
        x = _LEFT + at * scale
        draw.line((x, _TOP - 8, x, height - 20), fill="#dddddd")
        draw.text((x - 12, height - 18), f"{1000 * at:.0f} ms", fill="black", font=font)
    y = _TOP
    for process, lane, events in rows:
        if not lane:
            draw.text((10, y - 3), process, fill="black", font=font)
            y += _GAP
            continue
        draw.text((30, y - 1), lane, fill="black", font=font)
        for name, begins, ends, _ in events:
            left, right = (_LEFT + (at - refit.began) * scale for at in (begins, ends))
            draw.rectangle((left, y + 1, max(right, left + 1), y + _LANE - 3), fill=LANES[name][1])
        y += _LANE
    image.save(path)


def _rows(refit: Refit) -> Iterator[tuple[str, str, list[Event]]]:
    """Process, lane, its stages; a lane without a name is the process's heading."""
    for process, stages in sorted(refit.events.items(), key=lambda one: (not one[0].startswith("t"), one[0])):
        yield f"{process} {'owner' if process.startswith('t') else 'node'}", "", []
        for lane in dict.fromkeys(lane for lane, _ in LANES.values()):
            found = [e for e in stages if e[0] in LANES and LANES[e[0]][0] == lane]
            if found:
                yield process, lane, found


def _named(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
