"""Native loaders of every kind, honest and adversarial, over one small model, and what is learned of each.

A loader here is written for one canonical tensor ``w`` of bfloat16 [8, 6].  The independent answer is always a dense
load of the target by the same loader into a fresh twin.
"""

import threading

import torch
from torch import nn

from dcr.data_plane.item import Item, Operation, TensorSpec

BF16 = torch.bfloat16
SHAPE = (8, 6)
SPEC = TensorSpec("w", SHAPE, BF16)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Negative zero, signalling and quiet NaNs with payloads of both signs, infinities, the smallest denormal.
SPECIAL = {2: [-0x8000, 0x7F81, 0x7FC1, -1, -0x7F, 0x7F80, -0x80, 1], 4: [-(2**31), 0x7F800001, 0x7FC00001, -1, 1]}


def raw(t):
    """Stored bits, by a way of its own."""
    return t.detach().contiguous().view(INTEGERS[t.itemsize]).clone()


def random_bits(shape, dtype, seed):
    """A tensor of random stored bits, special floats among them."""
    g = torch.Generator().manual_seed(seed)
    width = dtype.itemsize
    n = torch.Size(shape).numel()
    half = 1 << (8 * width - 1)
    low, high = (0, 256) if width == 1 else (-half, half - 1)
    bits = torch.randint(low, high, (n,), generator=g).to(INTEGERS[width])
    special = torch.tensor(SPECIAL.get(width, [0, 1]), dtype=INTEGERS[width])[:n]
    bits[: len(special)] = special
    return bits[torch.randperm(n, generator=g)].view(dtype).view(shape)


def changed(a, seed, share):
    """A copy of ``a`` with about this share of its elements replaced by random bits."""
    g = torch.Generator().manual_seed(seed)
    new = raw(random_bits(a.shape, a.dtype, seed + 1))
    where = torch.rand(a.shape, generator=g) < share
    return torch.where(where, new, raw(a)).view(a.dtype)


def item(name, a, b, operation):
    """The changed set of one tensor as one item."""
    spec = TensorSpec(name, tuple(b.shape), b.dtype)
    x, y = raw(a).reshape(-1), raw(b).reshape(-1)
    k = (x != y).nonzero().flatten()
    values = {Operation.SET: y[k], Operation.XOR: x[k] ^ y[k], Operation.ADD: y[k] - x[k]}[operation]
    return Item(spec, operation, k, values)


