"""Imports point down only (DESIGN section 3): read from the source, and shown to fire on trees that break each rule."""

import ast
import sys
from pathlib import Path

import pytest

DCR = Path(__file__).resolve().parent.parent / "dcr"

_DATA = {"protocol", "data_plane"}
_SHELL = _DATA | {"credentials", "s3"}
_LOW = _SHELL | {"delivery", "control_plane"}
_MAY_IMPORT = {
    "protocol": set(),
    "data_plane": {"protocol"},
    "credentials": {"protocol"},
    "s3": {"protocol"},
    "delivery": _SHELL,
    "control_plane": _SHELL,
    "runtime": _LOW,
    "trainer": _LOW | {"runtime"},
    "rollout": _LOW | {"runtime"},
    "modelcheck": {"protocol"},
    "simulator": {"protocol"},
}
_ROOMS_ABOVE = {"chaos", "cli", "__init__"}  # may import anything
_SOCKETS = {
    *("asyncio", "ftplib", "grpc", "http", "requests", "select", "selectors", "smtplib", "socket", "socketserver"),
    *("ssl", "urllib", "urllib3", "xmlrpc", "zmq", "boto3", "httpx", "aiohttp"),
}
_CLOCKS_AND_THREADS = {
    *("_thread", "concurrent", "datetime", "multiprocessing", "queue", "sched", "signal", "subprocess", "threading"),
    "time",
}
# What lets real engines and trainers run without a GPU, and how vLLM's workers get it: these import one another,
# chaos and cli import them inside a function, and nobody else knows of them.
_CPU_ONLY = {"rollout/cpu_vllm.py", "rollout/vllm/cpu_extension.py", "trainer/cpu_megatron.py"}
# The places that change vLLM's own code: for CPUs, and the watch over post-load processing that GPUs need too.
_PATCHES = ("rollout/cpu_vllm.py", "rollout/vllm/post_load.py")


