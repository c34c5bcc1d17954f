"""The kernels of a step as a row of tokens, one character each, in which patterns of MLPs can be looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..names import KernelName, decode
from .model import Op, Work

ACTIVATIONS = {"relu", "gelu", "silu", "sigmoid", "tanh", "leaky_relu", "hardswish", "quick_gelu", "gelu_tanh", "relu2"}
BACKWARDS = {f"{name}_backward" for name in ACTIVATIONS} | {"threshold_backward"}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear"}

# Characters: G product, R ReLU, A another activation, M multiplication, C activation and multiplication in one kernel,
# B an activation's gradient, D that and multiplication in one kernel, S sum over rows, P addition, x anything else.
GEMM, RELU, ACT, MUL, ACT_MUL, GRAD, GRAD_MUL, SUM, ADD, OTHER = "GRAMCBDSPx"


@dataclass(frozen=True)
class Token:
    """Some kernels of a step that count as one thing.

    activation: its name, where there is one. numel: elements of the result, or of the input of an elementwise
    operation; 0 where the trace does not tell. dims: (M, N, K) of a product. itemsize: bytes of an element.
    """

    char: str
    work: tuple[Work, ...]
    activation: str = ""
    numel: int = 0
    dims: tuple[int, int, int] | None = None
    itemsize: int = 0
    backward: bool = False


def tokens(work: Sequence[Work]) -> list[Token]:
    """Tokens of the kernels of one step, in the order in which they were launched. Casts, copies, fills and the
    reductions of split products are part of no pattern and stand in no one's way: they are left out."""
    ordered = sorted(
        (w for w in work if w.kind == "kernel"), key=lambda w: (w.call.start if w.call else w.start, w.start)
    )
    found: list[Token] = []
    for w in ordered:
        name = decode(w.name)
        if name.family in ("copy", "fill") or name.details.get("role", "").startswith(("splitK", "reduceSplit")):
            continue
        found.append(_token(w, name))
    return _composites(found)


def _token(work: Work, name: KernelName) -> Token:
    op, backward = _compute_op(work.op), _in_backward(work.op)
    char, activation = _char(name, op)
    dims = product_dims(op) if char == GEMM else None
    numel = dims[0] * dims[1] if dims else _largest(op)
    return Token(char, (work,), activation, numel, dims, _itemsize(op), backward)


def _char(name: KernelName, op: Op | None) -> tuple[str, str]:
    if name.library == "fusedmlp":
        return OTHER, ""
    if name.family == "gemm":
        fused = "epilogue" in name.details and name.details["epilogue"] not in ("bias", "bgrada", "bgradb")
        batched = op is not None and op.name in ("aten::bmm", "aten::baddbmm")
        return (OTHER if fused or batched else GEMM), ""
    operations = set(name.operations)
    if name.library == "Inductor":
        return _inductor_char(operations)
    if op is not None and op.name.startswith("aten::"):
        operations.add(op.name.removeprefix("aten::").rstrip("_"))
    if name.family == "reduction":
        return (SUM if "sum" in operations else OTHER), ""
    for group, plain in ((BACKWARDS, GRAD), (ACTIVATIONS, ACT)):
        if hit := sorted(operations & group):
            return (RELU if hit == ["relu"] else plain), hit[0].removesuffix("_backward")
    # ReLU is a clamp by name; the operation says which it was. Without it, a clamp is taken for one.
    if "clamp" in operations and op is None:
        return RELU, "relu"
    return (MUL if "mul" in operations else ADD if "add" in operations else OTHER), ""


def _inductor_char(operations: set[str]) -> tuple[str, str]:
    for group, alone, with_mul in ((BACKWARDS, GRAD, GRAD_MUL), (ACTIVATIONS, ACT, ACT_MUL)):
        hit = sorted(operations & group)
        if not hit:
            continue
        activation = hit[0].removesuffix("_backward").replace("threshold", "relu")
        if "mul" in operations:
            return with_mul, activation
        return (RELU if alone == ACT and activation == "relu" else alone), activation
    if "sum" in operations:
        return SUM, ""
    return (ADD if operations & {"add"} and len(operations) == 1 else OTHER), ""


def _compute_op(op: Op | None) -> Op | None:
    """The innermost operation that has shapes, else the innermost one."""
    for candidate in op.line() if op is not None else ():
        if candidate.shapes:
            return candidate
    return op


def _in_backward(op: Op | None) -> bool:
    return any("evaluate_function" in o.name or "Backward" in o.name for o in (op.line() if op else ()))


def product_dims(op: Op | None) -> tuple[int, int, int] | None:
    """(M, N, K) of a product from the shapes of its operation; None where they are not recorded."""
    if op is None or op.name not in PRODUCTS:
        return None
    shapes = [s for s in op.shapes if len(s) >= 2]
    if op.name == "aten::addmm" and len(op.shapes) >= 3:
        shapes = [s for s in op.shapes[1:3] if len(s) == 2]
    if len(shapes) < 2:
        return None
    a, b = shapes[0], shapes[1]
    if op.name == "aten::linear":
        return prod(a[:-1]), b[0], a[-1]
    return prod(a[:-1]), b[-1], a[-1]


def _largest(op: Op | None) -> int:
    return max((prod(s) for s in op.shapes if s), default=0) if op is not None else 0


_SIZES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8}


def _itemsize(op: Op | None) -> int:
    return next((_SIZES[d] for d in (op.dtypes if op else ()) if d in _SIZES), 0)


_STEPS = {"mul", "pow", "add", "tanh", "sigmoid", "erf", "square"}


def _simple(token: Token) -> str:
    """The elementwise operation of a token that may be one step of an activation written out, else nothing."""
    operations = decode(token.work[0].name).operations if len(token.work) == 1 else ()
    return next((o for o in operations if o in _STEPS), "")


def _composites(row: list[Token]) -> list[Token]:
    """Activations that a model writes out as several operations, as one token each."""
    found: list[Token] = []
    i = 0
    while i < len(row):
        run = i
        while run < len(row) and _simple(row[run]) and row[run].numel == row[i].numel:
            run += 1
        taken = _written_out([_simple(t) for t in row[i:run]])
        if taken is None or row[i].backward:
            found.append(row[i])
            i += 1
            continue
        size, activation = taken
        work = tuple(w for t in row[i : i + size] for w in t.work)
        found.append(Token(ACT, work, activation, row[i].numel, None, row[i].itemsize))
        i += size
    return found


# Steps, in the order of the usual code, and the activation that they are.
_WRITTEN = (
    (("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"), "gelu_tanh"),  # 0.5 x (1 + tanh(c (x + a x^3)))
    (("mul", "sigmoid", "mul"), "quick_gelu"),  # x sigmoid(1.702 x)
    (("sigmoid", "mul"), "silu"),  # x sigmoid(x)
)


def _written_out(steps: Sequence[str]) -> tuple[int, str] | None:
    for pattern, activation in _WRITTEN:
        if tuple(steps[: len(pattern)]) == pattern:
            return len(pattern), activation
    return None
