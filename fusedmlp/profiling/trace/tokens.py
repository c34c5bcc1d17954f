"""The kernels of a step as a row of tokens, one character each, in which patterns of MLPs can be looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ...activations import ACTIVATIONS as OURS
from ..names import KernelName, decode
from ..names.gemm import BESIDE
from ..names.inductor import VIEWS
from .model import Op, Work

ACTIVATIONS = {"relu", "gelu", "silu", "sigmoid", "tanh", "leaky_relu", "hardswish", "quick_gelu", "gelu_tanh", "relu2"}
BACKWARDS = {f"{name}_backward" for name in ACTIVATIONS} | {"threshold_backward"}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear"}

# Characters: G product, R ReLU, A another activation, M multiplication, C activation and multiplication in one kernel,
# B an activation's gradient, D that and multiplication in one kernel, T that and a sum over rows in one kernel, S a sum
# over rows, P addition, x anything else.
GEMM, RELU, ACT, MUL, ACT_MUL, GRAD, GRAD_MUL, GRAD_SUM, SUM, ADD, OTHER = "GRAMCBDTSPx"


@dataclass(frozen=True)
class Token:
    """Some kernels of a step that count as one thing.

    activation: its name, where there is one. numel: elements of the result, or of the input of an elementwise
    operation; 0 where the trace does not tell. dims: (M, N, K) of a product. itemsize: bytes of an element.
    width: the last dimension of the largest input.
    """

    char: str
    work: tuple[Work, ...]
    activation: str = ""
    numel: int = 0
    dims: tuple[int, int, int] | None = None
    itemsize: int = 0
    width: int = 0
    backward: bool = False


def tokens(work: Sequence[Work]) -> list[Token]:
    """Tokens of the kernels of one step, in the order in which they were launched. Casts, copies, fills and what
    cuBLAS launches beside a product are part of no pattern and stand in no one's way: they are left out."""
    ordered = sorted((w for w in work if w.kind == "kernel"), key=launched)
    found: list[Token] = []
    for w in ordered:
        name = decode(w.name)
        if name.family in ("copy", "fill") or name.details.get("role") in BESIDE:
            continue
        found.append(_token(w, name))
    return [t if not t.activation or t.activation in OURS else replace(t, char=OTHER) for t in _composites(found)]


def launched(work: Work) -> tuple[float, float]:
    """A key of the order of launch."""
    return (work.call.start if work.call else work.start, work.start)


def _token(work: Work, name: KernelName) -> Token:
    op, backward = _compute_op(work.op), _in_backward(work.op)
    char, activation = _char(name, op, backward)
    dims = product_dims(op) if char == GEMM else None
    largest = max((s for s in op.shapes if s), key=prod, default=()) if op is not None else ()
    numel = dims[0] * dims[1] if dims else prod(largest) if largest else 0
    return Token(char, (work,), activation, numel, dims, _itemsize(op), largest[-1] if largest else 0, backward)


def _char(name: KernelName, op: Op | None, backward: bool) -> tuple[str, str]:
    if name.library == "fusedmlp":
        return OTHER, ""
    if name.family == "gemm":
        fused = "epilogue" in name.details and name.details["epilogue"] not in ("bias", "bgrada", "bgradb")
        batched = op is not None and op.name in ("aten::bmm", "aten::baddbmm")
        return (OTHER if fused or batched else GEMM), ""
    operations = set(name.operations)
    if name.library == "Inductor":
        return _inductor_char(operations - VIEWS, forward=op is not None and not backward)
    for outer in op.line() if op is not None else ():  # relu runs clamp_min, whose kernel is named after a clamp
        if not outer.name.startswith("aten::"):
            break
        operations.add(outer.name.removeprefix("aten::").rstrip("_"))
    if name.family == "reduction":
        return (SUM if "sum" in operations else OTHER), ""
    for group, plain in ((BACKWARDS, GRAD), (ACTIVATIONS, ACT)):
        if hit := sorted(operations & group):
            activation = hit[0].removesuffix("_backward").replace("threshold", "relu")
            activation = "gelu_tanh" if name.details.get("form") == "tanh" else activation
            return (RELU if hit == ["relu"] else plain), activation
    # Without an operation, as in a graph, a clamp is taken for ReLU.
    if "clamp" in operations and op is None:
        return RELU, "relu"
    if "mul" in operations:
        return (MUL if _of_equals(op) else OTHER), ""
    return (ADD if "add" in operations else OTHER), ""