def imports(tree, package):
    """Every import as (line, dotted name, inside a function); ``from a import b`` counts as a.b."""
    inside = {
        id(child)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = [*parents, *(node.module.split(".") if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        for name in names:
            yield node.lineno, name, id(node) in inside


def patches_of_vllm(tree):
    """Lines that assign to, or delete, an attribute of something imported from vLLM."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            bound |= {a.asname or a.name for a in node.names}

    def from_vllm(expression):
        while isinstance(expression, ast.Attribute | ast.Subscript):
            expression = expression.value
        return isinstance(expression, ast.Name) and expression.id in bound

    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        hit = any(isinstance(t, ast.Attribute | ast.Subscript) and from_vllm(t) for t in targets)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
            hit = hit or from_vllm(node.args[0])
        if hit:
            yield node.lineno


def names_module(parts, file):
    """Whether a dotted name inside ``dcr`` is this file's module or something in it."""
    module = file.removesuffix(".py").split("/")
    return parts[: len(module)] == module


def violations(dcr):
    """What breaks the rules of the house in a ``dcr`` folder, one line each."""
    found = []
    for path in sorted(dcr.rglob("*.py")):
        relative = path.relative_to(dcr)
        file = relative.as_posix()
        room = relative.parts[0].removesuffix(".py")
        if room not in _MAY_IMPORT and room not in _ROOMS_ABOVE:
            found.append(f"{file}: {room} is no room of the house")
            continue
        tree = ast.parse(path.read_text(), str(path))
        for line, name, lazy in imports(tree, ["dcr", *relative.parent.parts]):
            parts = name.split(".")
            why = None
            if parts[0] == "dcr" and room not in _ROOMS_ABOVE:
                target = parts[1] if len(parts) > 1 else "dcr"
                if target != room and target not in _MAY_IMPORT[room]:
                    why = f"{room} must not import {target}"
            elif room == "protocol" and parts[0] not in sys.stdlib_module_names | {"msgspec", "dcr"}:
                why = "protocol imports the standard library and msgspec only"
            elif room == "protocol" and parts[0] in _CLOCKS_AND_THREADS:
                why = "protocol has no clock, thread or process"
            if room in {"protocol", "data_plane"} and parts[0] in _SOCKETS:
                why = f"{room} has no sockets"
            if parts[0] == "dcr" and file not in _CPU_ONLY and not (lazy and room in {"chaos", "cli"}):
                why = next((f"{cpu} is for CPUs only" for cpu in _CPU_ONLY if names_module(parts[1:], cpu)), why)
            if why:
                found.append(f"{file}:{line}: {name}: {why}")
        if file not in _PATCHES:
            found += [f"{file}:{line}: only {' and '.join(_PATCHES)} patch vLLM" for line in patches_of_vllm(tree)]
    return found


def test_the_house_keeps_its_rules():
    assert len(list(DCR.rglob("*.py"))) > 10
    assert violations(DCR) == []


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        ("protocol/a.py", "import torch", "standard library and msgspec only"),
        ("protocol/a.py", "from numpy import array", "standard library and msgspec only"),
        ("protocol/a.py", "import socket", "no sockets"),
        ("protocol/a.py", "def f():\n    from time import monotonic", "no clock"),
        ("protocol/a.py", "import threading", "no clock, thread"),
        ("protocol/a.py", "from dcr.data_plane import bits", "protocol must not import data_plane"),
        ("data_plane/a.py", "import urllib.request", "no sockets"),
        ("data_plane/a.py", "from ..delivery import folder", "data_plane must not import delivery"),
        ("data_plane/a.py", "from dcr import runtime", "data_plane must not import runtime"),
        ("data_plane/a.py", "import dcr", "data_plane must not import dcr"),
        ("credentials/a.py", "from dcr.delivery import folder", "credentials must not import delivery"),
        ("s3/a.py", "from dcr.delivery import traffic", "s3 must not import delivery"),
        ("delivery/a.py", "from dcr.control_plane import sqlite", "delivery must not import control_plane"),
        ("control_plane/a.py", "import dcr.delivery.folder", "control_plane must not import delivery"),
        ("runtime/a.py", "from dcr.trainer import x", "runtime must not import trainer"),
        ("trainer/torch/a.py", "from ...rollout import x", "trainer must not import rollout"),
        ("rollout/a.py", "if x:\n    from dcr.trainer import y", "rollout must not import trainer"),
        ("modelcheck/a.py", "from dcr.data_plane import bits", "modelcheck must not import data_plane"),
        ("simulator/a.py", "import dcr.runtime", "simulator must not import runtime"),
        ("runtime/a.py", "from dcr.cli import x", "runtime must not import cli"),
        ("utils/a.py", "", "no room of the house"),
        ("rollout/vllm/a.py", "from dcr.rollout import cpu_vllm", "for CPUs only"),
        ("rollout/vllm/a.py", "def f():\n    from .cpu_extension import x", "for CPUs only"),
        ("trainer/a.py", "import dcr.trainer.cpu_megatron", "for CPUs only"),
        ("cli/a.py", "import dcr.rollout.cpu_vllm", "for CPUs only"),
        ("rollout/vllm/a.py", "from vllm.layers import linear\nlinear.apply = f", "only rollout/cpu_vllm.py"),
        ("rollout/vllm/a.py", "import vllm.layers as v\nsetattr(v.linear, 'apply', f)", "only rollout/cpu_vllm.py"),
        ("chaos/a.py", "def f():\n    import vllm\n    vllm.envs.X = 1", "only rollout/cpu_vllm.py"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, file, source, said):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (found,) = violations(tmp_path)
    assert found.startswith(file)
    assert said in found


def test_what_is_allowed_passes(tmp_path):
    allowed = {
        "protocol/a.py": "import enum\nimport msgspec\nfrom dcr.protocol.errors import DcrError\nfrom . import errors",
        "data_plane/a.py": "import torch\nfrom dcr.protocol import errors\nfrom .bits import width",
        "runtime/a.py": "import socket, time\nfrom dcr.delivery import folder\nfrom dcr.control_plane import sqlite",
        "rollout/cpu_vllm.py": "from vllm.layers import linear\nlinear.apply = None",
        "rollout/vllm/cpu_extension.py": "from dcr.rollout import cpu_vllm\nfrom .extension import x",
        "rollout/vllm/extension.py": "def f():\n    from vllm import LLM\n    x.y = LLM",
        "trainer/torch/a.py": "from dcr.runtime import owner\nfrom ...data_plane import bits",
        "cli/a.py": "from dcr.chaos import kill\nimport dcr\ndef f():\n    from dcr.rollout.cpu_vllm import x",
        "__init__.py": "from dcr.trainer import x",
    }
    for file, source in allowed.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []
