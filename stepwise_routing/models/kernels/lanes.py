"""Vectors for numba: the same instructions, in the same order, and so the same bits on every processor.

Here belong sixteen numbers at a time: load, store, add, multiply, exponentiate, and the matrix product built from them.
The layers of a model belong in `kernels.layers`.
"""

import operator

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16  # numbers of a vector, float32

# options of numba; none of them changes a rounding
KERNEL = dict(boundscheck=False, error_model='numpy', nogil=True, cache=True)

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WHOLE = ir.VectorType(ir.IntType(32), LANES)


class _Lanes(types.Type):
    pass


_LANES = _Lanes('lanes')


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _FLOATS)


def _at(context, builder, signature, args):  # pointer to array.flat[place]
    kind = signature.args[0]
    fits = kind.dtype == types.float32 and kind.layout == 'C'
    if not fits:
        raise TypeError(f'lanes are read from a contiguous float32 array, not from {kind}')
    return builder.gep(context.make_array(kind)(context, builder, args[0]).data, [args[1]])


@intrinsic
def load(typing, array, place):
    "Lanes from array.flat[place] on."

    def build(context, builder, *how):
        return builder.load(
            builder.bitcast(_at(context, builder, *how), _FLOATS.as_pointer()), align=4
        )

    return _LANES(array, types.intp), build


@intrinsic
def store(typing, array, place, lanes):
    "Write lanes to array.flat[place] and behind."

    def build(context, builder, signature, args):
        at = builder.bitcast(_at(context, builder, signature, args), _FLOATS.as_pointer())
        builder.store(args[2], at, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _LANES), build


def _all(builder, x):  # lanes that are all x
    zeros = ir.Constant(_WHOLE, [0] * LANES)
    some = ir.Constant(_FLOATS, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(some, x, ir.Constant(ir.IntType(32), 0)), some, zeros
    )


@intrinsic
def every(typing, x):
    "Lanes that are all x, a float32."
    return _LANES(types.float32), lambda context, builder, signature, args: _all(builder, args[0])


@intrinsic
def spread(typing, array, place):
    "Lanes that are all array.flat[place]."

    def build(context, builder, *how):
        return _all(builder, builder.load(_at(context, builder, *how)))

    return _LANES(array, types.intp), build


@intrinsic
def fetch(typing, array, place):
    "Bring array.flat[place] to a near cache."

    def build(context, builder, *how):
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, *3 * [number]])
        near = builder.module.declare_intrinsic('llvm.prefetch', [byte], kind)
        builder.call(
            near,
            [builder.bitcast(_at(context, builder, *how), byte), number(0), number(2), number(1)],
        )
        return context.get_dummy_value()

    return types.void(array, types.intp), build


def _operator(symbol, name):
    @intrinsic
    def emit(typing, a, b):
        return _LANES(_LANES, _LANES), lambda context, builder, signature, args: getattr(
            builder, name
        )(*args)

    @overload(symbol)
    def lanes(a, b):
        if a == b == _LANES:
            return lambda a, b: emit(a, b)


for name in ('add', 'sub', 'mul', 'truediv'):
    _operator(getattr(operator, name), f'f{name.removeprefix("true")}')


def _llvm(name):  # what LLVM has under this name
    def build(context, builder, signature, args):
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(args))
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, f'llvm.{name}.v{LANES}f32'), args
        )

    return build


@intrinsic
def fma(typing, a, b, c):
    return _LANES(_LANES, _LANES, _LANES), _llvm('fma')


@intrinsic
def floor(typing, a):
    return _LANES(_LANES), _llvm('floor')


@intrinsic
def larger(typing, a, b):
    return _LANES(_LANES, _LANES), _llvm('maxnum')


@intrinsic
def smaller(typing, a, b):
    return _LANES(_LANES, _LANES), _llvm('minnum')


