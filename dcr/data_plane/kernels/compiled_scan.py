"""Compare and compact, compiled; see :meth:`dcr.data_plane.kernels.numba_streams.NumbaStreamKernels.differences`.

64 elements give one word of 64 answers; where and what differs is then squeezed together without a branch, so that
nothing is guessed wrong and the loop runs at the speed of memory.  Processors that cannot squeeze a register
(AVX-512 VBMI2 does) go through the set bits one by one.

One file, because numba's cache of compiled code looks at the file of a function only: what it calls or takes as a
constant must be in here.  Everything is unsigned: signed positions would cost a question whether to count from the
end, and a signed number that meets an unsigned one becomes a floating-point number.
"""

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from dcr.data_plane.kernels.code_cache import compiled as _compiled

U = np.uint64
U0, U1 = U(0), U(1)
BLOCK = U(64)
"""Elements looked at together; an array of results has room for as many beyond what it holds."""
AHEAD = U(4096)
"""Bytes ahead of the block that are asked for: the processor alone stops at every page."""
LINE = U(64)
SQUEEZES = "+avx512vbmi2" in cpu_target.target_context.codegen().magic_tuple()[2]
"""Whether the processor that numba compiles for can squeeze registers of every width; else LLVM would spell it out."""
_REGISTER_BITS = 512
_FEW = 8
"""Positions that are widened at a time."""
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)


_inlined = nb.njit(nogil=True, error_model="numpy", inline="always")


def _vector(lanes: int, width: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(width), lanes)


def _load(builder: Any, address: Any, kind: ir.VectorType) -> Any:
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = 1
    return found


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def _squeezed(builder: Any, value: Any, mask: Any) -> Any:
    """Lanes of ``value`` whose bit in ``mask`` is set, moved to the front."""
    kind = value.type
    bits = _vector(kind.count, 1)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [kind, bits, kind]),
        f"llvm.experimental.vector.compress.v{kind.count}i{kind.element.width}",
    )
    return builder.call(function, [value, builder.bitcast(mask, bits), ir.Constant(kind, ir.Undefined)])


@intrinsic
def _prefetch(_context: Any, address: Any) -> Any:
    """Ask for a cache line, which may lie past the end: nothing is read, nothing can fail."""

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, _INT32(0), _INT32(2), _INT32(1)])  # to read, second level, data
        return context.get_dummy_value()

    return types.void(address), code


@intrinsic
def _lowest(_context: Any, mask: Any) -> Any:
    """The number of the lowest set bit."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.uint64(mask), code


@intrinsic
def _differing(_context: Any, old: Any, new: Any, element: Any) -> Any:
    """Of the 64 elements at two addresses, a bit each: whether they differ."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = _vector(64, element.bitwidth)
        ours, theirs = (_load(builder, address, kind) for address in args[:2])
        return builder.bitcast(builder.icmp_unsigned("!=", ours, theirs), _INT64)

    return types.uint64(old, new, element), code


@intrinsic
def _squeeze(_context: Any, source: Any, mask: Any, target: Any, element: Any) -> Any:
    """The elements at ``source`` whose bit is set to ``target`` on, which has room for all 64."""

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, mask, target = args[:3]
        width = element.bitwidth
        lanes = _REGISTER_BITS // width
        for first in range(0, 64, lanes):
            values = _load(builder, builder.add(source, _INT64(first * width // 8)), _vector(lanes, width))
            bits = builder.trunc(builder.lshr(mask, _INT64(first)), ir.IntType(lanes))
            _store(builder, _squeezed(builder, values, bits), target)
            count = builder.ctpop(bits)
            count = count if lanes == 64 else builder.zext(count, _INT64)
            target = builder.add(target, builder.mul(count, _INT64(width // 8)))
        return context.get_dummy_value()

    return types.void(source, mask, target, element), code


@intrinsic
def _places(_context: Any, mask: Any, first: Any, target: Any) -> Any:
    """The numbers of the set bits plus ``first`` to ``target`` on, which has room for 64; returns how many."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        mask, first, target = args
        numbers = ir.Constant(_vector(64, 8), [ir.IntType(8)(k) for k in range(64)])
        places, wide = _squeezed(builder, numbers, mask), _vector(_FEW, 64)
        base = builder.insert_element(ir.Constant(wide, ir.Undefined), first, _INT32(0))
        base = builder.shuffle_vector(base, base, ir.Constant(_vector(_FEW, 32), [_INT32(0)] * _FEW))

        def put(group: int) -> None:
            these = ir.Constant(_vector(_FEW, 32), [_INT32(_FEW * group + k) for k in range(_FEW)])
            some = builder.zext(builder.shuffle_vector(places, places, these), wide)
            _store(builder, builder.add(some, base), builder.add(target, _INT64(8 * _FEW * group)))

        count = builder.ctpop(mask)
        put(0)
        with builder.if_then(builder.icmp_unsigned(">", count, _INT64(_FEW)), likely=False):
            put(1)
            with builder.if_then(builder.icmp_unsigned(">", count, _INT64(2 * _FEW)), likely=False):
                for group in range(2, 64 // _FEW):
                    put(group)
        return count

    return types.uint64(mask, first, target), code


@_compiled
def differences(old, new, start, resume, positions, before, after):
    """Positions at which two flat arrays differ, and what both hold there, until no more might fit.

    Args:
        old: unsigned integers, shape [n].
        new: the same.
        start: uint64: what to add to positions.
        resume: uint64: elements that were looked at, and that were found, by earlier calls; brought forward.
        positions: uint64, with room for BLOCK more than were found, if anything is to be looked at.
        before: as ``old``, the shape of ``positions``.
        after: as ``new``, the same.
    """
    base, found = resume[0], resume[1]
    count, room = U(old.size), U(positions.size)
    width = U(old.itemsize)
    ours, theirs = U(old.ctypes.data), U(new.ctypes.data)
    where, was, is_now = U(positions.ctypes.data), U(before.ctypes.data), U(after.ctypes.data)
    while base + BLOCK <= count and found + BLOCK <= room:
        a, b = ours + base * width, theirs + base * width
        for line in range(width):  # 64 elements are as many lines as an element has bytes
            _prefetch(a + AHEAD + line * LINE)
            _prefetch(b + AHEAD + line * LINE)
        mask = _differing(a, b, old[0])
        if SQUEEZES:
            _squeeze(a, mask, was + found * width, old[0])
            _squeeze(b, mask, is_now + found * width, old[0])
            found += _places(mask, start + base, where + found * U(8))
        else:
            while mask != U0:
                i = base + _lowest(mask)
                positions[found], before[found], after[found] = start + i, old[i], new[i]
                found += U1
                mask &= mask - U1
        base += BLOCK
    if base + BLOCK > count and found + BLOCK <= room:
        for i in range(base, count):
            if old[i] != new[i]:
                positions[found], before[found], after[found] = start + i, old[i], new[i]
                found += U1
        base = count
    resume[0], resume[1] = base, found
