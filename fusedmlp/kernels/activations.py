"""Activations and their derivatives for use inside kernels, in fp32, selected by name at compile time.

Every formula stays finite wherever PyTorch's is, and lets NaN through: comparisons are written so that NaN takes
the branch that keeps it, and sigmoids are built from ``exp`` of a value that may overflow to inf but never to NaN.
"""

import triton
import triton.language as tl

# Right of the tensors that they meet: the interpreter of Triton 3.9 makes no tensor of a constexpr times a tensor.
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_QUICK = tl.constexpr(1.702)
_SMALL = tl.constexpr(2.0**-32)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693145751953125)  # ln 2 to 16 bits, so that n * _LN2_HIGH is exact
_LN2_LOW = tl.constexpr(1.4286068203094173e-06)


@triton.jit
def _exp(x):
    """``exp(x)``. The hardware's 2^x rounds x / ln 2 first, which costs digits as |x| grows: fine for results of 16
    bits, while fp32 takes the whole power of two out exactly (Cody and Waite's reduction)."""
    x = tl.where(x > 100.0, 100.0, x)  # beyond these the result is inf or 0; NaN passes
    x = tl.where(x < -110.0, -110.0, x)
    n = tl.floor(x * _LOG2_E + 0.5)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    half = tl.floor(n * 0.5)  # 2^n in two factors, each in range where their product is not
    return tl.exp(r) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def _reciprocal(x):
    """One MUFU instruction, of maximum error 1 ulp (PTX ISA, rcp.approx.f32); a division takes ten."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp2(x):
    """One MUFU instruction, of maximum relative error 2^-22 (PTX ISA, ex2.approx.f32). Results under 2^-126 are 0, as
    for the reciprocal: callers scale, so that what they give is as small as eager's may be."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        y = _reciprocal(_exp2(x * -_LOG2_E - 32.0) + _SMALL) * _SMALL
    else:
        y = 1.0 / (1.0 + _exp(-x))
    return y


@triton.jit
def _normal(x, FAST: tl.constexpr):
    """Distribution and density of the standard normal distribution.

    FAST: the error function by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most, without branches, and with the
    exponential that the density needs too. Its instructions are a quarter of those of ``erf``, of which a kernel's
    epilogue holds one copy an element.
    """
    if FAST:
        e = _exp2(x * x * (-0.5 * _LOG2_E) + 32.0) * _SMALL
        t = _reciprocal(1.0 + tl.abs(x) * (0.3275911 * _SQRT_HALF))
        # Halved, since the distribution is half of 1 + erf; its tail beyond |x|:
        series = -0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
        tail = (t * (0.127414796 + t * series)) * e
        half = 0.5 - tail  # in this form, which needs the fewest registers
        cdf = 0.5 + tl.where(x < 0.0, -half, half)
    else:
        e = _exp(-0.5 * x * x)
        cdf = 0.5 + 0.5 * tl.erf(x * _SQRT_HALF)
    return cdf, e * _INV_SQRT_2PI


@triton.jit
def _tanh_approx(x):
    """One MUFU instruction; maximum relative error about 2^-11 (PTX ISA, tanh.approx.f32), for 16-bit results only."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _gelu_tanh_gate(x, x2, FAST_MATH: tl.constexpr):
    """``0.5 * (1 + tanh(z))``, z = x (b + a x^2), and twice z's derivative. x2: x^2, bounded by 256 so that the
    derivative stays finite: z saturates long before |x| = 16."""
    z = x * (x2 * (_SQRT_2_OVER_PI * _GELU_CUBIC) + _SQRT_2_OVER_PI)
    dz = x2 * (6.0 * _SQRT_2_OVER_PI * _GELU_CUBIC) + 2.0 * _SQRT_2_OVER_PI
    if FAST_MATH:
        gate = 0.5 + 0.5 * _tanh_approx(z)
    else:
        gate = _sigmoid(2.0 * z, FAST_MATH)
    return gate, dz


@triton.jit
def activate(x, ACT: tl.constexpr, FAST_MATH: tl.constexpr):
    """``act(x)``; x fp32."""
    if ACT == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
    elif ACT == "relu2":
        r = tl.where(x <= 0.0, 0.0, x)
        y = r * r
    elif ACT == "gelu":
        cdf, _ = _normal(x, FAST_MATH)
        y = x * cdf
    elif ACT == "gelu_tanh":
        c = tl.minimum(tl.maximum(x, -16.0), 16.0)  # without it the forward was no faster on an H200
        gate, _ = _gelu_tanh_gate(c, c * c, FAST_MATH)
        y = x * gate
    elif ACT == "silu":
        y = x * _sigmoid(x, FAST_MATH)
    elif ACT == "quick_gelu":
        y = x * _sigmoid(x * _QUICK, FAST_MATH)
    elif ACT == "sigmoid":
        y = _sigmoid(x, FAST_MATH)
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        y = x
    return y


@triton.jit
def activate_grad(x, ACT: tl.constexpr, FAST_MATH: tl.constexpr):
    """``(act(x), act'(x))``; x fp32, the input of the activation."""
    if ACT == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
        d = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "relu2":
        r = tl.where(x <= 0.0, 0.0, x)
        y = r * r
        d = 2.0 * r
    elif ACT == "gelu":
        cdf, density = _normal(x, FAST_MATH)
        y = x * cdf
        d = cdf + x * density
    elif ACT == "gelu_tanh":
        gate, dz = _gelu_tanh_gate(x, tl.minimum(x * x, 256.0), FAST_MATH)
        y = x * gate
        d = gate + (y * (1.0 - gate)) * dz
    elif ACT == "silu":
        s = _sigmoid(x, FAST_MATH)
        y = x * s
        d = s * (1.0 + x * (1.0 - s))
    elif ACT == "quick_gelu":
        s = _sigmoid(x * _QUICK, FAST_MATH)
        y = x * s
        d = s + (y * (1.0 - s)) * _QUICK
    elif ACT == "sigmoid":
        y = _sigmoid(x, FAST_MATH)
        d = y * (1.0 - y)
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        y = x
        d = tl.where(x <= 0.0, 1.0, 1.0)  # ones in x's layout, which Gluon would ask tl.full for
    return y, d


@triton.jit
def times_derivative(grad, d, ACT: tl.constexpr):
    """``grad * d``; for the ReLUs a zero derivative gives zero even where ``grad`` is infinite, as PyTorch's does."""
    g = grad * d
    if ACT == "relu" or ACT == "relu2":
        g = tl.where(d == 0.0, 0.0, g)
    return g


@triton.jit
def grad_from_output(grad, y, ACT: tl.constexpr):
    """``grad * act'`` computed from the activated value ``y``, for activations that save their output."""
    if ACT == "relu":
        g = tl.where(y <= 0.0, 0.0, grad)
    elif ACT == "sigmoid":
        g = grad * (y * (1.0 - y))
    else:
        tl.static_assert(ACT == "identity", "this activation's derivative needs its input")
        g = grad
    return g


@triton.jit
def grad_through(grad, saved, ACT: tl.constexpr, SAVES_OUTPUT: tl.constexpr, FAST_MATH: tl.constexpr):
    """``(grad * act', act value)`` from whichever tensor the activation saves."""
    if SAVES_OUTPUT:
        g = grad_from_output(grad, saved, ACT)
        y = saved
    else:
        y, d = activate_grad(saved, ACT, FAST_MATH)
        g = times_derivative(grad, d, ACT)
    return g, y
