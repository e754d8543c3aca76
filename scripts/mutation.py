"""Mutate dcr/protocol with mutmut and tell which mutants no test notices; docs/mutation.md explains the report.

Mutants that change nothing but what people read are left out first; of the others a sample, the same for the same seed,
is tried within a bound of time.
"""

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE = ROOT / "mutants" / "dcr" / "protocol"
"""Where mutmut keeps every module with all its mutants, and what became of them."""
REPORT = ROOT / "run" / "mutation.json"
FIRST = "dcr.protocol.messages.*"
"""Mutants that are tried in any case: mutmut makes all of them, and times the tests, before it tries the first."""
TOLD = {"RefusedError", "CorruptPayloadError", "ValueError", "cut", "name_of"}
"""Calls whose arguments are text."""
TELLING = {"name_of", "describe", "why_stopped", "_held", "_why_not_armed", "_why_waiting", "_rolled_back"}
"""Functions that make text, and nothing else."""
ORIG = "__mutmut_orig"
SURVIVED, NO_TESTS = 0, 33
"""mutmut's exit codes of a mutant that no test noticed, and of one that no test runs."""
TIMED_OUT = {36, 24, 152, 255}
_PARTS = ast.expr | ast.stmt | ast.keyword | ast.arguments | ast.match_case
"""What is looked into for the smallest part that differs."""


@dataclass(frozen=True)
class Mutant:
    """One change of one function."""

    name: str
    file: str
    line: int
    change: str
    text: bool
    """Only people read what it changes."""


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(class or empty, function) of every function of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, f) for f in node.body if isinstance(f, ast.FunctionDef))


def difference(a: ast.AST, b: ast.AST, above: tuple[ast.AST, ...] = ()) -> tuple[ast.AST, ast.AST, tuple[ast.AST, ...]]:
    """The smallest part in which two functions differ, in each of them, and what it is part of."""
    if type(a) is type(b):
        mine, other = list(ast.iter_child_nodes(a)), list(ast.iter_child_nodes(b))
        differ = [(x, y) for x, y in zip(mine, other, strict=False) if ast.dump(x) != ast.dump(y)]
        if len(mine) == len(other) and len(differ) == 1 and isinstance(differ[0][0], _PARTS):
            return difference(*differ[0], (*above, a))
        if isinstance(a, ast.Call) and isinstance(b, ast.Call) and len(mine) == len(other) + 1:
            kept = {ast.dump(y) for y in other}
            gone = [x for x in mine if ast.dump(x) not in kept]
            if len(gone) == 1:
                return gone[0], b, (*above, a)  # an argument was left out
    return a, b, above


