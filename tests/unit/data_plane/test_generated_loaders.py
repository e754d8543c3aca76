"""Generated native loaders: a refit equals a dense load of the target into a fresh twin, or is refused by name."""

from dataclasses import dataclass

import loaders
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from storages import EVERY, boxes
from torch import nn

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.placement.prewarm import LoaderClass
from dcr.protocol.errors import RefusedError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]
SOURCES = {
    "rows": lambda w: w[w.shape[0] // 2 :],
    "columns": lambda w: w[..., : max(1, w.shape[-1] // 2)],
    "tensor parallel": lambda w: w.narrow(-1, w.shape[-1] // 2, w.shape[-1] - w.shape[-1] // 2),
    "every other": lambda w: w[::2],
    "transpose": lambda w: w.transpose(0, -1),
    "flatten": lambda w: w.flatten(),
    "split": lambda w: w.split(max(1, w.shape[0] // 3))[-1],
    "unsqueeze": lambda w: w.unsqueeze(0),
    "repeat rows": lambda w: w[:1].expand(3, *w.shape[1:]),
    "contiguous": lambda w: w.contiguous(),
    "clone": lambda w: w.clone(),
    "flip": lambda w: w.flip(0),
    "roll": lambda w: w.roll(1, 0),
    "swap halves": lambda w: torch.cat([w[w.shape[0] // 2 :], w[: w.shape[0] // 2]]),
    "pad": lambda w: nn.functional.pad(w, (0, 2), value=1.0),
    "pick": lambda w: w[torch.arange(w.shape[0]).flip(0)],
    "bits": lambda w: w.view(loaders.INTEGERS[w.itemsize]),
    "float": lambda w: w.float(),
    "bfloat16": lambda w: w.to(torch.bfloat16),
    "negate": lambda w: -w,
    "minus exp": lambda w: -torch.exp(w.float()),
    "scale": lambda w: w.float() * 0.3 + 1,
    "select": lambda w: torch.where(w.float() > 0, w.float(), -w.float()),
    "own half": lambda w: w[: w.shape[0] // 2] + w[w.shape[0] // 2 :][: w.shape[0] // 2],
    "mean": lambda w: w.float() - w.float().mean(),
}
VIEWS = ["rows", "columns", "tensor parallel", "every other", "transpose", "flatten", "split", "unsqueeze", "bits"]


@dataclass(frozen=True)
class Step:
    """One thing a loader does with a tensor: copy it somewhere, fill, copy on, transform in place."""

    kind: str
    parameter: int
    transposed: bool
    stride: int
    offset: tuple[int, int]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    specs: tuple[TensorSpec, ...]
    dtypes: tuple[torch.dtype, ...]
    steps: tuple[tuple[Step, ...], ...]
    materialise: bool
    reports: bool
    seed: int


PARAMETERS = [(24, 26), (20, 24), (90,), (70,), (9, 12, 11), (4, 10, 12)]
offsets = st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 25), st.integers(0, 25)))
chains = st.one_of(
    st.lists(st.sampled_from(VIEWS), max_size=3), st.lists(st.sampled_from(sorted(SOURCES)), max_size=3)
).map(tuple)
steps = st.builds(
    Step,
    st.sampled_from(["copy"] * 6 + ["fill", "copy on", "in place"]),
    st.integers(0, 1),
    st.booleans(),
    st.sampled_from([1, 1, 2]),
    offsets,
    chains,
)
shapes = st.sampled_from([(8, 6), (7, 5), (6,), (2, 5, 4), (1, 3), (9, 8)])


@st.composite
def programs(draw):
    count = draw(st.integers(1, 3))
    dtype = st.sampled_from(DTYPES)
    common = draw(dtype)
    specs = tuple(
        TensorSpec(f"w{i}", draw(shapes), draw(dtype) if draw(st.booleans()) else common) for i in range(count)
    )
    held = tuple(draw(dtype) if draw(st.booleans()) else common for _ in PARAMETERS)
    todo = tuple(tuple(draw(st.lists(steps, min_size=1, max_size=3))) for _ in range(count))
    return Program(specs, held, todo, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 999)))


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program
        for i, (shape, dtype) in enumerate(zip(PARAMETERS, program.dtypes, strict=True)):
            self.register_buffer(f"p{i}", torch.zeros(shape, dtype=dtype), persistent=i % 2 == 0)

    def target(self, step, shape):
        """A block of this shape in a parameter, or None if none has room for it."""
        fitting = [i for i, p in enumerate(PARAMETERS) if len(p) == len(shape)]
        if not fitting:
            return None
        p = getattr(self, f"p{fitting[step.parameter % len(fitting)]}")
        p = p.transpose(0, -1) if step.transposed else p
        reach = ((shape[0] - 1) * step.stride + 1, *shape[1:])
        room = [n - r for n, r in zip(p.shape, reach, strict=True)]
        if min(room) < 0 or 0 in shape:
            return None
        block = p[tuple(slice(o % (m + 1), None) for o, m in zip((*step.offset, 0), room, strict=False))]
        return block[tuple(slice(0, r) for r in reach)][:: step.stride]

    def load_weights(self, weights):
        written = set()
        for name, w in list(weights) if self.program.materialise else weights:
            last = None
            for step in self.program.steps[int(name[1:])]:
                dst = self.place(step, w, last)
                if dst is not None:
                    last = dst
                    written.update(
                        n for n, p in self.named_buffers() if p.data_ptr() <= dst.data_ptr() < p.data_ptr() + p.nbytes
                    )
        return written if self.program.reports else None

    def place(self, step, w, last):
        src = last if step.kind == "copy on" else w
        if src is None or (step.kind == "in place" and last is None):
            return None
        if step.kind == "in place":
            last.copy_(-torch.exp(last.float()))
            return None
        for name in step.sources:
            src = SOURCES[name](src)
        dst = self.target(step, src.shape)
        if dst is not None:
            if step.kind == "fill":
                dst.fill_(1)
            elif dst.is_floating_point() or src.dtype == dst.dtype:
                dst.copy_(src)
            else:
                return None  # conversions of NaN and infinity to integers are undefined in C
        return dst


def dense(program, weights):
    model = Model(program)
    with torch.no_grad():
        model.load_weights(iter(weights.items()))
    return model


def loadable(program, weights):
    """Whether the loader itself accepts the tensors: some chains do not fit their shapes or dtypes."""
    try:
        return dense(program, weights)
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        return None


def weights_of(program):
    return {s.name: loaders.random_bits(s.shape, s.dtype, program.seed + i) for i, s in enumerate(program.specs)}


def prewarmed(program, storage=boxes):
    weights = weights_of(program)
    model = loadable(program, weights)
    if model is None:
        return None
    before = loaders.state(model)
    path = storage(model, model.load_weights, program.specs)
    learned = path.prewarm()
    assert loaders.same(loaders.state(model), before)
    return model, path, learned, weights


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.data())
def test_equal_to_a_dense_load_or_refused(program, data):
    ready = prewarmed(program, data.draw(st.sampled_from(EVERY)))
    if ready is None:
        return
    model, path, learned, weights = ready
    target, items = dict(weights), []
    for i, (name, a) in enumerate(weights.items()):
        b = loaders.changed(a, program.seed + 50 + i, 0.4)
        cls = learned.classes[name]
        operations = list(Operation) if cls is LoaderClass.BOX else [Operation.SET]
        item = loaders.item(name, a, b, data.draw(st.sampled_from(operations)))
        if cls is LoaderClass.REFUSED:
            before = loaders.state(model)
            with pytest.raises(RefusedError, match=name):
                path.apply([item])
            assert loaders.same(loaders.state(model), before)
        else:
            items.append(item)
            target[name] = b
    torn = data.draw(st.booleans())
    if torn:  # garbage where entries go, then the complete changed set
        items = [loaders.item(i.spec.name, weights[i.spec.name], target[i.spec.name], Operation.SET) for i in items]
        for i in items:
            noise = loaders.raw(loaders.random_bits(i.spec.shape, i.spec.dtype, 7)).view(-1)[i.indices]
            some = slice(0, i.entries, 2)
            path.apply([Item(i.spec, Operation.SET, i.indices[some], noise[some])])
    path.apply(items)
    assert loaders.same(loaders.state(model), loaders.state(dense(program, target))), learned.classes


@pytest.mark.parametrize("wanted", list(LoaderClass))
def test_programs_reach_every_class(wanted):
    def reaches(program):
        ready = prewarmed(program)
        return ready is not None and wanted in ready[2].classes.values()

    quick = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    find(programs(), reaches, settings=quick)
