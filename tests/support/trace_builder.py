"""Traces written by hand, event by event, in the form in which torch.profiler writes those of a CUDA device."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
SPLIT = (
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasLt::cublasSplitKParams<float>)"
)
_BF16 = "c10::BFloat16"


def elementwise(functor: str) -> str:
    return f"void at::native::vectorized_elementwise_kernel<8, {functor}, std::array<char*, 2ul> >(int, {functor})"


GELU = elementwise(
    "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#1}::operator()() const"
    "::{lambda()#4}::operator()() const::{lambda(c10::BFloat16)#1}"
)
GELU_BACKWARD = elementwise(
    "at::native::GeluBackwardCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#1}::operator()() "
    "const::{lambda()#4}::operator()() const::{lambda(c10::BFloat16, c10::BFloat16)#1}"
)
RELU = elementwise(
    "at::native::(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar, "
    "at::native::detail::ClampLimits)::{lambda()#1}::operator()() const::{lambda(c10::BFloat16)#1}"
)
MUL = elementwise(
    "at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, "
    "at::native::binary_internal::MulFunctor<float> >"
)
ADD = elementwise("at::native::CUDAFunctor_add<c10::BFloat16>")
SUM = (
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::func_wrapper_t<"
    "c10::BFloat16, at::native::sum_functor<c10::BFloat16, float, c10::BFloat16>::operator()(at::TensorIterator&)> > >"
    "(x)"
)


class TraceBuilder:
    """A host clock and a device clock, in microseconds; every call of launch() moves both on."""

    def __init__(self, shapes: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.device_free = 1000.0, 0.0
        self._shapes, self._id, self._steps = shapes, 0, 0
        self._open: list[int] = []

    def _add(self, category: str, name: str, start: float, duration: float, tid: Any, **args: Any) -> dict[str, Any]:
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration}
        self.events.append(event | {"args": args})
        return self.events[-1]

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps += 1
        start = self.now
        yield
        self.now += 1
        self._add("user_annotation", f"ProfilerStep#{self._steps}", start, self.now - start, 7)

    @contextmanager
    def op(self, name: str, *dims: list[int], cost: float = 2.0, dtype: str = _BF16) -> Iterator[None]:
        self._id += 1
        external, start = self._id, self.now
        self._open.append(external)
        self.now += cost
        yield
        self._open.pop()
        self.now += 0.5
        args: dict[str, Any] = {"External id": external}
        if self._shapes and dims:
            args |= {"Input Dims": list(dims), "Input type": [dtype] * len(dims)}
        self._add("cpu_op", name, start, self.now - start, 7, **args)

    def launch(self, kernel: str, us: float = 3.0, stream: int = 7, call: str = "cudaLaunchKernel") -> None:
        """One call and its kernel, or the copy that a name like "Memcpy DtoD" says it is."""
        self._id += 1
        correlation = self._id
        external = {"External id": self._open[-1]} if self._open else {}
        self._add("cuda_runtime", call, self.now, 4.0, 7, correlation=correlation, cbid=211, **external)
        self.now += 4.0
        self._device(kernel, us, stream, correlation, external)

    def graph(self, *kernels: str, us: float = 3.0) -> None:
        """One launch of a CUDA graph with these kernels."""
        self._id += 1
        self._add("cuda_runtime", "cudaGraphLaunch", self.now, 8.0, 7, correlation=self._id)
        self.now += 8.0
        for i, kernel in enumerate(kernels):
            self._device(kernel, us, 7, self._id, {"graph id": 1, "graph node id": i + 1})

    def _device(self, name: str, us: float, stream: int, correlation: int, more: dict[str, Any]) -> None:
        category = (
            "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
        )
        start = max(self.now + 2.0, self.device_free)
        self.device_free = start + us
        args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation} | more
        args |= {"grid": [132, 1, 1], "block": [384, 1, 1]} if category == "kernel" else {"bytes": 1 << 20}
        event = self._add(category, name, start, us, stream, **args)
        event["pid"] = 0

    def synchronize(self) -> None:
        """The host waits until the device is done."""
        end = max(self.now + 1.0, self.device_free)
        self._add("cuda_runtime", "cudaDeviceSynchronize", self.now, end - self.now, 7)
        self.now = end + 1.0

    def content(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        text = json.dumps(self.content())
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path


M, D, H = 8192, 768, 3072


def product(t: TraceBuilder, m: int, k: int, n: int, kernel: str = GEMM, us: float = 30.0) -> None:
    with t.op("aten::mm", [m, k], [k, n]):
        t.launch(kernel, us, call="cudaLaunchKernelExC")


def linear(t: TraceBuilder, m: int, k: int, n: int, bias: bool = False, us: float = 30.0) -> None:
    with t.op("aten::linear", [m, k], [n, k]):
        if bias:
            with t.op("aten::addmm", [n], [m, k], [k, n]):
                t.launch(GEMM, us)
        else:
            product(t, m, k, n, us=us)


def geglu_forward(t: TraceBuilder) -> None:
    """down(gelu(gate(x)) * up(x)) as eager PyTorch runs it: five kernels."""
    linear(t, M, D, H)
    with t.op("aten::gelu", [M, H]):
        t.launch(GELU, 10.0)
    linear(t, M, D, H)
    with t.op("aten::mul", [M, H], [M, H]):
        t.launch(MUL, 15.0)
    linear(t, M, H, D)


def geglu_backward(t: TraceBuilder) -> None:
    """Ten kernels in the order in which autograd runs them."""
    with t.op("autograd::engine::evaluate_function: MmBackward0"):
        product(t, D, M, H)
        product(t, M, D, H)
    with t.op("autograd::engine::evaluate_function: MulBackward0"):
        for _ in range(2):
            with t.op("aten::mul", [M, H], [M, H]):
                t.launch(MUL, 15.0)
    with t.op("autograd::engine::evaluate_function: MmBackward0"):
        product(t, H, M, D)
        product(t, M, H, D)
    with t.op("autograd::engine::evaluate_function: GeluBackward0"):
        with t.op("aten::gelu_backward", [M, H], [M, H]):
            t.launch(GELU_BACKWARD, 15.0)
    with t.op("autograd::engine::evaluate_function: MmBackward0"):
        product(t, H, M, D)
        product(t, M, H, D)
        with t.op("aten::add_", [M, D], [M, D]):
            t.launch(ADD, 5.0)