def is_text(node: ast.AST, above: tuple[ast.AST, ...], function: str) -> bool:
    """Whether only people read this part: a sentence, or what is put into one."""
    if function in TELLING:
        return True
    for n in (*above, node):
        parts = n.values if isinstance(n, ast.JoinedStr) else [n]
        if any(isinstance(x, ast.Constant) and " " in str(x.value) for x in parts):
            return True
        if isinstance(n, ast.Call) and n is not node:
            called = n.func.id if isinstance(n.func, ast.Name) else getattr(n.func, "attr", "")
            inside = n.func not in (*above, node)
            if called in TOLD and inside:
                return True
            detail = n.args[3:] if called == "Step" else [n.args[0], *n.args[2:]] if called == "_must" else []
            if any(x in (*above, node) for x in detail):
                return True
    return False


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant that mutmut made of a module, in its order."""
    path = ROOT / "dcr" / "protocol" / f"{module}.py"
    made = ast.parse((MADE / f"{module}.py").read_text())
    where = {(of, f.name): f.lineno for of, f in functions(ast.parse(path.read_text()))}
    originals = {f.name.removesuffix(ORIG): f for _, f in functions(made) if f.name.endswith(ORIG)}
    found = []
    for of, f in functions(made):
        base, mark, number = f.name.rpartition("__mutmut_")
        if not mark or not number.isdigit() or base not in originals:
            continue
        orig = originals[base]
        plain = base.rpartition("\u01c1")[2] if of else base.removeprefix("x_")
        copy = ast.parse(ast.unparse(f)).body[0]
        copy.name = orig.name
        a, b, above = difference(orig, copy)
        line = where.get((of, plain), 0) + getattr(a, "lineno", orig.lineno) - orig.lineno
        change = f"{' '.join(ast.unparse(a).split())} -> {' '.join(ast.unparse(b).split())}"
        found.append(Mutant(f"dcr.protocol.{module}.{f.name}", path.name, line, change, is_text(a, above, plain)))
    return found


def outcomes() -> dict[str, int | None]:
    """What mutmut noted of each mutant; None if it was not tried."""
    found: dict[str, int | None] = {}
    for meta in sorted(MADE.glob("*.meta")):
        try:
            found |= json.loads(meta.read_text())["exit_code_by_key"]
        except ValueError:  # mutmut was ended, by the time that it had, in the middle of a write
            print(f"{meta.name}: cut short; its mutants count as not tried", file=sys.stderr)
    return found


def run_mutmut(names: list[str], seconds: float) -> None:
    """Try these mutants; what is not done within the time is left."""
    command = [sys.executable, "-m", "mutmut", "run", *names]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)  # noqa: S603 -- names made here
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def report(all_of: list[Mutant], sample: list[Mutant]) -> dict[str, object]:
    """What became of the sample."""
    code = outcomes()
    tried = [m for m in sample if code.get(m.name) is not None]
    alive = [m for m in tried if code[m.name] in (SURVIVED, NO_TESTS)]
    modules = sorted({m.file for m in all_of})
    return {
        "mutants": len(all_of),
        "text": sum(m.text for m in all_of),
        "sample": len(sample),
        "tried": len(tried),
        "timed_out": sum(code[m.name] in TIMED_OUT for m in tried),
        "survived": [asdict(m) for m in alive],
        "modules": {
            f: {
                "mutants": sum(m.file == f and not m.text for m in all_of),
                "tried": sum(m.file == f for m in tried),
                "survived": sum(m.file == f for m in alive),
            }
            for f in modules
        },
    }


def main() -> int:
    """Run; status 1 if a mutant of the sample survived, 3 if none could be tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--sample", type=int, default=200, help="how many mutants are tried at most")
    parser.add_argument("--minutes", type=float, default=30.0, help="the bound of time")
    parser.add_argument("--whole", nargs="*", default=[], help="modules that are tried whole, before the sample")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    if options.fresh:
        shutil.rmtree(ROOT / "mutants", ignore_errors=True)
    if not MADE.exists():
        run_mutmut([FIRST], end - time.monotonic())
    every = [m for path in sorted(MADE.glob("*.meta")) for m in mutants_of(path.name.removesuffix(".py.meta"))]
    worth = [m for m in every if not m.text]
    whole = [m for m in worth if m.file.removesuffix(".py") in options.whole]
    others = [m for m in worth if m not in whole]
    order = random.Random(options.seed).sample(others, len(others))  # noqa: S311 -- a sample, no secret
    sample = [*whole, *order[: max(0, options.sample - len(whole))]]
    left = [m.name for m in sample if outcomes().get(m.name) is None]
    if left:
        run_mutmut(left, max(1.0, end - time.monotonic()))
    found = report(every, sample)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    for m in found["survived"]:
        print(f"SURVIVED  {m['file']}:{m['line']}  {m['change']}  ({m['name'].rpartition('.')[2]})")
    print(
        f"{found['mutants']} mutants, {found['text']} of them text; of a sample of {found['sample']} "
        f"{found['tried']} were tried, {found['timed_out']} ran out of time, {len(found['survived'])} survived: "
        f"{REPORT.relative_to(ROOT)}"
    )
    return 3 if not found["tried"] else int(bool(found["survived"]))


if __name__ == "__main__":
    sys.exit(main())
