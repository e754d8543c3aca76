"""Whether a coordinator may lead a trainer: settings, secret and delivery, compared; and what the trainer is told."""

import shutil
from contextlib import closing

import msgspec
import pytest

from dcr.control_plane.address import open_control_plane
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.meeting import leave_sign
from dcr.delivery.sealed import SealedDelivery
from dcr.protocol.record import OwnerRef
from dcr.runtime import eligibility
from dcr.runtime.eligibility import Eligibility, unfit_coordinators
from dcr.runtime.registry import register_meeting
from dcr.runtime.roster import register_roster
from dcr.runtime.secret import record_secret
from dcr.runtime.settings import Settings
from dcr.runtime.terms import LEADERS, another_secret, differences, terms

SECRET, OTHER = b"s" * 32, b"o" * 32


def stored(folder, secret=SECRET):
    folder.mkdir(exist_ok=True)
    return SealedDelivery(FolderDelivery(folder), record_secret(secret, "default"))


@pytest.fixture
def control(tmp_path):
    with closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as made:
        yield made


@pytest.fixture
def asked(control, tmp_path):
    register_meeting(control, "default", leave_sign(stored(tmp_path / "p"), "default", "trainer"))
    return register_roster(control, "default", [OwnerRef("rank-0", 1)], terms(Settings(), SECRET, "default"))


@pytest.fixture
def one(control, tmp_path):
    def make(folder="p", secret=SECRET, name="one", **settings):
        bounds = Settings.of(settings)
        delivery = stored(tmp_path / folder, secret)
        return Eligibility("default", name, control=control, delivery=delivery, secret=secret, settings=bounds)

    return make


def test_one_with_all_that_the_trainer_has_may_lead(control, asked, one):
    its_own = {"channel": "tls:///etc/dcr/b?listen=10.0.0.5:7100", "leader_lease_s": 5.0, "event_log": "off"}
    assert one(**its_own).problem(asked) == ""
    assert unfit_coordinators(control, "default", asked) == {}


def test_what_differs_is_said_by_name_and_side_to_the_trainer_too(control, asked, one):
    wrong = one(members_min=3, gate_mode="async")
    said = wrong.problem(asked)
    assert said == (
        "gate_mode is sync in the trainer's settings and async in this coordinator's, "
        "members_min is 1 in the trainer's settings and 3 in this coordinator's: "
        "give this coordinator the trainer's settings, or start the trainer again with these"
    )
    assert unfit_coordinators(control, "default", asked) == {"one": said}
    wrong.withdraw()
    assert unfit_coordinators(control, "default", asked) == {}


@pytest.mark.parametrize("name", LEADERS)
def test_each_setting_that_the_leader_keeps_is_compared(name):
    now = getattr(Settings(), name)
    choices = {"operation": "xor", "gate_mode": "async", "stopped_push": "wait"}
    other = Settings.of({name: choices[name] if name in choices else now + 1})
    asks = terms(Settings(), SECRET, "default")
    assert differences(asks, Settings()) == ""
    assert differences(asks, other).startswith(f"{name} is {now} in the trainer's settings and ")


def test_every_time_out_that_a_leader_may_start_is_one_of_them():
    """What the role's timers are called, from its source, against the table."""
    timers = {n for n in Settings.__struct_fields__ if n.endswith("_timeout_s")}
    not_leaders = {"push_timeout_s", "drain_timeout_s", "delivery_timeout_s", "connect_timeout_s"}
    assert timers - not_leaders == {n for n in LEADERS if n.endswith("_timeout_s")}


def test_another_version_s_setting_is_told(asked):
    newer = msgspec.structs.replace(asked.terms, settings={**asked.terms.settings, "of_tomorrow": 3})
    said = differences(newer, Settings())
    assert said.startswith("of_tomorrow is 3 in the trainer's settings and not there (another version of dcr) in this")


def test_another_secret_is_told_before_what_follows_from_it(asked, one):
    assert one(secret=OTHER).problem(asked).startswith("the trainer's secret of the run is not this coordinator's: ")
    assert another_secret(asked.terms, SECRET, "default") == ""
    assert another_secret(asked.terms, SECRET, "another") != ""  # it is of one record


def test_a_delivery_elsewhere_is_looked_at_now_and_then_and_its_sign_may_come(
    control, asked, one, tmp_path, monkeypatch
):
    wrong = one(folder="elsewhere")
    said = wrong.problem(asked)
    where = f"the trainer delivers to file://{tmp_path}/p, this coordinator looks in file://{tmp_path}/elsewhere"
    assert said.startswith(f"{where}, where nothing of it is to be seen: give both sides the same delivery")
    shutil.rmtree(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "p")
    assert wrong.problem(asked) == said  # a store is not asked twice a second
    monkeypatch.setattr(eligibility.time, "monotonic", lambda: 1e9)
    assert wrong.problem(asked) == ""
    assert unfit_coordinators(control, "default", asked) == {}


def test_what_a_killed_one_said_is_taken_back_by_its_successor_and_means_nothing_to_the_next_trainer(
    control, asked, one
):
    one(members_min=3).problem(asked)
    assert one().problem(asked) == ""
    assert unfit_coordinators(control, "default", asked) == {}
    one(members_min=3).problem(asked)
    again = register_roster(control, "default", [OwnerRef("rank-0", 2)], asked.terms)
    assert unfit_coordinators(control, "default", again) == {}
