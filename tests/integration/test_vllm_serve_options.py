"""The options of the server: what cannot work is named before anything is loaded."""

import os
import re
import subprocess
import sys

import pytest
import vllm_support as support

from dcr.runtime.settings import Settings

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in support.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def parse(tmp_path):
    """Parses the options that must be given, and others, which may give them anew."""
    from dcr.rollout.vllm.serve_options import parse  # noqa: PLC0415

    given = {
        "--dcr-name": "x",
        "--dcr-control": f"sqlite://{tmp_path}/run/record.db",
        "--dcr-delivery": f"file://{tmp_path}/payloads",
    }

    def parse_with(*options):
        others = dict(zip(options[::2], options[1::2], strict=False))
        flat = [word for pair in {**given, **others}.items() for word in pair if word]
        return parse(["model", *flat], "")

    return parse_with


def test_what_is_right_is_taken_and_the_rest_follows(parse, tmp_path):
    args = parse("--dcr-settings", '{"drain_timeout_s": 5}', "--dcr-record-id", "run 7")
    assert args.host == "127.0.0.1"
    assert args.worker_extension_cls == "dcr.rollout.vllm.cpu_extension.DcrCpuWorkerExtension"  # of this platform
    assert args.dcr_settings == Settings(drain_timeout_s=5)
    assert args.dcr_record_id == "run 7"
    assert parse("--dcr-record", "run 8").dcr_record_id == "run 8"  # the option's older name
    assert (tmp_path / "run" / "record.db.secret").stat().st_mode & 0o777 == 0o600
    assert parse("--worker-extension-cls", "mine.Extension").worker_extension_cls == "mine.Extension"


@pytest.mark.parametrize(
    ("variable", "options", "said"),
    [
        ("VLLM_SERVER_DEV_MODE", [], "VLLM_SERVER_DEV_MODE=1, whose routes resume and write behind the gate"),
        ("VLLM_ENABLE_RESPONSES_API_STORE", [], "whose stored and background answers would be given out later"),
        ("", ["--api-server-count", "2"], "--api-server-count"),
        ("", ["--headless", ""], "--headless"),
        ("", ["--dcr-settings", '{"drain_timeout": 5}'], "--dcr-settings: .*did you mean drain_timeout_s"),
        ("", ["--dcr-settings", "{drain_timeout_s: 5}"], "--dcr-settings: .*is no JSON.*quote it for the shell"),
        ("", ["--dcr-settings", "[1]"], "--dcr-settings: settings must be"),
        ("", ["--dcr-name", "a\nb"], "--dcr-name: a peer's name must be 1 to"),
        ("", ["--dcr-name", "n" * 500], "--dcr-name: a peer's name must be 1 to"),
        ("", ["--dcr-record-id", "\x00"], "--dcr-record-id: record id must be 1 to"),
        ("", ["--dcr-gate-wait-s", "nan"], "--dcr-gate-wait-s: nan must be greater than 0"),
        ("", ["--dcr-gate-wait-s", "0"], "--dcr-gate-wait-s: 0.0 must be greater than 0"),
        ("", ["--dcr-held-requests-max", "-1"], "--dcr-held-requests-max: -1 must be 0 or more"),
        ("", ["--dcr-control", "run/record.db"], "--dcr-control: .*must be of the form sqlite:///absolute/path.db"),
        ("", ["--dcr-control", "sqlite:///proc/x/record.db"], "--dcr-control: .*/proc/x"),
        ("", ["--dcr-control", "sqlite://FOLDER"], "--dcr-control: "),
        ("", ["--dcr-control", "sqlite://FOLDER/text"], "--dcr-control: "),
        ("", ["--dcr-delivery", "gs://x/y"], "--dcr-delivery: .*must be of the form file:///absolute/folder"),
        ("", ["--dcr-delivery", "s3:/x"], "--dcr-delivery: .*the bucket's name must be 3 to 63 characters"),
        (
            "",
            ["--dcr-settings", '{"channel": "tls:///nowhere"}'],
            "--dcr-settings: credentials /nowhere: .*dcr certs --help",
        ),
        ("", ["--dcr-delivery", "relay:///nowhere"], "--dcr-delivery: credentials /nowhere: .*see dcr certs --help"),
        ("", ["--dcr-delivery", "file://FOLDER/nowhere/payloads"], "--dcr-delivery: .*nowhere"),
        ("", ["--dcr-delivery", "file://FOLDER/text"], "--dcr-delivery: .*text"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_the_option(  # noqa: PLR0917
    parse, monkeypatch, tmp_path, variable, options, said
):
    from dcr.rollout.vllm.serve_options import OptionError  # noqa: PLC0415

    (tmp_path / "text").write_text("no record")
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(OptionError, match=re.compile(said, re.DOTALL)):
        parse(*(option.replace("FOLDER", str(tmp_path)) for option in options))
    assert (tmp_path / "text").read_text() == "no record"


def test_a_secret_that_others_may_read_is_named_with_its_option(parse, tmp_path):
    from dcr.rollout.vllm.serve_options import OptionError  # noqa: PLC0415

    parse()
    secret = tmp_path / "run" / "record.db.secret"
    secret.chmod(0o644)
    with pytest.raises(OptionError, match=r"--dcr-control: secret file .*mode 0644 lets others use it"):
        parse()


def test_processes_that_could_outlive_the_server_are_refused(parse, monkeypatch):
    from dcr.rollout.vllm.serve_options import OptionError  # noqa: PLC0415

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with pytest.raises(
        OptionError, match="VLLM_WORKER_MULTIPROC_METHOD=fork, whose processes could outlive the server"
    ):
        parse()


@pytest.fixture
def run(tmp_path):
    """Runs the command on a real checkpoint, with a delivery address and more."""
    checkpoint = support.write_checkpoint(tmp_path / "v0", 0)
    given = ["--dcr-name", "x", "--dcr-control", f"sqlite://{tmp_path}/record.db", "--dcr-delivery"]
    environment = {**os.environ, **support.ENVIRONMENT, "PYTHONPATH": str(support.ROOT)}

    def run(*more):
        command = [sys.executable, "-m", "dcr.rollout.vllm.serve", str(checkpoint), *given, *more]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=250
        )

    return run


def test_the_command_says_so_in_one_line_and_ends(run):
    wrong = run("payloads")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1] == (
        "dcr serve: error: --dcr-delivery: delivery address 'payloads': must be of the form file:///absolute/folder, "
        "s3://bucket/prefix?endpoint=URL or relay:///folder/of/credentials?listen=host:port"
    )
    assert "Traceback" not in wrong.stderr


@pytest.mark.long
def test_an_engine_that_no_node_can_keep_at_one_version_is_refused_before_it_is_loaded(run, tmp_path):
    many = run(f"file://{tmp_path}/payloads", "--data-parallel-size", "2", "--dtype", "bfloat16", "--port", "0")
    assert many.returncode == 1
    assert many.stderr.splitlines()[-1].startswith("dcr serve: error: engine x: data_parallel_size=2; start one engine")
    assert "EngineCore" not in many.stderr + many.stdout
