"""Find the chains of kernels that one of our layers replaces: which layer, and what it would save.

A trace has no tensors, so a chain is a pattern in the order of launches of one stream, checked by the sizes of the
operations where the profile recorded shapes. What it saves are launches of the layer's plan where cuBLAS does not split
a product, and the traffic of the tensors that are no longer written and read again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .model import Work
from .tokens import ACT, ACT_MUL, GEMM, GRAD, GRAD_MUL, GRAD_SUM, MUL, RELU, SUM, Token, launched, tokens


@dataclass(frozen=True)
class Chain:
    """Kernels that one layer replaces.

    kind: "glu", "mlp", "relu_stack" or "linear_act". direction: "forward" or "backward". layer: the class to use.
    now, then: launches of these kernels, and of the layer. bytes_saved: memory traffic saved, in bytes, None where the
    profile recorded no shapes. shape: "[tokens, in -> out]",
    backward that of the hidden layer. work: the kernels.
    """

    kind: str
    direction: str
    layer: str
    activation: str
    now: int
    then: int
    bytes_saved: int | None
    shape: str
    work: tuple[Work, ...] = field(repr=False, default=())

    @property
    def us(self) -> float:
        return sum(w.duration for w in self.work)


@dataclass(frozen=True)
class _Pattern:
    kind: str
    direction: str
    regex: re.Pattern[str]


def _pattern(kind: str, direction: str, regex: str) -> _Pattern:
    return _Pattern(kind, direction, re.compile(regex))


# The first that fits at a place wins: from the longest to the shortest.
_PATTERNS = (
    _pattern("glu", "backward", "GG?S*MM(?:GG?S*)?B(?:GG?S*){0,2}P?"),
    _pattern("glu", "backward", "GS*G?S*D[ST]*(?:GG?S*){1,2}P?"),
    _pattern("glu", "forward", "G[AR]GMG?|GG[AR]MG?|GGCG?"),
    _pattern("relu_stack", "forward", "(?:GR){2,}"),
    _pattern("relu_stack", "backward", "(?:[BT]S*GG?S*){2,}"),
    _pattern("mlp", "backward", "GS*G?S*[BT][ST]*G[ST]*G?[ST]*"),
    _pattern("mlp", "forward", "G[AR]G"),
    _pattern("linear_act", "backward", "[BT]S*GG?S*"),
    _pattern("linear_act", "forward", "G[AR]"),
)


def find_chains(work: Sequence[Work]) -> list[Chain]:
    """The chains among the work of one step, in order of launch."""
    streams: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for w in work:
        streams[w.device, w.stream].append(w)
    rows = [tokens(part) for part in streams.values()]
    training = any(t.backward or t.char in (GRAD, GRAD_MUL) for row in rows for t in row)
    found = [chain for row in rows for chain in _chains_of(row, training)]
    # What lies between a product and its activation in the forward, such as a residual, leaves no mark in the backward.
    if any(t.char == GEMM and t.work[0].op is not None and not t.backward for row in rows for t in row):
        forward = {c.activation for c in found if c.direction == "forward"}
        found = [c for c in found if c.direction == "forward" or c.activation in forward]
    return sorted(found, key=lambda c: launched(c.work[0]))


def _chains_of(row: list[Token], training: bool) -> list[Chain]:
    """The chains of one stream."""
    text = "".join(t.char for t in row)
    found: list[Chain] = []
    at = 0
    while at < len(row):
        hit = next((h for p in _PATTERNS if (h := _match(p, text, row, at)) is not None), None)
        if hit is None:
            at += 1
            continue
        pattern, taken = hit
        found.append(_chain(pattern, taken, training))
        at += len(taken)
    return found


def _match(pattern: _Pattern, text: str, row: list[Token], at: int) -> tuple[_Pattern, list[Token]] | None:
    match = pattern.regex.match(text, at)
    if match is None:
        return None
    taken = row[match.start() : match.end()]
    # A chain lies in one pass; where the trace knows no operations, it cannot tell.
    if len({t.backward for t in taken}) > 1 or (taken[0].backward and pattern.direction == "forward"):
        return None
    if pattern.direction == "backward":
        return pattern, taken
    fitting = _fitting(pattern.kind, taken)
    return (pattern, fitting) if fitting else None


def _fitting(kind: str, taken: list[Token]) -> list[Token]:
    """What of a forward chain belongs together by its sizes: all, its beginning, or nothing."""
    if kind == "relu_stack":
        size = 2
        while size < len(taken) and _reads(taken[size], taken[size - 2]) and _alike(taken[size : size + 2]):
            size += 2
        return taken[:size] if size > 2 and _alike(taken[:2]) else []
    # The last product, down or fc2, is of another size; what it reads is that of the others.
    ends = kind in ("glu", "mlp") and taken[-1].char == GEMM
    inner = taken[:-1] if ends else taken
    products = [t.dims for t in inner if t.char == GEMM and t.dims]
    if not _alike(inner) or len(set(products)) > 1:  # gate and up read the same
        return []
    if ends and not _reads(taken[-1], taken[0]):
        return inner if kind == "glu" else []
    return taken


def _alike(inner: Sequence[Token]) -> bool:
    """Whether what is activated and multiplied has the size of the products before it."""
    widths = {t.dims[1] if t.dims else t.width for t in inner if t.numel}
    return len({t.numel for t in inner if t.numel}) <= 1 and len(widths) <= 1


def _reads(product: Token, made: Token) -> bool:
    """Whether a product can read what another one made; where the sizes are not known, it may."""
    if not product.dims or not made.dims:
        return True
    return (product.dims[0], product.dims[2]) == made.dims[:2]


def _chain(pattern: _Pattern, taken: Sequence[Token], training: bool) -> Chain:
    activation = next((t.activation for t in taken if t.activation), "")
    now = sum(len(t.work) for t in taken)
    then = _launches(pattern, taken)
    bias = any(t.char in (SUM, GRAD_SUM) for t in taken)
    size = _hidden_bytes(taken)
    saved = None if size is None else _bytes_saved(pattern, size, activation, training, bias)
    work = tuple(w for t in taken for w in t.work)
    layer = _layer(pattern.kind, activation)
    return Chain(pattern.kind, pattern.direction, layer, activation, now, then, saved, _shape(pattern, taken), work)


def _launches(pattern: _Pattern, taken: Sequence[Token]) -> int:
    """Launches of the layer for what of it this chain has."""
    products = sum(t.char == GEMM for t in taken)
    if pattern.direction == "forward":
        if pattern.kind == "relu_stack":
            return 1 if _in_one_launch([t.dims for t in taken if t.char == GEMM and t.dims]) else products
        ends_in_product = taken[-1].char == GEMM
        return 2 if pattern.kind in ("glu", "mlp") and ends_in_product else 1
    if pattern.kind == "glu":  # the hidden gradient, dWdown, dX, dWgate and dWup in one: less where some are not wanted
        return min(4, products)
    if pattern.kind == "mlp":
        return products
    return products + 1  # the mask of the last layer is a launch of its own


def _in_one_launch(dims: Sequence[tuple[int, int, int]]) -> bool:
    """As plan.stack_fits(), of a device as large as an H100 or H200."""
    if not dims:
        return True
    tiles = -(-dims[0][0] // 32) * max(-(-n // 32) for _, n, _ in dims)
    return len(dims) <= 4 and dims[0][0] <= 256 and tiles <= 132


def _layer(kind: str, activation: str) -> str:
    if kind == "glu":
        named = {"gelu": "FusedGeGLUMLP", "gelu_tanh": "FusedGeGLUMLP", "silu": "FusedSwiGLUMLP"}
        return named.get(activation, f"FusedGLUMLP(activation={activation!r})")
    if kind == "relu_stack":
        return "FusedReLUMLP"
    if kind == "mlp":
        return f"FusedMLP(activation={activation!r})"
    return "FusedLinearReLU" if activation == "relu" else f"FusedLinearAct(activation={activation!r})"


def _elementwise(taken: Sequence[Token]) -> Token | None:
    chars = (ACT, RELU, ACT_MUL, MUL, GRAD, GRAD_MUL, GRAD_SUM)
    return next((t for t in taken if t.char in chars and t.numel), None)


def _hidden_bytes(taken: Sequence[Token]) -> int | None:
    """Bytes of the hidden layer: of what is activated, summed over the layers of a stack."""
    chars = (ACT, RELU, ACT_MUL, GRAD, GRAD_MUL, GRAD_SUM)
    sizes = [t.numel * t.itemsize for t in taken if t.char in chars]
    return sum(sizes) if sizes and all(sizes) else None


def _bytes_saved(pattern: _Pattern, size: int, activation: str, training: bool, bias: bool) -> int:
    """Traffic in bytes; ``size``: of one tensor of the hidden layer. Where a forward keeps gate and up, or what the
    activation's gradient needs, for its backward, the layer writes that too."""
    relu = activation == "relu"
    forward, backward = pattern.direction == "forward", pattern.direction == "backward"
    if pattern.kind == "glu" and forward:
        return size * (4 if training else 6)  # gate and up read; the activation written and read; gate and up written
    if pattern.kind == "glu" and backward:
        return size * 5  # dH written and read twice, the activation's gradient written and read
    if forward:
        return size * (2 if relu or not training else 1)  # the product written and read
    if pattern.kind == "mlp":
        return size * (3 if bias else 2)  # dA written and read; dPre read once more for the bias
    return size if bias else 0  # the masked gradient read once more for the bias


