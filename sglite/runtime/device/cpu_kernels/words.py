"""What numba has no word for: addresses as arrays, atomic words, giving the core away, bits of a float."""

# numba calls what is written here to build a function's code; nothing of it has types that a checker could follow

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _F32 = ir.IntType(64), ir.FloatType()
_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typingctx, address):
        def build(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), build

    return pointer


floats, ints, longs = _pointer_to(types.float32), _pointer_to(types.int32), _pointer_to(types.int64)


@intrinsic
def load(typingctx, address):
    def build(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), build


@intrinsic
def store(typingctx, address, value):
    def build(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def add(typingctx, address, value):
    def build(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), build


@intrinsic
def swap_if(typingctx, address, expected, value):
    """Compare and swap: whether the word was `expected` and is `value` now."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        found = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.zext(builder.extract_value(found, 1), _I64)

    return types.int64(types.int64, types.int64, types.int64), build


@intrinsic
def pause(typingctx):
    def build(context, builder, signature, args):
        if _X86:
            void = ir.FunctionType(ir.VoidType(), ())
            builder.call(cgutils.get_or_insert_function(builder.module, void, "llvm.x86.sse2.pause"), ())
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def yield_core(typingctx):
    def build(context, builder, signature, args):
        function = ir.FunctionType(ir.IntType(32), ())
        builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), ())
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def power_of_two(typingctx, exponent):
    """2.0 ** exponent for -127 < exponent < 128."""

    def build(context, builder, signature, args):
        shifted = builder.shl(builder.add(args[0], ir.Constant(ir.IntType(32), 127)), ir.Constant(ir.IntType(32), 23))
        return builder.bitcast(shifted, _F32)

    return types.float32(types.int32), build


@intrinsic
def floor(typingctx, x):
    """numpy's is a call that keeps a loop from being vectorised."""

    def build(context, builder, signature, args):
        kind = ir.FunctionType(_F32, (_F32,))
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.floor.f32"), args)

    return types.float32(types.float32), build
