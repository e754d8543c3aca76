import os
import stat
import subprocess
import sys

import pytest

from dcr.protocol.errors import RefusedError
from dcr.runtime.secret import load_or_create_secret


def test_made_once_private_and_read_again(tmp_path):
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        secret = load_or_create_secret(path)
    finally:
        os.umask(before)
    assert len(secret) == 32
    assert path.read_bytes() == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_secret(str(path)) == secret
    assert load_or_create_secret(tmp_path / "other") != secret
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "secret"]


def test_it_does_not_show_itself(tmp_path):
    secret = load_or_create_secret(tmp_path / "secret")
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret!r}", "%s" % secret, repr([secret])):  # noqa: UP031
        assert shown in ("<secret of 32 bytes>", "[<secret of 32 bytes>]")


def test_processes_that_start_together_get_the_same(tmp_path):
    code = (
        "import sys; from dcr.runtime.secret import load_or_create_secret as f; sys.stdout.write(f(sys.argv[1]).hex())"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path / "secret"], stdout=subprocess.PIPE) for _ in range(6)
    ]
    got = {child.communicate(timeout=240)[0] for child in children}
    assert got == {(tmp_path / "secret").read_bytes().hex().encode()}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_use_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    secret = load_or_create_secret(path)
    path.chmod(mode)
    with pytest.raises(RefusedError, match=f"{path}.*{mode:04o}") as refused:
        load_or_create_secret(path)
    assert secret.hex() not in str(refused.value)
    assert path.read_bytes() == secret


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_file_of_another_length_is_refused(tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(RefusedError, match="exactly 32 bytes"):
        load_or_create_secret(path)
    assert path.read_bytes() == content


def test_links_and_other_things_are_refused(tmp_path):
    load_or_create_secret(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "dangling", "folder", "pipe", "no/such/folder"):
        with pytest.raises(RefusedError, match=name):
            load_or_create_secret(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(tmp_path):
    load_or_create_secret(tmp_path / "secret")
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(RefusedError, match="user 12345"):
        load_or_create_secret(tmp_path / "secret")
