"""`kernels benchmark`: forward and backward of the layers, compared with PyTorch's operations and timed beside them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# On a GPU the layer of a small language model; elsewhere one that a CPU does in no time.
SIZES = {"cuda": (8192, 768, 3072)}
SMALL = (64, 96, 160)


def eager_glu(mlp: Any, x: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


class FusedMLPBenchmark(Benchmark):
    seed = 0

    def prepare(self, layer: str) -> None:
        # A PyTorch for GPUs may be on a machine without one.
        device = self.device if torch.cuda.is_available() or self.device != "cuda" else "cpu"
        tokens, hidden, intermediate = SIZES.get(device, SMALL)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.mlp = getattr(self.kernel.layers, layer)(hidden, intermediate, device=device, dtype=dtype)
        # Results below 2: the runner allows a difference of 0.01, and bfloat16 has steps of 0.016 above that.
        self.x = torch.randn(tokens, hidden, device=device, dtype=dtype) / 2

    def setup_geglu(self) -> None:
        self.prepare("FusedGeGLUMLP")

    @torch.no_grad()
    def benchmark_geglu(self) -> None:
        self.out = self.mlp(self.x)

    @torch.no_grad()
    def verify_geglu(self) -> torch.Tensor:
        return eager_glu(self.mlp, self.x, gelu_tanh)

    def setup_swiglu(self) -> None:
        self.prepare("FusedSwiGLUMLP")

    @torch.no_grad()
    def benchmark_swiglu(self) -> None:
        self.out = self.mlp(self.x)

    @torch.no_grad()
    def verify_swiglu(self) -> torch.Tensor:
        return eager_glu(self.mlp, self.x, F.silu)

    def setup_linear_relu(self) -> None:
        self.prepare("FusedLinearReLU")

    @torch.no_grad()
    def benchmark_linear_relu(self) -> None:
        self.out = self.mlp(self.x)

    @torch.no_grad()
    def verify_linear_relu(self) -> torch.Tensor:
        return F.relu(F.linear(self.x, self.mlp.weight, self.mlp.bias))

    def setup_geglu_step(self) -> None:
        """Forward and the backward to the input and to every weight; what is compared is the input's gradient."""
        self.prepare("FusedGeGLUMLP")
        self.leaf = self.x.requires_grad_()
        self.wanted = [self.leaf, *self.mlp.parameters()]

    def step(self, y: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, self.wanted, torch.ones_like(y) / 16)[0]

    def benchmark_geglu_step(self) -> None:
        self.out = self.step(self.mlp(self.leaf))

    def verify_geglu_step(self) -> torch.Tensor:
        return self.step(eager_glu(self.mlp, self.leaf, gelu_tanh))