def state(model):
    """Stored bits of every parameter and buffer."""
    return {n: raw(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def parameter(*shape, dtype=BF16):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q, self.r = parameter(8, 6), parameter(6, 8), parameter(8, 3)
        self.f, self.big = parameter(8, 6, dtype=torch.float32), parameter(10, 6)
        self.register_buffer("scale", torch.full((8, 6), 0.5, dtype=BF16), persistent=False)
        self.register_buffer("table", torch.tensor([3, 0]), persistent=False)
        self.hidden = [torch.zeros(8, 6, dtype=BF16)]


outside = torch.zeros(8, 6, dtype=BF16)


def readback(m, w):
    m.p.data.copy_(w)
    assert torch.equal(m.p.data, w)


def item_guard(m, w):
    if w.abs().max().item() > 1e38:
        raise ValueError
    m.p.data.copy_(w)


def item_branch(m, w):
    m.p.data.copy_(w if w.float().sum().item() <= 0 else w * 2)


def numpy_branch(m, w):
    m.p.data.copy_(w if w.float().numpy().sum() <= 0 else w * 2)


def tolist_branch(m, w):
    m.p.data.copy_(w if w[0, 0].tolist() <= 0 else w * 2)


def bool_branch(m, w):
    m.p.data.copy_(w * 2 if (w > 0).any() else w)


def transpose(m, w):
    m.q.data.copy_(w.t())


def narrow(m, w):
    m.r.data.copy_(w.narrow(1, 3, 3))


def narrow_contiguous(m, w):
    m.r.data.copy_(w.narrow(1, 3, 3).contiguous())


def staged(m, w):
    t = torch.empty_like(m.p)
    t.copy_(w)
    m.p.data.copy_(t)


def staged_padding(m, w):
    t = torch.zeros(10, 6, dtype=BF16)
    t[:8].copy_(w)
    m.big.data.copy_(t)


def flip(m, w):
    m.p.data.copy_(w.flip(0))


def cat(m, w):
    m.p.data.copy_(torch.cat([w[4:], w[:4]]))


def pad(m, w):
    m.big.data.copy_(nn.functional.pad(w, (0, 0, 0, 2)))


def set_data(m, w):
    m.p.data = w.clone()


def set_parameter(m, w):
    m.p = nn.Parameter(w.clone(), requires_grad=False)


def numpy_write(m, w):
    m.p.data.view(torch.int16).numpy()[:] = w.contiguous().view(torch.int16).numpy()


def numpy_fill(m, w):
    m.big.data[8:].view(torch.int16).numpy()[:] = 7
    m.big.data[:8].copy_(w)


def thread(m, w):
    t = threading.Thread(target=lambda: m.p.data.copy_(w))
    t.start()
    t.join()


def half_thread(m, w):
    t = threading.Thread(target=lambda: m.p.data[:4].copy_(w[:4]))
    t.start()
    t.join()
    m.p.data[4:].copy_(w[4:])


def index_put(m, w):
    m.p.data[torch.arange(8)] = w


def accumulate(m, w):
    m.p.data.add_(w)


def accumulate_copy(m, w):
    m.p.data.copy_(m.p.data + w)


def broadcast(m, w):
    m.p.data.copy_(w[:1])


def in_place_after(m, w):
    m.p.data.copy_(w)
    m.p.data.neg_()


def composed(m, w):
    m.f.data.copy_(w)
    m.f.data.copy_(-torch.exp(m.f.float()))


def composed_at_once(m, w):
    m.f.data.copy_(-torch.exp(w.float()))


def composed_then_part(m, w):
    m.f.data.copy_(w)
    m.f.data[2:4].copy_(-torch.exp(m.f.data[2:4]))


def copied_twice(m, w):
    m.p.data.copy_(w)
    m.p.data.copy_(w)


def copied_twice_shifted(m, w):
    m.p.data.copy_(w)
    m.p.data.copy_(w.roll(1, 0))


def other_half_wins(m, w):
    m.r.data.copy_(w[:, :3])
    m.r.data.copy_(w[:, 3:])


def unregistered(m, w):
    outside.copy_(w)


def held_in_list(m, w):
    m.hidden[0].copy_(w)


def overlapping(m, w):
    m.p.data.copy_(w)
    m.p.data[:2].copy_(w[6:])


def byte_view(m, w):
    m.p.data.view(torch.uint8)[:, 4:].copy_(w.view(torch.uint8)[:, 4:])


def bit_view(m, w):
    m.p.data.view(torch.int16).copy_(w.view(torch.int16))


def widen(m, w):
    m.f.data.copy_(w)


def round_trip(m, w):
    m.p.data.copy_(w.float() * 1.0)


def scale_by_buffer(m, w):
    m.p.data.copy_(w * m.scale)


def table_lookup(m, w):
    start = m.table[0].item()
    m.r.data.copy_(w[:, start : start + 3])


def mix_elements(m, w):
    m.r.data.copy_(w[:, :3] + w[:, 3:])


def square(m, w):
    m.p.data.copy_(w * w)


def nan_to_num(m, w):
    m.p.data.copy_(torch.nan_to_num(w))


def clamp(m, w):
    m.p.data.copy_(w.clamp(min=-1e30))


def normalise(m, w):
    m.p.data.copy_(w / w.float().norm())


def cumulative(m, w):
    m.p.data.copy_(w.cumsum(0))


def fill_pad(m, w):
    m.big.data[:8].copy_(w)
    m.big.data[8:].fill_(0)


def fill_first(m, w):
    m.big.data.fill_(0)
    m.big.data[:8].copy_(w)


def fill_over(m, w):
    m.big.data[:8].copy_(w)
    m.big.data[6:].fill_(0)


def foreach(m, w):
    torch._foreach_copy_([m.p.data[:4], m.p.data[4:]], [w[:4], w[4:]])


def out_argument(m, w):
    torch.neg(w, out=m.p.data)


def two_copies(m, w):
    m.p.data.copy_(w)
    m.big.data[:8].copy_(w)


def interleave(m, w):
    a, b = w.chunk(2, 0)
    m.p.data[::2].copy_(a)
    m.p.data[1::2].copy_(b)


def change_given(m, w):
    m.p.data.copy_(w.neg_())


def random_noise(m, w):
    m.p.data.copy_(w + torch.rand(8, 6).to(BF16))


def constant_only(m, w):
    m.p.data.fill_(1)


def constant_tensor(m, w):
    m.p.data.copy_(torch.ones(8, 6))


def swallowed(m, w):
    try:
        m.p.data.add_(w)
    except Exception:  # noqa: BLE001 - the point of the case
        m.p.data.copy_(w)


def meta_shy(m, w):
    assert not w.is_meta
    m.p.data.copy_(w)


def mixed_devices(m, w):
    m.big.data.copy_(torch.cat([w, torch.zeros(2, 6, dtype=BF16, device="cpu")]))


def storage_bytes(m, w):
    m.p.data.copy_(w)
    bytes(m.p.data.untyped_storage())


def skip(m, w):
    return set()


def skip_none(m, w):
    return "none"


def thread_none(m, w):
    thread(m, w)
    return "none"


P, T, S, R = "box", "transforming", "skipped", "refused"
EXPECTED = {
    readback: R,
    item_guard: R,
    item_branch: R,
    numpy_branch: R,
    tolist_branch: R,
    bool_branch: R,
    transpose: P,
    narrow: P,
    narrow_contiguous: T,
    staged: T,
    staged_padding: T,
    flip: T,
    cat: T,
    pad: T,
    set_data: R,
    set_parameter: R,
    numpy_write: R,
    numpy_fill: R,
    thread: R,
    half_thread: R,
    index_put: R,
    accumulate: R,
    accumulate_copy: R,
    broadcast: P,
    in_place_after: R,
    composed: T,
    composed_at_once: T,
    composed_then_part: R,
    copied_twice: T,
    copied_twice_shifted: R,
    other_half_wins: R,
    unregistered: R,
    held_in_list: P,
    overlapping: R,
    byte_view: R,
    bit_view: P,
    widen: P,
    round_trip: T,
    scale_by_buffer: T,
    table_lookup: P,
    mix_elements: R,
    square: T,
    nan_to_num: T,
    clamp: T,
    normalise: R,
    cumulative: R,
    fill_pad: P,
    fill_first: P,
    fill_over: R,
    foreach: R,
    out_argument: R,
    two_copies: P,
    interleave: P,
    change_given: R,
    random_noise: R,
    constant_only: R,
    constant_tensor: R,
    swallowed: R,
    meta_shy: P,
    mixed_devices: T,
    storage_bytes: R,
    skip: S,
    skip_none: S,
    thread_none: R,
}


def loader(model, place):
    """The ``load_weights`` of a model whose one canonical tensor is placed by ``place``; reports ``p``."""

    def load(weights):
        loaded = set()
        for _, w in weights:
            got = place(model, w)
            if got == "none":
                return None
            loaded |= {"w"} if got is None else got
        return loaded

    return load
