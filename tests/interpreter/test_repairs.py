"""The repaired interpreter computes bfloat16 as PyTorch does."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.interpreter import bf16_to_f32, f32_to_bf16, repair

repair()


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    offsets = rows * N + columns
    tl.store(out + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets)))


@triton.jit
def cast_kernel(source, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.load(source + offsets).to(out.dtype.element_ty))


@triton.jit
def arithmetic_kernel(a, b, added, multiplied, subtracted, divided, larger, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(a + offsets), tl.load(b + offsets)
    tl.store(added + offsets, x + y)
    tl.store(multiplied + offsets, x * y)
    tl.store(subtracted + offsets, x - y)
    tl.store(divided + offsets, x / y)
    tl.store(larger + offsets, (x > y).to(tl.int32))


@triton.jit
def abs_kernel(source, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.abs(tl.load(source + offsets)))


@triton.jit
def loop_kernel(source, out, count):
    total = tl.zeros((1,), tl.float32)
    for step in range(count):
        total += tl.load(source + step + tl.arange(0, 1))
    tl.store(out + tl.arange(0, 1), total)


@triton.jit
def barrier_kernel(counter):
    tl.atomic_add(counter, 1)
    while tl.atomic_add(counter, 0) < tl.num_programs(0):
        pass


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_dot_of_bf16_matches_torch():
    torch.manual_seed(0)
    a, b, out = bf16(32, 32), bf16(32, 32), torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64, torch.int32], ids=str)
def test_cast_to_bf16_rounds_as_torch(source):
    torch.manual_seed(0)
    values = (torch.randn(1024) * 300).to(source)
    out = torch.empty(1024, dtype=torch.bfloat16)
    cast_kernel[(1,)](values, out, 1024)
    # One rounding step from float64 is not representable through float32 in rare ties; these values hold
    # none.
    torch.testing.assert_close(out, values.to(torch.float32).to(torch.bfloat16), rtol=0, atol=0)


def test_ties_round_to_even_and_specials_survive():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000], dtype=np.uint32)
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert f32_to_bf16(values).tolist() == expected.tolist()
    assert np.isnan(bf16_to_f32(f32_to_bf16(np.array([np.nan, -np.nan], dtype=np.float32)))).all()


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.float64, torch.int32], ids=str)
def test_cast_from_bf16_converts_the_value(target):
    torch.manual_seed(0)
    values = (torch.randn(512) * 50).to(torch.bfloat16)
    out = torch.empty(512, dtype=target)
    cast_kernel[(1,)](values, out, 512)
    torch.testing.assert_close(out, values.to(target), rtol=0, atol=0)


def test_bf16_arithmetic_matches_torch():
    torch.manual_seed(0)
    a, b = bf16(512), bf16(512)
    results = [torch.empty(512, dtype=torch.bfloat16) for _ in range(4)]
    larger = torch.empty(512, dtype=torch.int32)
    arithmetic_kernel[(1,)](a, b, *results, larger, 512)
    added, multiplied, subtracted, divided = results
    torch.testing.assert_close(added, a + b, rtol=0, atol=0)
    torch.testing.assert_close(multiplied, a * b, rtol=0, atol=0)
    torch.testing.assert_close(subtracted, a - b, rtol=0, atol=0)
    # Triton divides bfloat16 in float32 on a GPU; the quotient may differ from torch by one last bit at most.
    torch.testing.assert_close(divided.float(), (a.float() / b.float()), rtol=2**-7, atol=0)
    assert torch.equal(larger.bool(), a > b)


def test_unary_operation_on_bf16():
    torch.manual_seed(0)
    a, out = bf16(256), torch.empty(256, dtype=torch.bfloat16)
    abs_kernel[(1,)](a, out, 256)
    assert torch.equal(out, a.abs())


def test_loop_over_a_run_time_count():
    values, out = torch.arange(7, dtype=torch.float32), torch.empty(1)
    loop_kernel[(1,)](values, out, 7)
    assert out.item() == 21.0


def test_a_grid_barrier_of_several_programs_is_an_error():
    barrier_kernel[(1,)](torch.zeros(1, dtype=torch.int32))
    with pytest.raises(Exception, match="waits for programs"):
        barrier_kernel[(2,)](torch.zeros(1, dtype=torch.int32))
