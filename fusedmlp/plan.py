"""Which way a call goes, decided once for each kind of call and kept: a :class:`Plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import settings
from .activations import Activation
from .checks import check_call, constant_while_compiling
from .operations import OPERATIONS
from .settings import Settings
from .settings.device import info
from .settings.heuristic import dx_apart
from .settings.tables import Row
from .settings.types import ALONE, PRODUCTS

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
MAX_PLANS = 512  # a plan a token count, some 30 KiB each: a run of free-running lengths must not grow without end


# cuBLAS splits the sum of a product A^T B of 16 bits over so many slices, of at least so many tokens, where the result
# is up to so large; seen on an H200 (bench/last_token.py): 16, 1280, and 3072 x 768 but not 2048 x 2048.
MAX_SPLITS, MIN_SPLIT_TOKENS, MAX_SPLIT_WEIGHT = 16, 1024, 2048 * 2048


def left_out(tokens: int) -> bool:
    """Whether cuBLAS (of CUDA 13.0 at least) may leave the last tokens out of a weight gradient.

    Of sums that it splits over s slices it takes the first s times floor(tokens / s), where floor(tokens / s) is a
    multiple of its tile of 64. bench/last_token.py shows it. No multiple of 64 is such a count.
    """
    slices = range(2, min(MAX_SPLITS, tokens // MIN_SPLIT_TOKENS) + 1)
    return any(tokens // s % 64 == 0 and tokens % s for s in slices)


@dataclass
class Plan:
    """What a kind of call needs, the same for every call with its key.

    Attributes:
        op: the operation.
        activation: the activation.
        M: tokens. widths: the widths in order of the layers, input first.
        precision: ``"ieee"`` or ``"tf32"``, of fp32 products.
        eager_reason: why PyTorch's own operations run instead, or None.
        settings: the settings of each kernel, by the name the operation gives it.
        asked: what each of those kernels was asked for: op, N, K, and whether TMA can describe its operands.
        launches: prepared launches, filled as they are first needed.
        device_index: of the CUDA device, None under the interpreter.
    """

    op: str
    activation: Activation
    M: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    precision: str
    aligned: bool
    eager_reason: str | None = None
    settings: dict[str, Settings] = field(default_factory=dict)
    asked: dict[str, tuple[str, int, int, bool]] = field(default_factory=dict)
    launches: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device_index: int | None = self.device.index if self.device.type == "cuda" else None
        # Triton's interpreter computes every fp32 product in full.
        self.dot_precision = "tf32" if self.precision == "tf32" and self.device_index is not None else "ieee"
        self.launchers: Any = None  # the package, imported for the first plan that needs it, since it needs Triton
        self.calls: dict[str, int] = {}  # that went the long way, by their kind; to write one of them down (steady.py)
        self.attempts = 0
        self.rows = False  # x is a [M, K] that every kernel can read where it lies
        self.biased: tuple[bool, ...] = ()  # whether each layer has a bias
        self.packed = True  # no weight has room between its rows
        self.pairs = False  # gate and up have one row stride, so that one descriptor may span them
        # Approximate tanh and exp where the result is rounded to 16 bits; the interpreter has no inline assembly.
        self.fast_math = self.device_index is not None and self.dtype != torch.float32

    def kept(self, save: int, needs: Sequence[bool]) -> int:
        """The level of :mod:`fusedmlp.saving` that a forward keeps of the one asked for; ``needs``: which of x, weights
        and biases need gradients."""
        return min(save, OPERATIONS[self.op].keeps(needs))  # type: ignore[no-any-return]

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def choose(self, name: str, op: str, N: int, K: int, tma: bool = True) -> None:
        """Calculate the settings of one kernel."""
        tma = tma and self.aligned
        self.settings[name] = settings.calculate_settings(
            op, self.M, N, K, self.dtype, self.device, precision=self.precision, tma=tma
        )
        self.asked[name] = (op, N, K, tma)

    def is_product(self, name: str) -> bool:
        """Whether a kernel is a product alone."""
        return self.asked[name][0] in PRODUCTS

    def is_alone(self, name: str) -> bool:
        """Whether cuBLAS in the place of a kernel is one launch too: of a product, or one with ReLU in its epilogue."""
        return self.asked[name][0] in ALONE

    def layer_op(self, layer: int = 0) -> str:
        """The op of a layer that ends in the activation: ``"linear_relu"`` where cuBLAS has bias and ReLU in an
        epilogue that keeps NaN as PyTorch does, which was seen of its kernels for Hopper."""
        relu = self.activation.name == "relu" and self.biased[layer]
        hopper = self.device.type != "cpu" and info(self.device).has_wgmma and hasattr(torch, "_addmm_activation")
        return "linear_relu" if relu and hopper and self.aligned and self.dtype != torch.float32 else "linear_act"

    def by_cublas(self, name: str) -> bool:
        """Whether a kernel with an activation is one launch of cuBLAS."""
        return self.asked[name][0] == "linear_relu" and self.settings[name].family == "pair"

    def last_tokens(self, N: int, K: int) -> int:
        """How many tokens at the end a weight gradient [N, K] by cuBLAS takes in a product of their own: 0 for most
        token counts, see :func:`left_out`."""
        splits = self.device.type != "cpu" and self.dtype != torch.float32 and N * K <= MAX_SPLIT_WEIGHT
        return self.M % 64 if splits and left_out(self.M) else 0

    def measured(self, name: str) -> Row | None:
        """The row of a settings table that one kernel's settings come from; None where none of a table's do."""
        if name not in self.asked:
            return None
        op, N, K, tma = self.asked[name]
        at = (op, self.M, N, K, self.dtype, self.device)
        return settings.measured_row(self.settings[name], *at, precision=self.precision, tma=tma)


_plans: dict[Any, Plan] = {}
on_clear: list[Callable[[], None]] = []  # what else depends on plans


def fp32_precision() -> str:
    """``"ieee"`` or ``"tf32"``: what PyTorch's own fp32 products on CUDA do at this moment."""
    try:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    except RuntimeError:  # set through the newer per-backend interface, which the older getter refuses to read
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def find(
    op: str, activation: Activation, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Plan:
    """The plan of a call; x of any rank, weights [out, in] in layer order (gate, up, down for the gated MLP).

    Everything that a prepared launch depends on is in the key, and everything that the checks look at: they run once
    a key.

    Raises:
        TypeError, RuntimeError: what was passed in does not fit together, see :mod:`fusedmlp.checks`.
    """
    precision = fp32_precision() if x.dtype is torch.float32 else ""
    looks: list[Any] = [op, activation.name, len(weights), precision, settings.overridden()]
    for t in (x, *weights, *biases):
        looks += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
    key = tuple(looks)
    plan = _plans.get(key)
    if plan is None:
        check_call(OPERATIONS[op], x, weights, biases)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _make(op, activation, x, weights, biases, precision)
    return plan


def clear() -> None:
    """Forget every plan."""
    _plans.clear()
    for also in on_clear:
        also()


def _make(
    op: str,
    activation: Activation,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    precision: str,
) -> Plan:
    K = x.shape[-1]
    M = x.numel() // K if K else 0
    widths = (K, *(w.shape[0] for w in weights))
    device = x.device
    plan = Plan(op, activation, M, widths, x.dtype, device, precision, _aligned(x, weights))
    plan.rows = x.dim() == 2 and x.is_contiguous() and x.data_ptr() % 16 == 0
    plan.packed = all(w.stride(0) == w.shape[1] or w.shape[0] <= 1 for w in weights if w.dim() == 2)
    plan.pairs = op == "glu_mlp" and weights[0].stride() == weights[1].stride()
    plan.biased = tuple(b is not None for b in biases)
    plan.eager_reason = why_eager(x, M, weights, biases)
    if op == "linear_act" and activation.name == "identity" and plan.eager_reason is None:
        plan.eager_reason = "a linear layer alone is one launch of cuBLAS already"
    if plan.eager_reason is None:
        from . import launchers

        plan.launchers = launchers
        _CHOOSE[op](plan)
        pair = op == "linear_act" and plan.settings["forward"].family == "pair"
        if pair and not plan.by_cublas("forward") and not _pair_is_forced():
            plan.eager_reason = "cuBLAS is the fastest here, and beside it PyTorch's activation is no launch more"
    return plan


def _pair_is_forced() -> bool:
    return settings.forced("linear_act").get("family") == "pair"


def why_eager(x: Tensor, M: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> str | None:
    """Why the kernels cannot serve these tensors, or None."""
    if x.device.type != "cuda" and not (x.device.type == "cpu" and interpreting()):
        return f"the tensors are on {x.device}; the kernels run on CUDA devices"
    if x.device.type == "cuda" and torch.version.hip is not None:
        return "an AMD GPU; the kernels run on NVIDIA's"
    if x.device.type == "cuda" and interpreting():
        return "Triton's interpreter runs on CPU tensors"
    if x.dtype not in KERNEL_DTYPES:
        return f"{x.dtype}: the kernels take float32, bfloat16 and float16"
    if M == 0 or 0 in x.shape or any(0 in w.shape for w in weights):
        return "an empty batch or a width of zero: nothing to fuse"
    if x.device.type == "cuda" and info(x.device).capability < MIN_CAPABILITY:
        major, minor = info(x.device).capability
        return f"compute capability {major}.{minor}; the kernels need {MIN_CAPABILITY[0]}.0 or newer"
    if any(w.stride(1) != 1 and w.shape[1] != 1 or w.stride(0) < w.shape[1] for w in weights):
        return "a weight is not stored row by row"
    if any(b is not None and b.stride(0) != 1 and b.shape[0] != 1 for b in biases):
        return "a bias is not contiguous"
    if not _has_triton():
        return "Triton is not installed"
    return None


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@constant_while_compiling
def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    if not _has_triton():
        return False
    from . import launch

    return launch.interpreting()


def _aligned(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether TMA descriptors can describe every operand: base and row strides multiples of 16 bytes.

    x is copied to fresh, aligned memory if its rows cannot be read where they are; its width decides then.
    """
    size = x.element_size()
    if any(w.data_ptr() % 16 or w.stride(0) * size % 16 for w in weights):
        return False
    if any(w.shape[0] * size % 16 for w in weights) or x.shape[-1] * size % 16:
        return False
    return True


def _choose_linear_act(plan: Plan) -> None:
    K, N = plan.widths
    plan.choose("forward", plan.layer_op(), N, K)


def _choose_glu_mlp(plan: Plan) -> None:
    D, H, _, D_out = plan.widths
    plan.choose("forward", "glu", H, D)
    plan.choose("down", "down", D_out, H)
    plan.choose("backward", "glu_backward", H, D_out)
    plan.choose("wgrads", "glu_weight_grads", H, D)
    plan.choose("dgrad", "dual_dgrad", D, H)
    _choose_grads(plan, "glu_grads", H, D)
    # For gate and up weights that one descriptor cannot span, which only their addresses tell.
    plan.choose("forward.apart", "glu", H, D, tma=False)
    plan.choose("dgrad.apart", "dual_dgrad", D, H, tma=False)


def _choose_mlp(plan: Plan) -> None:
    D, H, D_out = plan.widths
    plan.choose("forward", plan.layer_op(), H, D)
    plan.choose("down", "down", D_out, H)
    plan.choose("backward", "act_backward", H, D_out)
    # One descriptor for each half of the hidden layer.
    halves = H * plan.dtype.itemsize % 32 == 0
    plan.choose("wgrads", "mlp_weight_grads", H, D, tma=halves)
    plan.choose("dgrad", "dgrad", D, H)
    _choose_grads(plan, "mlp_grads", H, D, tma=halves)


def _choose_grads(plan: Plan, op: str, H: int, D: int, tma: bool = True) -> None:
    """The launch for all products, which dX stays out of where it has a kernel for small batches and few tokens."""
    plan.choose("grads", op, H, D, tma)
    few = plan.settings["dgrad"].family == "small" and plan.settings["wgrads"].family == "gluon"
    if few and dx_apart(op, plan.M, H * D) and "family" not in settings.forced(op) and plan.measured("grads") is None:
        plan.settings["grads"] = Settings("pair")


def _choose_relu_mlp(plan: Plan) -> None:
    if plan.packed and stack_fits(plan):
        plan.choose("stack", "relu_stack", max(plan.widths[1:]), max(plan.widths))
    for i, (K, N) in enumerate(zip(plan.widths, plan.widths[1:])):
        plan.choose(f"forward.{i}", plan.layer_op(i), N, K)
        if i:
            plan.choose(f"backward.{i}", "act_backward", K, N)


def stack_fits(plan: Plan) -> bool:
    """Whether one launch serves a whole ReLU stack: 2 to 4 layers whose 32 x 32 tiles fit on the device at once.

    More tiles than multiprocessors would make each layer wait for a second round behind the barrier, where separate
    launches with large tiles are faster.
    """
    layers = len(plan.widths) - 1
    if not 2 <= layers <= 4 or plan.M > 256:
        return False
    if plan.dtype == torch.float32 and plan.precision == "ieee" and plan.device_index is not None:
        return False
    if plan.device_index is None:
        return True
    tiles = -(-plan.M // 32) * max(-(-n // 32) for n in plan.widths[1:])
    return tiles <= info(plan.device).sms


_CHOOSE = {
    "linear_act": _choose_linear_act,
    "glu_mlp": _choose_glu_mlp,
    "mlp": _choose_mlp,
    "relu_mlp": _choose_relu_mlp,
}
