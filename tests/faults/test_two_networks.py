"""A trainer and a node that share nothing of the network but a cable: two namespaces, a veth pair, no 127.0.0.1."""

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.credentials.authority import create_authority, issue
from dcr.runtime.registry import leader_address
from tests.etcd_server import HINT, etcd_binary

ROOT = Path(__file__).parents[2]
WAIT_S = 120
TRAINER, NODE = "10.213.77.1", "10.213.77.2"


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=WAIT_S)


@pytest.fixture
def namespaces():
    """Names of two network namespaces, joined."""
    if not shutil.which("ip") or os.geteuid():
        pytest.skip("NOT RUN: network namespaces need root and ip(8) of iproute2")
    names = [f"dcr-{os.getpid()}-{side}" for side in ("trainer", "node")]
    ends = [f"dcr{os.getpid() % 10**7}{side}" for side in "tn"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NOT RUN: no network namespaces here: {error.stderr.strip()}")
        for name, end, address in zip(names, ends, (TRAINER, NODE), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")  # a process reaches its own address through it
            ip("-n", name, "address", "del", "127.0.0.1/8", "dev", "lo")
        yield names
    finally:
        subprocess.run(["ip", "link", "del", ends[0]], check=False, capture_output=True, timeout=WAIT_S)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=WAIT_S)


class Far:
    """A process in a namespace."""

    def __init__(self, namespace, *arguments):
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.faults.far_process", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, number):
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self):
        ready, _, _ = select.select([self._process.stdout], [], [], WAIT_S)
        assert ready, f"no answer within {WAIT_S} s"
        line = self._process.stdout.readline()
        assert line, "it ended; its words are on stderr"
        return json.loads(line)

    def kill(self):
        self._process.kill()
        self._process.wait(WAIT_S)


def refitted(trainer, node, bits):
    """Two pushes arrive bit for bit."""
    assert node.ask(0) == {"version": 0, "bits": bits}
    for version in (1, 2):
        pushed = trainer.ask(version)
        assert (pushed["version"], pushed["kind"], pushed["members"]) == (version, "relative", ["far"])
        assert node.ask(version) == {"version": version, "bits": pushed["bits"]}
        assert pushed["bits"] != bits


def verified(namespace, control, channel):
    """What ``dcr verify`` says from there."""
    done = subprocess.run(
        [
            *("ip", "netns", "exec", namespace, sys.executable, "-m", "dcr.cli.main", "verify", "--json"),
            *("--control", control, "--channel", channel),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_refit_between_two_networks_is_bit_exact(tmp_path, namespaces):
    create_authority(tmp_path / "authority")
    for name in ("trainer", "node-a"):
        issue(tmp_path / "authority", tmp_path / name, name)
    at = f"sqlite://{tmp_path}/record.db"
    started = []
    try:
        trainer = Far(namespaces[0], "trainer", str(tmp_path), f"{TRAINER}:0", at)
        started.append(trainer)
        bits = trainer.answer()["bits"]
        node = Far(namespaces[1], "node", str(tmp_path), f"{NODE}:0", at)
        started.append(node)
        control = open_control_plane(at)
        assert leader_address(control, "default").startswith(f"tls://trainer@{TRAINER}:")
        node.answer()
        (entry,) = control.registered("default", "relay").values()
        assert NODE.encode() in entry
        refitted(trainer, node, bits)
        assert verified(namespaces[1], at, f"tls://{tmp_path}/node-a")["version"] == 2
        control.close()
    finally:
        for one in started:
            one.kill()


@pytest.mark.long
@pytest.mark.skipif(etcd_binary() is None, reason=HINT)
def test_two_machines_that_share_no_file(tmp_path, namespaces):
    """The commands of docs/control-channel.md, *Two machines, from nothing*, one after the other."""
    there, here, authority = tmp_path / "node", tmp_path / "trainer", tmp_path / "authority"
    for words in (
        ("authority", authority),
        ("issue", "--authority", authority, "trainer", here / "trainer"),
        ("issue", "--authority", authority, "node-a", here / "node-a"),
        ("issue", "--authority", authority, TRAINER, here / "etcd"),
        ("secret", here / "run.secret"),
    ):
        assert main(["certs", *map(str, words)]) == 0
    there.mkdir()
    shutil.move(here / "node-a", there)
    shutil.copy2(here / "run.secret", there)
    client, peer, tls = f"https://{TRAINER}:2379", f"http://{TRAINER}:2380", here / "etcd"
    etcd = subprocess.Popen(
        [
            *("ip", "netns", "exec", namespaces[0], etcd_binary(), f"--data-dir={here}/data", "--log-level=error"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}", "--client-cert-auth"),
            *(f"--cert-file={tls}/cert.pem", f"--key-file={tls}/key.pem", f"--trusted-ca-file={tls}/ca.pem"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),  # there is no 127.0.0.1
            *(f"--initial-cluster=default={peer}", "--logger=zap"),
        ]
    )

    def control(folder, name):
        files = "&".join(f"{field}={folder}/{name}/{field}.pem" for field in ("ca", "cert", "key"))
        return f"etcd://{TRAINER}:2379/dcr?{files}&secret={folder}/run.secret"

    started = []
    try:
        trainer = Far(namespaces[0], "trainer", str(here), f"{TRAINER}:7100", control(here, "trainer"))
        started.append(trainer)
        bits = trainer.answer()["bits"]
        shutil.copytree(here / "v0", there / "v0")
        node = Far(namespaces[1], "node", str(there), f"{NODE}:7000", control(there, "node-a"))
        started.append(node)
        node.answer()
        refitted(trainer, node, bits)
        at, channel = control(there, "node-a"), f"tls://{there}/node-a"
        assert verified(namespaces[1], at, channel)["version"] == 2
    finally:
        for one in started:
            one.kill()
        etcd.kill()
        etcd.wait(WAIT_S)
