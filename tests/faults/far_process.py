"""A trainer or a rollout node for a network namespace of its own: orders come in on stdin, answers go out on stdout.

Run as ``python -m tests.faults.far_process trainer|node FOLDER LISTEN CONTROL``.  The folder holds the certificates and
the checkpoint; the trainer writes the latter.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dcr import RolloutNode, TrainerRefit
from dcr.rollout.torch.engine import TorchEngine
from tests.faults.models import Policy, Served, dense, stored_bits

RELAY = "heartbeat_s=0.5&peer_timeout_s=60"


def answer(**said):
    print(json.dumps(said), flush=True)


def addresses(folder, credentials, listen, control):
    return {
        "control": control,
        "delivery": f"relay://{folder}/{credentials}?listen={listen}&{RELAY}",
        "settings": {"channel": f"tls://{folder}/{credentials}?listen={listen}", "record_poll_s": 0.1},
    }


def train(folder, listen, control):
    policy = Policy()

    def state():
        return {n: t.detach().clone() for n, t in policy.state_dict().items()}

    (folder / "v0").mkdir()
    save_file(state(), folder / "v0" / "model.safetensors")
    with TrainerRefit(policy, **addresses(folder, "trainer", listen, control)) as refit:
        answer(bits=dense(state()))
        for line in sys.stdin:
            policy.step(int(line), 0.05)
            report = refit.push()
            answer(version=report.version, kind=report.kind, members=report.members, bits=dense(state()))


def serve(folder, listen, control):
    model = Served()
    model.load_weights(load_file(folder / "v0" / "model.safetensors").items())
    engine = TorchEngine(model, name="far", checkpoint=folder / "v0")
    node = RolloutNode(engine, **addresses(folder, "node-a", listen, control))
    answer()
    for line in sys.stdin:
        version = node.wait_serving(int(line), timeout_s=60)
        answer(version=version, bits=stored_bits(model))
    node.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainer": train, "node": serve}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
