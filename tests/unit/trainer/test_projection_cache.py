"""A learned projection on disk: what saves learning, what is noticed, and what a bad file cannot do."""

import functools
import hashlib
import logging
import os

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcr.data_plane.bits import bit_view
from dcr.trainer.megatron import cache
from dcr.trainer.megatron.identity import fingerprint
from dcr.trainer.megatron.learner import Learner
from dcr.trainer.megatron.lockstep import Lockstep
from dcr.trainer.megatron.source import MegatronSource
from dcr.trainer.torch.ranks import Ranks
from tests.unit.trainer.test_own_conversion import BF16, Own, refit, weights


class Named(Own):
    """Counts the tensors of integers that it converts: nothing but learning does that."""

    def __init__(self, tensors, function, name="own", others=None):
        super().__init__(tensors, function, others)
        self.name = name
        self.ids = 0

    def identity(self):
        return self.name

    def convert(self, numbers, replace_by, begin):
        def counted(number, tensor):
            made = replace_by(number, tensor)
            self.ids += made.dtype == torch.int64 and tensor.dtype != torch.int64
            return made

        yield from super().convert(numbers, counted, begin)


def turned(number, tensor):
    """Moves, moves in pieces, computes."""
    if number == 0:
        return {"a": tensor.t(), "b": tensor[1:]}
    return {f"w{number}": tensor.flip(0) if number == 1 else tensor + 1}


def model(function=turned, name="own"):
    return Named(weights((40, 30), (64, 8), (4, 4)), function, name)


def file_of(folder):
    (path,) = folder.iterdir()
    return path


def sealed(body):
    return cache._MAGIC + hashlib.sha256(body).digest() + body


def rewritten(path, change):
    """The file with other contents, in a valid digest."""
    head = len(cache._MAGIC) + 32
    held = msgspec.msgpack.decode(path.read_bytes()[head:], strict=False)
    change(held)
    path.write_bytes(sealed(msgspec.msgpack.encode(held)))


@pytest.fixture
def stored(tmp_path):
    """A folder with what was learned of ``model()``."""
    MegatronSource(model(), cache_folder=tmp_path)
    return tmp_path


def test_the_second_time_nothing_is_learned_and_everything_is_the_same(stored, caplog):
    first, second = model(), model()
    fresh = MegatronSource(first)
    with caplog.at_level(logging.INFO, cache.__name__):
        source = MegatronSource(second, cache_folder=stored)
    assert (first.ids, second.ids) == (3, 0)
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [(level, "was taken from it" in text) for level, text in said] == [(logging.INFO, True)]
    assert (source.specs, source.residual, source.residual_specs) == (fresh.specs, fresh.residual, fresh.residual_specs)
    assert source._pieces == fresh._pieces
    refit(source, second, lambda: [bit_view(tensor).view(-1)[::3].bitwise_xor_(5) for tensor in second.tensors])


OTHER = {
    "another conversion": lambda: model(name="other"),
    "another shape": lambda: Named(weights((40, 31), (64, 8), (4, 4)), turned),
    "another dtype": lambda: Named(weights((40, 30), (64, 8), (4, 4), dtype=torch.float32), turned),
    "one more": lambda: Named(weights((40, 30), (64, 8), (4, 4), (2, 2)), turned),
    "an adapter": lambda: Named(weights((40, 30), (64, 8), (4, 4)), turned, others={"adapter": torch.ones(2)}),
}


@pytest.mark.parametrize("other", OTHER)
def test_what_is_another_model_learns_for_itself(stored, other):
    own = OTHER[other]()
    source = MegatronSource(own, cache_folder=stored)
    assert own.ids == len(own.tensors)
    assert len(list(stored.iterdir())) == 2
    refit(source, own, lambda: own.tensors[0].mul_(2))


def exchange(held, one, other):
    """Two elements of a tensor change places in its map."""
    rows = held["pieces"][1]["w1"]
    places = {}
    for row in rows:
        source, target = (index.tolist() for index in cache.Box(*map(_tuple, row)).expand())
        places |= dict(zip(source, target, strict=True))
    places[one], places[other] = places[other], places[one]
    held["pieces"][1]["w1"] = [[[], [], [], source, target] for source, target in places.items()]


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value