def _of_equals(op: Op | None) -> bool:
    """Whether a multiplication is one of two tensors of a size: by a number, or a row, it is a scale."""
    sizes = [prod(s) for s in op.shapes] if op is not None else []
    return not sizes or sizes.count(max(sizes)) > 1


def _inductor_char(operations: set[str], forward: bool) -> tuple[str, str]:
    """forward: the kernel is known to be part of one, where a gradient in its name is what it prepares for backward."""
    for group, alone, with_mul in ((BACKWARDS, GRAD, GRAD_MUL), (ACTIVATIONS, ACT, ACT_MUL)):
        if forward and group is BACKWARDS and operations & ACTIVATIONS:
            continue
        hit = sorted(operations & group)
        if not hit:
            continue
        activation = hit[0].removesuffix("_backward").replace("threshold", "relu")
        if "sum" in operations and group is BACKWARDS:
            return GRAD_SUM, activation
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
    """(M, N, K) of a product from the shapes of its operation, those of a batch in M; None where not recorded."""
    operands = _operands(op)
    if op is None or operands is None:
        return None
    a, b = operands
    if op.name == "aten::linear":
        return prod(a[:-1]), b[0], a[-1]
    return prod(a[:-1]), b[-1], a[-1]


def batch(op: Op | None) -> int:
    """Matrices that the second operand of a product has."""
    operands = _operands(op)
    return prod(operands[1][:-2]) if operands else 1


def _operands(op: Op | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if op is None or op.name not in PRODUCTS:
        return None
    shapes = op.shapes[1:3] if op.name in ("aten::addmm", "aten::baddbmm") else op.shapes
    shapes = tuple(s for s in shapes if len(s) >= 2)
    return (shapes[0], shapes[1]) if len(shapes) >= 2 else None


_SIZES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8}


def _itemsize(op: Op | None) -> int:
    return next((_SIZES[d] for d in (op.dtypes if op else ()) if d in _SIZES), 0)


_STEPS = {"mul", "pow", "add", "tanh", "sigmoid", "erf", "square"}


def _composites(row: list[Token]) -> list[Token]:
    """Activations that a model writes out as several operations, and their gradients, as one token each."""
    found: list[Token] = []
    i = 0
    while i < len(row):
        run = i + 1
        while run < len(row) and _in_one_run(row[i], row[run]):
            run += 1
        taken = _gradient_of(row[i:run]) if row[i].backward else _written_out(row[i:run])
        # sigmoid(gate) * up behind two products alike is a gate, and no SiLU of the second product.
        gated = [t.dims for t in found[-2:] if t.char == GEMM and t.dims]
        if taken is not None and taken[2] == "silu" and run - i == 2 and len(gated) == 2 and gated[0] == gated[1]:
            taken = None
        if taken is None:
            found.append(row[i])
            i += 1
            continue
        size, char, activation = taken
        work = tuple(w for t in row[i : i + size] for w in t.work)
        found.append(replace(row[i], char=char, work=work, activation=activation))
        i += size
    return found


def _in_one_run(first: Token, other: Token) -> bool:
    """Whether both are elementwise, over equally many elements, in the same pass."""
    plain = all(decode(t.work[0].name).family == "elementwise" for t in (first, other))
    return plain and first.numel == other.numel and first.backward == other.backward


# Steps, in the order of the usual code, and the activation that they are.
_WRITTEN = (
    (("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"), "gelu_tanh"),  # 0.5 x (1 + tanh(c (x + a x^3)))
    (("mul", "sigmoid", "mul"), "quick_gelu"),  # x sigmoid(1.702 x)
    (("sigmoid", "mul"), "silu"),  # x sigmoid(x)
)


def _written_out(run: Sequence[Token]) -> tuple[int, str, str] | None:
    """(tokens, character, activation) where a run begins with an activation that is written out."""
    steps = tuple(next((o for o in decode(t.work[0].name).operations if o in _STEPS), "") for t in run)
    for pattern, activation in _WRITTEN:
        if steps[: len(pattern)] == pattern:
            return len(pattern), ACT, activation
    return None


def _gradient_of(run: Sequence[Token]) -> tuple[int, str, str] | None:
    """The same of a run that is the gradient of such an activation: the gradient of its tanh or sigmoid, and at least
    three multiplications or additions around it."""
    inner = {t.activation for t in run if t.char == GRAD}
    if len(run) < 4 or inner not in ({"tanh"}, {"sigmoid"}):
        return None
    activation = "gelu_tanh" if inner == {"tanh"} else "quick_gelu" if len(run) > 4 else "silu"
    return len(run), GRAD, activation
