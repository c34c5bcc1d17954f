"""What is kept for backward, counted through saved-tensor hooks; for devices on which the kernels run."""

from __future__ import annotations

import pytest
import torch

import fusedmlp

from .autograd_suite import call, leaves_of, requiring
from .cases import DTYPES
from .fault_suite import SMALL
from .operations import OPERATIONS, WAYS

ROWS = 64


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
    @pytest.mark.parametrize("op, options", list(WAYS.values()), ids=list(WAYS))
    def test_promised_bytes(self, device, op, options, dtype):
        """Gated: x and 2H a token, 3H with the activation. Two-layer: x and H. With recompute: x alone. Linear + act:
        x and its N."""
        widths = SMALL[op]
        hidden = {
            "linear_act": widths[1],
            "glu_mlp": (3 if options.get("keep_activation") else 2) * widths[1],
            "mlp": widths[1],
            "relu_mlp": sum(widths[1:]),
        }[op]
        if options.get("recompute"):
            hidden = 0
        leaves = requiring(leaves_of(op, dtype, device, rows=ROWS))
        promised = ROWS * (widths[0] + hidden) * leaves["x"].element_size()
        kept = saved_bytes(op, leaves, device, **options)
        at_least = promised if op == "glu_mlp" else ROWS * widths[0] * leaves["x"].element_size()
        assert at_least <= kept <= promised, f"{kept} bytes kept, promised {promised}"

    @pytest.mark.parametrize("frozen", ["down_weight", "all weights"])
    def test_the_activation_is_kept_for_the_gradient_of_down_alone(self, device, frozen):
        leaves = requiring(leaves_of("glu_mlp", torch.float32, device, rows=ROWS))
        for name, leaf in leaves.items():
            leaf.requires_grad_(not (name.endswith("_weight") if frozen == "all weights" else name == frozen))
        expected = saved_bytes("glu_mlp", leaves, device)
        assert saved_bytes("glu_mlp", leaves, device, keep_activation=True) == expected > 0

    @pytest.mark.parametrize("op", list(OPERATIONS))
    def test_inference_keeps_nothing(self, device, op):
        leaves = leaves_of(op, torch.float32, device, rows=ROWS)
        assert saved_bytes(op, leaves, device) == 0, "nothing requires a gradient, yet something was saved"
        with torch.no_grad():
            assert saved_bytes(op, requiring(leaves), device) == 0

    @pytest.mark.parametrize("frozen", [False, True])
    def test_what_a_compiled_layer_keeps(self, device, frozen):
        """Beside x and the weights gate and up, and the activation, which is asked for, where down is trained."""
        torch._dynamo.reset()
        layer = fusedmlp.FusedGeGLUMLP(96, 160, keep_activation=True).to(device)
        layer.down_proj.requires_grad_(not frozen)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(ROWS, 96, device=device, requires_grad=True)
        kept: list[tuple[int, ...]] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            kept.append(tuple(t.shape))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            compiled(x)
        assert (ROWS, 320) in kept
        assert ((ROWS, 160) in kept) is not frozen