def panels(w):  # matrix [N, K] -> [N/16, K, 16], with zeros up to a whole panel
    "Weights as `product` reads them: sixteen outputs side by side."
    n, k = w.shape
    whole = np.zeros((-(-n // LANES) * LANES, k), np.float32)
    whole[:n] = w
    return whole.reshape(-1, LANES, k).transpose(0, 2, 1).copy()


@njit(**KERNEL)
def product(x, w, start, out):
    "out = start + x w; x [row, K], w of `panels`, start [row, N] or [1, N], out [row, N]. start may be out."
    n = len(x)
    K = x.shape[1]
    N = out.shape[1]
    step = start.shape[1] * (len(start) == len(x))
    for p in range(0, N, LANES):
        for i in range(0, n - n % 6, 6):
            s = i * step + p
            y = i * K
            z = i * N + p
            a = load(start, s)
            b = load(start, s + step)
            c = load(start, s + 2 * step)
            d = load(start, s + 3 * step)
            e = load(start, s + 4 * step)
            f = load(start, s + 5 * step)
            for k in range(K):
                v = load(w, p * K + k * LANES)
                a = fma(spread(x, y + k), v, a)
                b = fma(spread(x, y + K + k), v, b)
                c = fma(spread(x, y + 2 * K + k), v, c)
                d = fma(spread(x, y + 3 * K + k), v, d)
                e = fma(spread(x, y + 4 * K + k), v, e)
                f = fma(spread(x, y + 5 * K + k), v, f)
            for row, sums in enumerate((a, b, c, d, e, f)):
                store(out, z + row * N, sums)
        for i in range(n - n % 6, n):
            a = load(start, i * step + p)
            for k in range(K):
                a = fma(spread(x, i * K + k), load(w, p * K + k * LANES), a)
            store(out, i * N + p, a)


def linear(x, w, bias):  # x [row, K], `panels`, bias [1, N] -> [row, N]
    "A layer: the product of every row with the weights, on top of the bias. ValueError for rows of another length."
    if x.shape[1] != w.shape[1]:
        raise ValueError(f'rows of {x.shape[1]} numbers: these weights take {w.shape[1]}')
    out = np.empty((len(x), bias.shape[1]), np.float32)
    product(x, w, bias, out)
    return out


@njit(inline='always', **KERNEL)
def total(lanes, spare):  # spare [16]
    "The sum of lanes."
    store(spare, 0, lanes)
    for half in (8, 4, 2, 1):
        for j in range(half):
            spare[j] += spare[j + half]
    return spare[0]


@intrinsic
def _two_to(typing, a):  # of whole numbers from -126 to 127
    def build(context, builder, signature, args):
        bits = builder.add(builder.fptosi(args[0], _WHOLE), ir.Constant(_WHOLE, [127] * LANES))
        return builder.bitcast(builder.shl(bits, ir.Constant(_WHOLE, [23] * LANES)), _FLOATS)

    return _LANES(_LANES), build


_F = np.float32

_SERIES = tuple(map(_F, (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1, 1)))


@njit(inline='always', **KERNEL)
def exp(x):
    "The exponentials of lanes, of what lies between -87 and 87."
    y = larger(smaller(x, every(_F(87.0))), every(_F(-87.0))) * every(_F(1.4426950408889634))
    whole = floor(y + every(_F(0.5)))
    r = (y - whole) * every(_F(0.6931471805599453))
    p = every(_F(1 / 720))
    for c in _SERIES:
        p = fma(r, p, every(c))
    return p * _two_to(whole)


@njit(inline='always', **KERNEL)
def exponentials(x, first, n, scale, spare):  # x [whole vectors] and spare [16], float32
    "exp(scale*(x - max)) in place for n numbers from `first` on, zeros up to a whole vector; (max, sum)."
    end = first + -(-n // LANES) * LANES
    top = every(_F(-np.inf))
    mass = every(_F(0.0))
    for j in range(first + n, end):
        x[j] = _F(-np.inf)
    for j in range(first, end, LANES):
        top = larger(top, load(x, j))
    store(spare, 0, top)
    most = spare[0]
    for j in range(LANES):
        most = max(most, spare[j])
    for j in range(first, end, LANES):
        store(x, j, exp((load(x, j) - every(most)) * every(scale)))
    for j in range(first + n, end):
        x[j] = _F(0.0)
    for j in range(first, end, LANES):
        mass = mass + load(x, j)
    return most, total(mass, spare)