WRONG = {
    # Positions 1 modulo 4 of the random bits are all -0.0, so those alone would not show it.
    "two elements exchanged that hold the same random bits": lambda held: exchange(held, 1, 5),
    "two neighbours exchanged": lambda held: exchange(held, 8, 9),
    "a residual task said to be direct": lambda held: (
        held["reasons"].pop(2), held["pieces"].__setitem__(2, {"w2": [[[16], [1], [1], 0, 0]]}),
    ),
    "an element left out": lambda held: held["pieces"][0]["b"][0][0].__setitem__(0, 1169),
    "a task left out": lambda held: held["pieces"].pop(1),
    "another shape": lambda held: held["shapes"].__setitem__("w1", [8, 64]),
    "a name that does not come out": lambda held: (
        held["shapes"].__setitem__("x", [0]), held["origins"].__setitem__("x", [1]),
    ),
    "a name left out": lambda held: (held["shapes"].pop("b"), held["origins"].pop("b"), held["pieces"][0].pop("b")),
    "a task beyond": lambda held: held["pieces"].__setitem__(3, held["pieces"].pop(1)),
    "an origin beyond": lambda held: held["origins"].__setitem__("w1", [1, 2**40]),
    "another origin": lambda held: held["origins"].__setitem__("w1", [0]),
    "a map beyond the tensor": lambda held: held["pieces"][1]["w1"].append([[], [], [], 512, 0]),
    "a map beyond the memory of the machine": lambda held: held["pieces"][1].__setitem__(
        "w1", [[[2**31, 2**31], [2**31, 1], [2**31, 1], 0, 0]]
    ),
    "a map that repeats an element": lambda held: held["pieces"][1]["w1"].append([[], [], [], 3, 4]),
    "a map of strides that are none": lambda held: held["pieces"][1].__setitem__("w1", [[[512], [0], [1], 0, 0]]),
    "a shape beyond numbers": lambda held: held["shapes"].__setitem__("w1", [2**62, 4]),
    "a negative shape": lambda held: held["shapes"].__setitem__("w1", [-64, -8]),
    "a name without end": lambda held: (
        held["shapes"].__setitem__("x" * 70_000, [1]), held["origins"].__setitem__("x" * 70_000, [1]),
    ),
    "another fingerprint": lambda held: held.__setitem__("fingerprint", "0" * 64),
    "one more field": lambda held: held.__setitem__("more", 1),
    "a text for numbers": lambda held: held.__setitem__("pieces", "all"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_in_a_file_is_noticed_and_learned_anew(stored, caplog, wrong):
    rewritten(file_of(stored), WRONG[wrong])
    own = model()
    with caplog.at_level(logging.WARNING):
        source = MegatronSource(own, cache_folder=stored)
    assert own.ids == 3, "nothing was learned anew"
    assert ["the projection is learned anew" in record.message for record in caplog.records] == [True]
    refit(source, own, lambda: [tensor.mul_(2) for tensor in own.tensors])
    again = model()
    MegatronSource(again, cache_folder=stored)
    assert again.ids == 0  # it was stored anew, too


def test_a_right_file_that_was_written_otherwise_is_taken(stored):
    rewritten(file_of(stored), lambda held: None)
    own = model()
    MegatronSource(own, cache_folder=stored)
    assert own.ids == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder, what its file holds, and a learner that has learned nothing."""
    folder, own = tmp_path_factory.mktemp("cache"), model()
    learners = [Learner(own, own.tasks(), Lockstep(Ranks())) for _ in range(3)]
    learners[0].run_ids()
    held = cache.ProjectionCache(folder, "f" * 64, 0)
    held.store(learners[0])
    assert held.recall(learners[1]) is True
    direct = {n: piece for n, piece in learners[0].pieces.items() if n not in learners[0].reasons}
    assert learners[1].pieces == direct
    return folder, file_of(folder).read_bytes(), learners[2]


@given(data=st.data())
def test_damaged_bytes_are_never_believed(whole, data):
    folder, made, learner = whole
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "random", "sealed"]))
    at = data.draw(st.integers(0, len(made) - 1))
    some = data.draw(st.binary(min_size=1, max_size=200))
    damaged = {
        "cut": made[:at],
        "flip": made[:at] + bytes([made[at] ^ (some[0] or 1)]) + made[at + 1 :],
        "insert": made[:at] + some + made[at:],
        "random": some,
        "sealed": sealed(some),
    }[kind]
    file_of(folder).write_bytes(damaged)
    held = cache.ProjectionCache(folder, "f" * 64, 0)
    assert held.recall(learner) is False
    assert learner.pieces == {}


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _folder(path):
    path.unlink()
    path.mkdir()


def _huge(path):
    os.truncate(path, cache.FILE_BYTES_MAX + 1)


@pytest.mark.parametrize("made", [_pipe, _folder, _huge])
def test_what_is_no_file_of_ours_is_passed_by(stored, caplog, made):
    made(file_of(stored))
    own = model()
    with caplog.at_level(logging.WARNING):
        MegatronSource(own, cache_folder=stored)
    assert own.ids == 3
    assert "it cannot be read" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        source = MegatronSource(own := model(), cache_folder=tmp_path / "file" / "folder")
    assert "cannot be" in caplog.text
    refit(source, own, lambda: own.tensors[0].mul_(2))


def test_old_files_of_a_rank_go(tmp_path):
    other = tmp_path / "rank-1-x.projection"
    other.write_text("")
    for number in range(cache.FILES_MAX + 3):
        MegatronSource(Named(weights((2, 2)), turned, f"own {number}"), cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == cache.FILES_MAX + 1
    assert other.exists()


def test_a_conversion_that_has_changed_behind_its_name_is_noticed(stored, caplog):
    own = model(lambda n, t: {"w1": t} if n == 1 else turned(n, t))
    with caplog.at_level(logging.WARNING):
        source = MegatronSource(own, cache_folder=stored)
    assert own.ids == 3
    assert "the conversion does not do what it says" in caplog.text
    refit(source, own, lambda: own.tensors[1].mul_(2))


def test_a_fingerprint_sees_settings_and_code_but_not_places():
    def hook(factor):
        return lambda tensor: tensor * factor

    class Mapping:
        def __init__(self, name):
            self.name, self.of_no_matter_cache = name, object()

    assert fingerprint([Mapping("q"), hook(2), {"b": 1, "a": BF16}]) == fingerprint(
        [Mapping("q"), hook(2), {"a": BF16, "b": 1}]
    )
    several = [
        Mapping("q"),
        Mapping("k"),
        hook(2),
        hook(3),
        lambda tensor: tensor + 2,
        functools.partial(hook, 2),
        2,
        "2",
    ]
    assert len({fingerprint(one) for one in several}) == len(several)
