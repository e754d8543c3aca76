"""Launchers put on PATH by tests: the real Java at low priority, and a stand-in for Apalache.

The stand-in is no checker.  It obeys the contract of `apalache-mc` (options, files, outcome lines, exit statuses) and
does what the variable STAND_IN says, so that the driver meets each ending that the real program can have.
"""

import os
import shutil
import sys

from dcr.modelcheck.java import find_java


def _launcher(folder, name, text):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def nice_java(folder):
    """A `java` that is the one the driver finds, at low priority and with the compiler that suits short runs."""
    _launcher(
        folder, "java", f'#!/bin/sh\nexec {shutil.which("nice")} -n 10 {find_java()} -XX:TieredStopAtLevel=1 "$@"\n'
    )


def path_with(folder):
    """PATH with a folder in front."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


APALACHE = r"""
import json, os, sys, time
from pathlib import Path

command, *options, module = sys.argv[1:]
assert command in {"check", "simulate", "typecheck"}, command
assert all(option.startswith("--") and "=" in option for option in options), options
given = dict(option[2:].split("=", 1) for option in options)
known = {
    "check": {"out-dir", "run-dir", "length", "no-deadlock", "cinit", "inv"},
    "simulate": {"out-dir", "run-dir", "length", "no-deadlock", "cinit", "inv", "max-run", "output-traces"},
    "typecheck": {"out-dir", "run-dir"},
}[command]
assert set(given) <= known, given
assert Path(module).is_file() and Path(module).is_absolute(), module
assert os.listdir(".") == [], "stray configuration would be read"
java = dict(argument.partition("=")[::2] for argument in os.environ["JVM_ARGS"].split())
assert os.listdir(java["-Duser.home"]) == [], "the home's configuration would be read"

run = Path(given["run-dir"])
run.mkdir(parents=True)
print("# Usage statistics is OFF.\n# APALACHE version: 0.61.0 | build: stand-in", flush=True)
(run / "run.txt").write_text(" ".join(sys.argv[1:]))
if record := os.environ.get("STAND_IN_RECORD"):
    with open(record, "a") as file:
        file.write(json.dumps([command, given, os.environ["JVM_ARGS"]]) + "\n")


def trace(name, *desks):
    states = [
        {
            "#meta": {"index": index},
            "courier": {"#map": [["ann", {"st": "idle", "parcel": {"#bigint": "0"}}]]},
            "delivered": {"#set": []},
            "desk": [{"#bigint": str(parcel)} for parcel in desk],
            "step": {"name": "Take", "who": "ann"},
        }
        for index, desk in enumerate(desks)
    ]
    document = {"#meta": {"format": "ITF"}, "vars": ["courier", "delivered", "desk", "step"], "states": states}
    (run / (name + ".itf.json")).write_text(json.dumps(document))


def end(outcome, status):
    if outcome:
        print("The outcome is: " + outcome)
    print("EXITCODE: OK" if status == 0 else "EXITCODE: ERROR (%d)" % status)
    sys.exit(status)


what = os.environ["STAND_IN"]
if command == "typecheck":
    if what == "type":
        print("[Courier.tla:3:1-3:2]: Arguments to + should be integers\nType checker [FAILED]")
        end("", 120)
    print("Type checker [OK]")
    end("", 0)
if command == "simulate":
    for number in range(1, int(given["max-run"]) + 1):
        trace("example%d" % number, [1, 2], [number])
    trace("example", [1, 2], [int(given["max-run"])])
if what == "violation":
    trace("violation1", [1, 2], [2])
    trace("violation2", [1, 2], [1])
    trace("violation", [1, 2], [1])
    end("Error", 12)
if what == "violation_unnumbered":
    trace("violation", [1, 2], [2])
    end("Error", 12)
if what == "deadlock":
    trace("violation1", [])
    end("Deadlock", 12)
if what == "hang":
    time.sleep(600)
endings = {
    "ok": ("NoError", 0),
    "too_short": ("ExecutionsTooShort", 0),
    "smt_timeout": ("SmtTimeout", 0),
    "evaluation": ("", 75),
    "parse": ("", 150),
    "other": ("", 255),
    "violation_without_trace": ("Error", 12),
    "silent_success": ("", 0),
    "error_with_success": ("Error", 0),
    "success_with_error": ("NoError", 12),
    "unheard_of": ("Sunshine", 0),
    "unheard_of_status": ("NoError", 3),
}
if what == "parse_255":
    print("Parsing error: Semantic errors:\nUnknown operator: `IndInv1'.")
    end("", 255)
end(*endings[what])
"""


def apalache(folder):
    """The stand-in `apalache-mc`."""
    _launcher(folder, "apalache-mc", f"#!{sys.executable}\n{APALACHE}")
