"""What is kept for backward, counted through saved-tensor hooks; for devices on which the kernels run."""

from __future__ import annotations

import pytest
import torch

import fusedmlp

from .autograd_suite import call, leaves_of, requiring
from .cases import DTYPES
from .fault_suite import SMALL
from .operations import OPERATIONS

ROWS = 64
WAYS = [(name, recompute) for name, op in OPERATIONS.items() for recompute in sorted({False, op.recomputes})]


def saved_bytes(op: str, leaves, device, **options) -> int:
    """Bytes of the distinct storages that autograd keeps, parameters excluded."""
    owned = {t.untyped_storage().data_ptr() for name, t in leaves.items() if name != "x" and t is not None}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(op, leaves, **options)
    del y
    return sum(kept.values())


class SavedMemorySuite:
    @pytest.mark.parametrize("op", list(OPERATIONS))
    def test_the_kernels_run(self, device, op):
        """The suites would pass on PyTorch's operations as well: here a call has to be a fused one."""
        leaves = requiring(leaves_of(op, torch.float32, device))
        explanation = fusedmlp.explain_plan(lambda: call(op, leaves))
        assert [(note.op, note.path) for note in explanation.notes] == [(op, "fused")], str(explanation)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("op, recompute", WAYS)
    def test_promised_bytes(self, device, op, recompute, dtype):
        """Gated: x and 2H a token. Two-layer: x and H. With recompute: x alone. Linear + act: x and its N."""
        widths = SMALL[op]
        hidden = {
            "linear_act": widths[1],
            "glu_mlp": 0 if recompute else 2 * widths[1],
            "mlp": 0 if recompute else widths[1],
            "relu_mlp": sum(widths[1:]),
        }[op]
        leaves = requiring(leaves_of(op, dtype, device, rows=ROWS))
        options = {"recompute": recompute} if OPERATIONS[op].recomputes else {}
        promised = ROWS * (widths[0] + hidden) * leaves["x"].element_size()
        kept = saved_bytes(op, leaves, device, **options)
        at_least = ROWS * widths[0] * leaves["x"].element_size()
        assert at_least <= kept <= promised, f"{kept} bytes kept, promised {promised}"

    @pytest.mark.parametrize("op", list(OPERATIONS))
    def test_inference_keeps_nothing(self, device, op):
        leaves = leaves_of(op, torch.float32, device, rows=ROWS)
        assert saved_bytes(op, leaves, device) == 0, "nothing requires a gradient, yet something was saved"
        with torch.no_grad():
            assert saved_bytes(op, requiring(leaves), device) == 0
