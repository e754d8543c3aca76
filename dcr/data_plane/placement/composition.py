"""What was learned of a loader over stand-ins, carried on to the converted tensors that they stand for."""

import dataclasses
from collections.abc import Mapping

from torch import nn

from dcr.data_plane.placement.conversion import Conversion, Ints, compose, find
from dcr.data_plane.placement.prewarm import Learned, Prewarm
from dcr.data_plane.region import Region
from dcr.protocol.errors import RefusedError


class StandIns:
    """The memory of stand-ins, while a loader is learned over them.

    Args:
        standing: conversions by address of their stand-in.
    """

    def __init__(self, standing: Mapping[int, Conversion]) -> None:
        self._standing = standing
        self._ends = {start: start + one.form.numel * one.form.dtype.itemsize for start, one in standing.items()}

    def _holding(self, region: Region) -> int | None:
        """Address of the stand-in that holds a region; None if none does."""
        return next((start for start, end in self._ends.items() if start <= region.address < end), None)

    def why_not(self, one: Learned) -> str:
        """Why a tensor that reaches a stand-in cannot be carried on; empty if it can, or reaches none."""
        starts = {self._holding(write.region) for write in one.writes}
        reached = [start for start in starts if start is not None]
        if not reached:
            return ""
        if len(starts) > 1:
            why = "to other storage too"
        elif any(write.constant is not None for write in one.writes):
            why = "constants are filled in around it"
        elif not one.boxes:
            why = "its values are computed by the loader"
        else:
            return ""
        return f"it goes to {self._standing[reached[0]].name}, which is converted after loading, and {why}"

    def composed(self, learned: Prewarm, model: nn.Module) -> Prewarm:
        """Learned placement with boxes into converted storage in the place of those into stand-ins.

        Args:
            learned: of the loader, while the stand-ins were bound.
            model: the model, with the converted tensors bound again.

        Raises:
            RefusedError: the loader consults a converted tensor, or transforms tensors only in a call that writes one.
        """
        read = [(region, "reads") for region in learned.consulted]
        written = [
            (write.region, "writes, beside what it transforms,") for c in learned.transforming for _, write in c.steps
        ]
        for region, does in (*read, *written):
            if (start := self._holding(region)) is not None:
                raise RefusedError(
                    f"the loader {does} {self._standing[start].name}, which is converted after loading, and cannot "
                    "be run any more: choose a backend that keeps the loader's layout"
                )
        found: dict[str, Learned] = {}
        reached: dict[int, Ints] = {}  # of the stand-in that was composed last: it is large
        for name, one in learned.learned.items():
            start = self._holding(one.writes[0].region) if one.writes else None
            if start is None:
                found[name] = one
                continue
            table, key = find(model, self._standing[start].name)
            if start not in reached:
                reached = {start: self._standing[start].reached(table[key])}
            # Its writes are of another storage than the resident one: boxes are all that is left of them.
            found[name] = Learned((), boxes=tuple(compose(one.boxes, start, table[key], reached[start])))
        return dataclasses.replace(learned, learned=found, calls=())
