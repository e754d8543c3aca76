import pytest

from dcr.protocol.errors import RefusedError
from dcr.runtime.settings import Settings


def test_every_default_is_a_bound():
    for name in Settings.__struct_fields__:
        value = getattr(Settings(), name)
        choices = {
            "operation": ("add", "xor"),
            "gate_mode": ("sync", "async"),
            "readback": ("restore",),
            "channel": ("loopback",),
            "event_log": ("beside",),
            "refuse_nonfinite": (False,),
            "coordinator": ("trainer",),
            "stopped_push": ("raise",),
        }
        assert value in choices[name] if name in choices else value > 0


def test_a_mapping_sets_what_it_names_and_nothing_else():
    s = Settings.of({"operation": "xor", "bucket_bytes": 7, "ack_timeout_s": 3})
    assert (s.operation, s.bucket_bytes, s.ack_timeout_s) == ("xor", 7, 3.0)
    changed = {n for n in Settings.__struct_fields__ if getattr(s, n) != getattr(Settings(), n)}
    assert changed == {"operation", "bucket_bytes", "ack_timeout_s"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"buket_bytes": 7}, "unknown field `buket_bytes`"),
        ({"bucket_bytes": "7"}, r"bucket_bytes"),
        ({"bucket_bytes": 0}, "setting bucket_bytes: 0 must be greater than 0"),
        ({"attempts_max": -1}, "setting attempts_max: -1 must be greater than 0"),
        ({"ack_timeout_s": 0}, "setting ack_timeout_s"),
        ({"ack_timeout_s": float("nan")}, "setting ack_timeout_s: nan must be greater than 0"),
        ({"operation": "set"}, "setting operation: 'set' is not one of add, xor"),
        ({"gate_mode": "lazy"}, "setting gate_mode: 'lazy' is not one of sync, async"),
        ({"coordinator": "nowhere"}, "setting coordinator: 'nowhere' is not one of trainer, elsewhere"),
        ({"stopped_push": "go"}, "setting stopped_push: 'go' is not one of raise, wait"),
        ({"readback": "never"}, "setting readback: 'never' is not one of start, restore, always"),
        (
            {"channel": "tls://10.0.0.4:7100"},
            "setting channel: 'tls://10.0.0.4:7100' is not loopback, or tls:///folder",
        ),
        ({"stage_bytes_max": 0}, "setting stage_bytes_max: 0 must be greater than 0"),
        ({"stage_bytes_max": 1 << 51}, "setting stage_bytes_max: 2251799813685248 must be"),
        ({"receive_bytes_max": 0}, "setting receive_bytes_max: 0 must be greater than 0"),
        ({"receive_bytes_max": 1 << 51}, "setting receive_bytes_max: 2251799813685248 must be"),
        ({"serve_lease_s": 0.0}, "setting serve_lease_s: 0.0 must be greater than 0"),
        ({"serve_lease_s": 0.5}, "setting serve_lease_s: 0.5 must be greater than record_poll_s, which is 0.5"),
        ({"record_poll_s": 40}, "setting serve_lease_s: 30.0 must be greater than record_poll_s, which is 40.0"),
    ],
)
def test_unknown_keys_and_impossible_values_are_refused_by_name(values, named):
    with pytest.raises(RefusedError, match=named):
        Settings.of(values)


def test_the_constructor_checks_as_well():
    with pytest.raises(RefusedError, match="setting members_min: 0"):
        Settings(members_min=0)
