"""A coordinator whose settings, delivery or secret are not the trainer's: it does not lead, and both sides say why."""

import threading
from pathlib import Path

import pytest

from dcr.runtime import leader_wait
from tests.faults.coordinator_process import WAIT_S, CoordinatorProcess
from tests.faults.failover_fleet import FailoverFleet


class Corrected(FailoverFleet):
    """A coordinator that differs comes first; one that fits once the trainer has heard why that one does not lead."""

    def __init__(self, folder, caplog, differs, **wrong):
        self._caplog, self._differs, self._wrong = caplog, differs, wrong
        super().__init__(folder)

    def start_trainer(self):
        if self.coordinators:
            return super().start_trainer()
        wrong = {**self.addresses, **self._wrong}
        wrong["settings"] = {**self.addresses["settings"], **self._wrong.get("settings", {})}
        self.coordinators.append(CoordinatorProcess("wrong", self.folder, wrong))
        correcting = threading.Thread(target=self._correct)
        correcting.start()
        try:
            return super().start_trainer()
        finally:
            correcting.join(WAIT_S)

    def _correct(self):
        try:
            self.wait(lambda: f"; wrong stands by and must not lead: {self._differs}" in self._caplog.text)
        finally:
            self.coordinator("right")


@pytest.fixture
def corrected(tmp_path, caplog, monkeypatch):
    opened = []

    def make(differs, **wrong):
        monkeypatch.setattr(leader_wait, "FIRST_S", 0.3)
        opened.append(Corrected(tmp_path, caplog, differs, **wrong))
        return opened[0]

    yield make
    for fleet in opened:
        fleet.close()


def goes_on_with_the_other(fleet, differs, caplog):
    wrong, right = fleet.coordinators
    wrong.wait_said(f"WARNING dcr.coordinator: coordinator wrong does not lead record 'default': {differs}")
    waits = "rank-0, which starts, has waited 0 s for a leader of record 'default', at most 60 s in all: nobody holds"
    assert waits in caplog.text
    assert f"; wrong stands by and must not lead: {differs}" in caplog.text
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    fleet.push()
    fleet.check(e)
    assert {h.actor.split("-")[0] for h in fleet.history()} == {"right"}
    return wrong, right


def test_settings_and_delivery_that_differ_are_named_with_both_sides(corrected, tmp_path, caplog):
    other = f"file://{tmp_path}/elsewhere"
    differs = (
        f"members_min is 1 in the trainer's settings and 2 in this coordinator's: give this coordinator the trainer's "
        f"settings, or start the trainer again with these; the trainer delivers to file://{tmp_path}/payloads, this "
        f"coordinator looks in {other}, where nothing of it is to be seen: give both sides the same delivery"
    )
    fleet = corrected(differs, delivery=other, settings={"members_min": 2})
    _, right = goes_on_with_the_other(fleet, differs, caplog)
    fleet.refit.close()
    right.wait_said("leads no more: the trainer that it leads was closed")
    right.wait_said("(setting coordinator = elsewhere): the one that it stood by for was closed")


@pytest.mark.long
def test_another_secret_is_named(corrected, tmp_path, caplog):
    """The same record by another path, beside which lies another secret."""
    Path(tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "record.db").symlink_to(tmp_path / "record.db")
    differs = "the trainer's secret of the run is not this coordinator's: bring the same file to both"
    fleet = corrected(differs, control=f"sqlite://{tmp_path}/linked/record.db")
    goes_on_with_the_other(fleet, differs, caplog)