def _shape(pattern: _Pattern, taken: Sequence[Token]) -> str:
    dims = [t.dims for t in taken if t.char == GEMM and t.dims]
    if pattern.direction == "backward" or not dims:
        known = _elementwise(taken)
        return f"[{known.numel // known.width}, {known.width}]" if known and known.width else ""
    M, N, K = dims[0]
    ends = [f"{K} -> {N}"]
    if pattern.kind in ("glu", "mlp") and taken[-1].char == GEMM and taken[-1].dims:
        ends.append(str(taken[-1].dims[1]))
    if pattern.kind == "relu_stack":
        ends += [str(d[1]) for d in dims[1:]]
    return f"[{M}, {' -> '.join(ends)}]"


@dataclass(frozen=True)
class ChainGroup:
    """Chains that are alike, of one step. saved: launches less in a step; bytes_saved: traffic less in a step."""

    chain: Chain
    count: int

    @property
    def saved(self) -> int:
        return self.count * (self.chain.now - self.chain.then)

    @property
    def bytes_saved(self) -> int | None:
        return None if self.chain.bytes_saved is None else self.count * self.chain.bytes_saved

    def __str__(self) -> str:
        c = self.chain
        where = f" {c.shape}" if c.shape else ""
        traffic = "" if not self.bytes_saved else f", {self.bytes_saved / 1e6:.1f} MB of traffic less"
        return (
            f"{self.count} x {c.direction}{where}: {c.layer} makes {c.now} launches {c.then}; "
            f"{self.saved} launches less a step{traffic}"
        )


def grouped(chains: Sequence[Chain]) -> list[ChainGroup]:
    """Equal chains together, those that save most launches first; those that save nothing left out."""
    counts: dict[tuple[object, ...], list[Chain]] = {}
    for c in chains:
        if c.now > c.then:
            counts.setdefault((c.kind, c.direction, c.layer, c.now, c.then, c.shape), []).append(c)
    groups = [ChainGroup(same[0], len(same)) for same in counts.values()]
    return sorted(groups, key=lambda g: -g.saved)
