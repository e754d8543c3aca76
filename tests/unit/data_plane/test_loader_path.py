"""The hooked loader path on loaders of every kind: bits equal to a dense load, or refused with nothing changed."""

import ctypes

import loaders
import pytest
import torch
from storages import boxes, every, hooked

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.placement.prewarm import LoaderClass
from dcr.data_plane.resident import PartialWriteError
from dcr.protocol.errors import RefusedError


def twin(place, w):
    model = loaders.Model()
    with torch.no_grad():
        loaders.loader(model, place)([("w", w)])
    return model


def values(place, seed):
    """Loaders that look at values need ones they accept."""
    if loaders.EXPECTED[place] == loaders.R:
        return torch.randn(loaders.SHAPE, generator=torch.Generator().manual_seed(seed)).to(loaders.BF16)
    return loaders.random_bits(loaders.SHAPE, loaders.BF16, seed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("place", loaders.EXPECTED, ids=lambda f: f.__name__)
@every
def test_class_and_bits(storage, place):
    a = values(place, 1)
    model = twin(place, a)
    before, outside = loaders.state(model), loaders.raw(loaders.outside)
    path = storage(model, loaders.loader(model, place), [loaders.SPEC])
    learned = path.prewarm()
    assert learned.classes == {"w": loaders.EXPECTED[place]}, learned.reasons
    assert loaders.same(loaders.state(model), before)
    assert torch.equal(loaders.raw(loaders.outside), outside)
    b = loaders.changed(a, 2, 0.4)
    if learned.classes["w"] == "refused":
        with pytest.raises(RefusedError, match="w: "):
            learned.raise_if_refused()
        with pytest.raises(RefusedError):
            path.apply([loaders.item("w", a, b, Operation.SET)])
        assert loaders.same(loaders.state(model), before)
        return
    operations = list(Operation) if learned.classes["w"] == "box" else [Operation.SET]
    for n, operation in enumerate(operations):
        b = loaders.changed(a, 10 + n, 0.4)
        copies = path.apply([loaders.item("w", a, b, operation)])
        assert (copies > 0) == (learned.classes["w"] != "skipped")
        fresh = twin(place, b)
        assert loaders.same(loaders.state(model), loaders.state(fresh)), operation
        assert all(torch.equal(loaders.raw(x), loaders.raw(y)) for x, y in zip(model.hidden, fresh.hidden, strict=True))
        a = b


REFITTED = [f for f, c in loaders.EXPECTED.items() if c in (loaders.P, loaders.T)]


@pytest.mark.parametrize("place", REFITTED, ids=lambda f: f.__name__)
@every
def test_torn_storage_is_repaired_by_the_complete_changed_set(storage, place):
    a = values(place, 3)
    b = loaders.changed(a, 4, 0.5)
    model = twin(place, a)
    path = storage(model, loaders.loader(model, place), [loaders.SPEC])
    path.prewarm().raise_if_refused()
    whole = loaders.item("w", a, b, Operation.SET)
    noise = loaders.raw(loaders.random_bits(loaders.SHAPE, loaders.BF16, 5)).view(-1)[whole.indices]
    garbage = Item(loaders.SPEC, Operation.SET, whole.indices, noise)
    some = slice(0, garbage.entries // 2)
    path.apply([Item(loaders.SPEC, Operation.SET, garbage.indices[some], garbage.values[some])])
    half = slice(0, whole.entries, 2)
    path.apply([Item(loaders.SPEC, Operation.SET, whole.indices[half], whole.values[half])])
    path.apply([whole])
    assert loaders.same(loaders.state(model), loaders.state(twin(place, b)))


def ready(storage, place=loaders.two_copies, seed=1):
    a = loaders.random_bits(loaders.SHAPE, loaders.BF16, seed)
    model = twin(place, a)
    path = storage(model, loaders.loader(model, place), [loaders.SPEC])
    path.prewarm().raise_if_refused()
    return model, path, a, loaders.item("w", a, loaders.changed(a, 2, 0.4), Operation.SET)


def refused(path, model, items, match):
    before = loaders.state(model)
    with pytest.raises(RefusedError, match=match):
        path.apply(items)
    assert loaders.same(loaders.state(model), before)


@every
def test_items_are_checked_before_the_first_byte(storage):
    model, path, _, good = ready(storage)
    refused(storage(model, loaders.loader(model, loaders.two_copies), [loaders.SPEC]), model, [good], "prewarm")
    n = good.indices
    for bad, match in [
        (Item(TensorSpec("other", loaders.SHAPE, loaders.BF16), Operation.SET, n, good.values), "other: no such"),
        (Item(TensorSpec("w", (6, 8), loaders.BF16), Operation.SET, n, good.values), "does not match"),
        (Item(TensorSpec("w", loaders.SHAPE, torch.float16), Operation.SET, n, good.values), "does not match"),
        (Item(loaders.SPEC, Operation.SET, n.flip(0), good.values), "strictly increasing"),
        (Item(loaders.SPEC, Operation.SET, n + 48, good.values), "strictly increasing"),
        (Item(loaders.SPEC, Operation.SET, n - 48, good.values), "strictly increasing"),
        (Item(loaders.SPEC, Operation.ADD, n[-1:], good.values[:1]), "index in common"),
    ]:
        refused(path, model, [good, bad], match)
    assert path.apply([]) == 0
    assert path.apply([Item(loaders.SPEC, Operation.ADD, n[:0], good.values[:0])]) == 0


@every
@pytest.mark.parametrize("operation", [Operation.ADD, Operation.XOR])
def test_relative_items_need_a_loader_that_keeps_bits(storage, operation):
    model, path, a, _ = ready(storage, loaders.composed)
    refused(path, model, [loaders.item("w", a, loaders.changed(a, 2, 0.4), operation)], "only set")


def rebind_data(model):
    model.p.data = model.p.data.clone()


def rebind_parameter(model):
    model.p = torch.nn.Parameter(model.p.data, requires_grad=False)
    model.p.data = model.p.data.clone()


def change_dtype(model):
    model.half()


def remove(model):
    del model.big


@pytest.mark.parametrize("move", [rebind_data, rebind_parameter, change_dtype, remove])
@every
def test_storage_that_moved_since_prewarm_is_refused(storage, move):
    model, path, _, good = ready(storage)
    held = path.fingerprint()
    assert held == path.fingerprint()
    move(model)
    assert path.fingerprint() != held
    refused(path, model, [good], "since prewarm")


@every
@pytest.mark.parametrize("move", [rebind_data, rebind_parameter, change_dtype, remove])
def test_storage_that_moves_while_an_update_is_applied_is_not_acknowledged(storage, move):
    model, path, _, good = ready(storage)
    path.apply([good])
    path.synchronise()
    move(model)
    with pytest.raises(PartialWriteError, match="captured graphs would not see it"):
        path.synchronise()


@every
def test_a_changed_table_that_the_loader_consults_is_refused(storage):
    model, path, _, good = ready(storage, loaders.table_lookup)
    model.table[0] = 0
    refused(path, model, [good], "consults")
    model.table[0] = 3
    assert path.apply([good]) == 1


class Moody:
    """A loader that does something else once it is told to."""

    def __init__(self):
        self.mood = None
        self.model = loaders.Model()

    def __call__(self, weights):
        m = self.model
        for _, w in weights:
            if self.mood == "fail first":
                raise ValueError("disk")
            if self.mood == "elsewhere":
                m.big.data[2:].copy_(w)
                continue
            m.p.data.copy_(w)
            if self.mood == "fail later":
                raise ValueError("disk")
            if self.mood == "forget":
                continue
            if self.mood == "more":
                m.f.data.copy_(w)
            m.big.data[:8].copy_(w * 2 if self.mood == "scale" else w)
            if self.mood == "rebind":
                m.p = loaders.parameter(8, 6)
            if self.mood == "values":
                w.sum().item()
        return set() if self.mood == "silent" else {"p", "big"}


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("fail first", RefusedError),
        ("elsewhere", RefusedError),
        ("fail later", PartialWriteError),
        ("forget", PartialWriteError),
        ("scale", PartialWriteError),
        ("more", PartialWriteError),
        ("rebind", PartialWriteError),
        ("values", PartialWriteError),
        ("silent", PartialWriteError),
    ],
)
def test_a_loader_that_changes_its_mind(mood, error):
    load = Moody()
    a = loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)
    b = loaders.changed(a, 2, 0.4)
    with torch.no_grad():
        load([("w", a)])
    path = hooked(load.model, load, [loaders.SPEC])
    path.prewarm().raise_if_refused()
    before = loaders.state(load.model)
    load.mood = mood
    with pytest.raises((RefusedError, PartialWriteError), match=r"\w+: ") as caught:
        path.apply([loaders.item("w", a, b, Operation.SET)])
    assert type(caught.value) is error
    assert loaders.same(loaders.state(load.model), before) == (error is RefusedError)
    load.mood = None
    path.prewarm().raise_if_refused()
    path.apply([loaders.item("w", a, b, Operation.SET)])
    if mood == "rebind":
        return  # what the loader had bound anew was never loaded
    fresh = Moody()
    with torch.no_grad():
        fresh([("w", b)])
    assert loaders.same(loaders.state(load.model), loaders.state(fresh.model))


