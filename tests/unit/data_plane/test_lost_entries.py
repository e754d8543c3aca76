"""A kernel that loses one entry: who notices, for every class of tensor that a kernel writes."""

import loaders
import pytest
import torch
from test_placement import placed

from dcr.data_plane.item import Item, Operation
from dcr.data_plane.kernels.numba_cpu import NumbaKernels
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.resident import PartialWriteError

PLACES = {
    "plain": lambda m, _, w: m.p.data.copy_(w),
    "turned": lambda m, _, w: m.q.data.copy_(w.t()),
    "widened": lambda m, _, w: m.f.data.copy_(w),
    "two places": lambda m, _, w: (m.p.data.copy_(w), m.q.data.copy_(w.t())),
    "two parts": lambda m, _, w: (m.p.data[:5].copy_(w[:5]), m.big.data[5:8].copy_(w[5:])),
    "a shard of rows": lambda m, _, w: m.p.data[:3].copy_(w[2:5]),
    "a shard of columns": lambda m, _, w: m.r.data.copy_(w[:, 2:5]),
}
SHARDS = [name for name in PLACES if "shard" in name]


class Losing(NumbaKernels):
    """Does not write one entry: the one of this number; may count it all the same."""

    def __init__(self, lost, counts):
        super().__init__(1)
        self._lost, self._counts = lost, counts

    def place(self, table, records):
        if self._lost is None:
            return super().place(table, records)
        (item,) = records.items
        keep = torch.arange(item.entries) != self._lost
        fewer = Item(item.spec, item.operation, item.indices[keep], item.values[keep])
        hits = super().place(table, Records.of(records.tensors, [fewer]))
        if self._counts:
            hits += sum(int((p.box.expand()[0] == item.indices[self._lost]).sum()) for p in table.tensors[0].boxes)
        return hits


def losing(where, lost, counts, verify):
    """An application through a kernel that loses an entry, and what a dense load would have left."""
    a = loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)
    b = loaders.changed(a, 2, 0.9)
    kernels = Losing(lost, counts)
    model, path = placed(PLACES[where], {"w": a}, sharded=where in SHARDS, verify=verify, kernels=kernels)
    path.prewarm().raise_if_refused()
    wanted = loaders.state(placed(PLACES[where], {"w": b})[0])
    return model, path, loaders.item("w", a, b, Operation.ADD), wanted


def entry_here(where, item):
    """The number of an entry that has a place in this shard."""
    at = {"a shard of rows": (item.indices // 6 - 2) % 8 < 3, "a shard of columns": (item.indices % 6 - 2) % 6 < 3}
    return int(at[where].nonzero()[3]) if where in at else 7


@pytest.mark.parametrize("where", [name for name in PLACES if name not in SHARDS])
def test_where_every_element_has_as_many_places_the_count_tells(where):
    _, path, item, _ = losing(where, 7, counts=False, verify="")
    with pytest.raises(PartialWriteError, match=rf"w: its {item.entries} entries found \d+ places, not as many"):
        path.apply([item])


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_reading_back_what_was_written_tells_everywhere(where, counts):
    _, _, item, _ = losing(where, None, counts=False, verify="")
    _, path, item, _ = losing(where, entry_here(where, item), counts, verify="written")
    with pytest.raises(PartialWriteError, match=r"w: (its \d+ entries found|1 of \d+ places do not hold)"):
        path.apply([item])


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("where", PLACES)
def test_a_kernel_that_loses_nothing_passes(where, operation):
    model, path, item, wanted = losing(where, None, counts=False, verify="written")
    values = item.values
    if operation is not Operation.ADD:
        new = loaders.raw(loaders.changed(loaders.random_bits(loaders.SHAPE, loaders.BF16, 1), 2, 0.9)).flatten()
        old = loaders.raw(loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)).flatten()
        values = (new if operation is Operation.SET else new ^ old)[item.indices]
    assert path.apply([Item(item.spec, operation, item.indices, values)]) == 1
    assert loaders.same(loaders.state(model), wanted)


def test_a_low_half_that_a_kernel_leaves_is_seen():
    """A widened element has two halves, and ``set`` must clear the lower one."""

    class Leaving(NumbaKernels):
        def place(self, table, records):
            hits = super().place(table, records)
            model.f.data.view(torch.int32)[1, 1] |= 1
            return hits

    a = loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)
    model, path = placed(PLACES["widened"], {"w": a}, verify="written", kernels=Leaving(1))
    path.prewarm().raise_if_refused()
    new = Item(loaders.SPEC, Operation.SET, torch.arange(48), torch.arange(48).short())
    with pytest.raises(PartialWriteError, match="w: 1 of 48 places do not hold"):
        path.apply([new])
