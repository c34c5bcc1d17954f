"""Modules are read by several threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor, nn

import fusedmlp


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(16, 24), nn.Linear(24, 7), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.last(self.act(self.first(x))))


def test_threads_may_read_modules_at_once() -> None:
    """torch.fx, which reads the forward, replaces nn.Module.__call__ for all threads meanwhile."""
    modules = [Stack() for _ in range(8)]
    begin = threading.Barrier(len(modules))

    def read(module: nn.Module) -> str:
        begin.wait()
        kinds = {type(fusedmlp.FusedReLUMLP.from_module(module)).__name__ for _ in range(5)}
        return ", ".join(kinds)

    with ThreadPoolExecutor(len(modules)) as pool:
        assert set(pool.map(read, modules)) == {"FusedReLUMLP"}