@every
def test_writes_are_executed_and_undone_where_a_loader_insists_on_them(storage):
    """Withheld, the loader fails; executed, it succeeds; afterwards every bit is what it was."""
    model = loaders.Model()

    def load(weights):
        for _, w in weights:
            model.p.data.copy_(w)
            if not any(ctypes.string_at(model.p.data_ptr(), 96)):
                raise ValueError("nothing was written")
        return {"p"}

    before = loaders.state(model)
    path = storage(model, load, [loaders.SPEC])
    assert path.prewarm().classes == {"w": LoaderClass.BOX}
    assert loaders.same(loaders.state(model), before)
    b = loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)
    path.apply([loaders.item("w", torch.zeros(loaders.SHAPE, dtype=loaders.BF16), b, Operation.XOR)])
    assert torch.equal(loaders.raw(model.p), loaders.raw(b))


@pytest.mark.parametrize("insists", [False, True], ids=["withheld", "executed"])
def test_a_loader_that_writes_through_an_address_is_refused_and_undone(insists):
    model = loaders.Model()

    def load(weights):
        for _, w in weights:
            if w.is_meta:
                raise ValueError("meta")
            model.p.data.copy_(w)
            if insists and not any(ctypes.string_at(model.p.data_ptr(), 96)):
                raise ValueError("nothing was written")
            ctypes.memset(model.p.data_ptr(), 7, 96)
        return {"p"}

    before = loaders.state(model)
    learned = boxes(model, load, [loaders.SPEC]).prewarm()
    assert learned.classes == {"w": LoaderClass.REFUSED}
    assert "past the watch" in learned.reasons["w"]
    assert loaders.same(loaders.state(model), before)


