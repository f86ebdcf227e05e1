"""The inner loops, written as vectors: a compiler would have to find them in scalar code, and does not always.

Addresses are integers; vectors need no alignment.
"""

# numba calls what is written here to build a function's code; nothing of it has types that a checker could follow

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PANEL = 16  # outputs of a weight that lie side by side
MAX_TILE = 6  # rows; 6 * 2 vectors of 8 sums, 2 of weights and one factor fill AVX2's registers
LANES = 8  # of the vectors in `dots` and `weighted`
_I64, _F32 = ir.IntType(64), ir.FloatType()
_VECTOR, _EIGHT = ir.VectorType(_F32, PANEL), ir.VectorType(_F32, LANES)


def _make_tile(rows: int) -> Any:
    """out[r, :] = sum over k of weights[k, :] * x[r, k], for `rows` rows and one panel. Each step asks for a line of
    memory at `ahead`, which will be needed later."""

    @intrinsic
    def tile(typingctx, weights, x, stride, count, ahead, out):
        def build(context, builder, signature, args):
            weights, x, stride, count, ahead, out = args
            row_bytes = builder.shl(stride, _I64(2))
            bases = [builder.add(x, builder.mul(row_bytes, _I64(r))) for r in range(rows)]
            before, loop = builder.block, builder.append_basic_block("tile")
            end = builder.append_basic_block("tile.end")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_I64)
            sums = [builder.phi(_VECTOR) for _ in range(rows)]
            line = builder.shl(k, _I64(6))
            _prefetch(builder, builder.add(ahead, line))
            panel = builder.load(builder.inttoptr(builder.add(weights, line), _VECTOR.as_pointer()), align=4)
            offset = builder.shl(k, _I64(2))
            new = []
            for base, total in zip(bases, sums, strict=True):
                factor = builder.load(builder.inttoptr(builder.add(base, offset), _F32.as_pointer()), align=4)
                new.append(_multiply_add(builder, panel, _splat(builder, factor, PANEL), total))
            following = builder.add(k, _I64(1))
            k.add_incoming(_I64(0), before)
            k.add_incoming(following, loop)
            for total, value in zip(sums, new, strict=True):
                total.add_incoming(ir.Constant(_VECTOR, [0.0] * PANEL), before)
                total.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
            builder.position_at_end(end)
            for r, value in enumerate(new):
                place = builder.add(out, _I64(4 * PANEL * r))
                builder.store(value, builder.inttoptr(place, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), build

    return tile


def _eights(builder, count, initial, step):
    """for i in range(count // 8): totals = step(byte offset of i * 8, totals); count may be 0. Returns the totals."""
    before, loop = builder.block, builder.append_basic_block("eights")
    end = builder.append_basic_block("eights.end")
    bound = builder.and_(count, _I64(-LANES))
    builder.cbranch(builder.icmp_signed("<", _I64(0), bound), loop, end)
    builder.position_at_end(loop)
    i = builder.phi(_I64)
    totals = [builder.phi(_EIGHT) for _ in initial]
    new = step(builder.shl(i, _I64(2)), totals)
    following = builder.add(i, _I64(LANES))
    i.add_incoming(_I64(0), before)
    i.add_incoming(following, loop)
    for total, value, first in zip(totals, new, initial, strict=True):
        total.add_incoming(first, before)
        total.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, bound), loop, end)
    builder.position_at_end(end)
    results = [builder.phi(_EIGHT) for _ in initial]
    for result, value, first in zip(results, new, initial, strict=True):
        result.add_incoming(first, before)
        result.add_incoming(value, loop)
    return results


def _eight_at(builder, address, offset):
    return builder.load(builder.inttoptr(builder.add(address, offset), _EIGHT.as_pointer()), align=4)


def _multiply_add(builder, a, b, c):
    return builder.fadd(c, builder.fmul(a, b, flags=("contract",)), flags=("contract",))


@intrinsic
def dots(typingctx, query, k0, k1, k2, k3, count, out):
    """out[j] = query . kj over the first count // 8 * 8 elements. Addresses."""

    def build(context, builder, signature, args):
        query, *keys, count, out = args

        def step(offset, totals):
            factor = _eight_at(builder, query, offset)
            pairs = zip(keys, totals, strict=True)
            return [_multiply_add(builder, factor, _eight_at(builder, key, offset), total) for key, total in pairs]

        zero = ir.Constant(_EIGHT, [0.0] * LANES)
        a, b, c, d = _eights(builder, count, [zero] * 4, step)
        quarter = _pair_sums(builder, _pair_sums(builder, a, b), _pair_sums(builder, c, d))
        sums = _pair_sums(builder, quarter, quarter)  # the four sums, twice
        for j in range(4):
            value = builder.extract_element(sums, ir.IntType(32)(j))
            builder.store(value, builder.inttoptr(builder.add(out, _I64(4 * j)), _F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), build


def _pair_sums(builder, a, b):
    """a0 + a1, a2 + a3, ..., b6 + b7."""
    kind = ir.VectorType(ir.IntType(32), LANES)
    even = builder.shuffle_vector(a, b, ir.Constant(kind, list(range(0, 2 * LANES, 2))))
    odd = builder.shuffle_vector(a, b, ir.Constant(kind, list(range(1, 2 * LANES, 2))))
    return builder.fadd(even, odd)


@intrinsic
def weighted(typingctx, out, weights, v0, v1, v2, v3, count):
    """out += sum over j of weights[j] * vj for the first count // 8 * 8 elements. Addresses."""

    def build(context, builder, signature, args):
        out, weights, *values, count = args
        factors = []
        for j in range(len(values)):
            place = builder.inttoptr(builder.add(weights, _I64(4 * j)), _F32.as_pointer())
            factors.append(_splat(builder, builder.load(place, align=4), LANES))

        def step(offset, totals):
            total = _eight_at(builder, out, offset)
            for factor, value in zip(factors, values, strict=True):
                total = _multiply_add(builder, factor, _eight_at(builder, value, offset), total)
            builder.store(total, builder.inttoptr(builder.add(out, offset), _EIGHT.as_pointer()), align=4)
            return totals

        _eights(builder, count, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), build


def _splat(builder, value, lanes):
    single = builder.insert_element(ir.Constant(ir.VectorType(_F32, lanes), ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _prefetch(builder, address):
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), (byte, number, number, number))
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, (builder.inttoptr(address, byte), number(0), number(3), number(1)))


tile1, tile2, tile3, tile4, tile5, tile6 = (_make_tile(rows) for rows in range(1, MAX_TILE + 1))
