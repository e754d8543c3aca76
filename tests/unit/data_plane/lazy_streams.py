"""A device module whose streams do what they are told when it suits them, within the order that events demand.

What is copied within ``stream()`` is not copied then, but when the stream gets there: when somebody waits for it, or by
chance.  So a copy that nothing orders comes too early or too late in some run.
"""

import contextlib
import random

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Marker:
    """A point in a stream's work."""

    def __init__(self, stream):
        self.stream = stream
        self.passed = False


class Stream:
    def __init__(self):
        self.work = []

    def wait_event(self, event):
        if event.marker is not None:
            marker = event.marker  # as it is recorded now, as with CUDA
            self.work.append(lambda: force(marker))

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def step(self):
        self.work.pop(0)()


class Event:
    def __init__(self):
        self.marker = None

    def record(self, stream):
        self.marker = marker = Marker(stream)
        stream.work.append(lambda: setattr(marker, "passed", True))

    def synchronize(self):
        if self.marker is not None:
            force(self.marker)


def force(marker):
    while not marker.passed:
        marker.stream.step()


class _Deferred(TorchDispatchMode):
    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        to, source, *_ = args
        self.stream.work.append(lambda: to.copy_(source))
        return to


class LazyDevice:
    """In place of ``torch.cuda``.

    Args:
        seed: of the schedule; None for streams that work only when somebody waits.
    """

    Event = Event

    def __init__(self, seed):
        self.random = None if seed is None else random.Random(seed)
        self.streams = []
        self.current = self.Stream()

    def Stream(self):  # noqa: N802 - as torch calls it
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, _device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        with _Deferred(stream):
            yield
        self.advance()

    def advance(self):
        """Some streams get on with their work."""
        if self.random is not None:
            for stream in self.streams:
                for _ in range(self.random.choice((0, 0, 1, 2, 99))):
                    if stream.work:
                        stream.step()

    def finish(self):
        for stream in self.streams:
            while stream.work:
                stream.step()