def test_a_write_through_an_address_without_values_is_noticed():
    model = loaders.Model()

    def load(weights):
        for _, w in weights:
            model.p.data.copy_(w)
            ctypes.memset(model.p.data_ptr(), 7, 96)
        return {"p"}

    with pytest.raises(PartialWriteError, match="restore"):
        boxes(model, load, [loaders.SPEC]).prewarm()


@every
def test_narrowing_nan_gives_the_bits_of_a_dense_load(storage):
    """Which NaN a cast to bfloat16 yields depends on the strides of its target, on some processors."""
    spec = TensorSpec("w", loaders.SHAPE, torch.float32)

    def dense(w):
        model = loaders.Model()
        with torch.no_grad():
            place(model, [("w", w)])
        return model

    def place(model, weights):
        for _, w in weights:
            model.p.data.copy_(w)
            model.q.data.t().copy_(w)
            model.r.data[::2].copy_(w[:4, :3])
        return {"p", "q", "r"}

    nan = torch.full(loaders.SHAPE, -1, dtype=torch.int32).view(torch.float32)
    a = torch.where(torch.arange(48).view(8, 6) % 3 == 0, nan, torch.ones(loaders.SHAPE))
    b = torch.where(torch.arange(48).view(8, 6) % 2 == 0, nan, torch.zeros(loaders.SHAPE))
    model = dense(a)
    path = storage(model, lambda ws: place(model, ws), [spec])
    assert path.prewarm().classes == {"w": LoaderClass.TRANSFORMING}
    path.apply([loaders.item("w", a, b, Operation.SET)])
    assert loaders.same(loaders.state(model), loaders.state(dense(b)))


@every
def test_two_owners_items_of_one_tensor(storage):
    model, path, a, _ = ready(storage)
    b = loaders.changed(a, 9, 0.6)
    whole = loaders.item("w", a, b, Operation.XOR)
    parts = [Item(loaders.SPEC, Operation.XOR, whole.indices[k::2], whole.values[k::2]) for k in (0, 1)]
    assert path.apply(parts) == 2
    assert loaders.same(loaders.state(model), loaders.state(twin(loaders.two_copies, b)))


def test_names_given_twice():
    model = loaders.Model()
    with pytest.raises(RefusedError, match="given twice"):
        boxes(model, loaders.loader(model, loaders.widen), [loaders.SPEC, loaders.SPEC]).prewarm()
