"""Part 2 of the demo: a character-level transformer with GeGLU MLPs, trained with eager and with fused
layers.

Same seed, same batches, same initial weights: the two loss curves must lie on each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules import FusedGeGLUMLP
from .common import DemoError, interpreted, on_cpu_line, one_thread, synchronize, table

CORPUS = Path(__file__).with_name("corpus.txt")
GAP_BOUND = 1e-3  # nats; relative noise of 1e-5 on every MLP output moves this run by 1e-6


class EagerGeGLU(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)), the way it is written without this library. x [..., D] -> [...,
    D]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """Token ids [B, T] -> logits [B, T, vocabulary]. ``make_mlp(width, 4 * width)`` builds each block's
    MLP."""

    def __init__(
        self,
        vocabulary: int,
        make_mlp: Callable[[int, int], nn.Module],
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        context: int = 64,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, make_mlp(width, 4 * width)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encode(text: str) -> tuple[Tensor, str]:
    """The text as character numbers (int64 [characters]), and the vocabulary, sorted."""
    vocabulary = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(vocabulary)}
    return torch.tensor([number[c] for c in text]), vocabulary


def train(
    fused: bool, device: torch.device, steps: int, batch: int = 12, context: int = 48, seed: int = 0
) -> tuple[list[float], float]:
    """Trains on the corpus; returns the loss of every step (nats a character) and the seconds that it
    took."""
    data, vocabulary = encode(CORPUS.read_text(encoding="utf-8"))
    torch.manual_seed(seed)
    model = CharTransformer(len(vocabulary), EagerGeGLU, context=context)
    if fused:
        for block in model.blocks:
            layer = FusedGeGLUMLP(block.mlp.gate_proj.in_features, block.mlp.gate_proj.out_features)
            layer.load_state_dict(block.mlp.state_dict())
            block.mlp = layer
    model = model.to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.01)
    draw = torch.Generator().manual_seed(seed + 1)
    losses = []
    begin = time.perf_counter()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        starts = torch.randint(len(data) - context - 1, (batch,), generator=draw)
        chunk = torch.stack([data[s : s + context + 1] for s in starts]).to(device)
        logits = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    synchronize(device)
    return [x.item() for x in losses], time.perf_counter() - begin


def draw_curves(eager: list[float], fused: list[float], out: Path, where: str) -> None:
    """Both loss curves and, below them, their distance, in one PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DemoError(f"{error}; the demo's packages come with: pip install 'fusedmlp[demo]'") from error
    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(eager) + 1)
    top.plot(steps, eager, color="#9ecae1", linewidth=5, label="eager GeGLU")
    top.plot(steps, fused, color="#08306b", linewidth=1.2, label="FusedGeGLUMLP")
    top.set_ylabel("loss (nats per character)")
    top.set_title(f"Character-level transformer, same seed and batches; {where}", fontsize=10)
    top.legend()
    gaps = [abs(a - b) for a, b in zip(eager, fused, strict=True)]
    bottom.plot(steps, gaps, color="#b2182b", linewidth=1)
    bottom.set_ylim(0, 1.1 * max(gaps) or 1e-6)
    bottom.set_ylabel("|eager - fused|")
    bottom.set_xlabel("training step")
    bottom.ticklabel_format(axis="y", style="scientific", scilimits=(-2, 2))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def show(device: torch.device, out: Path, steps: int = 200) -> bool:
    """Trains both, prints the losses, draws the PNG; returns whether the curves agree and the loss went
    down."""
    with one_thread():
        eager, eager_s = train(False, device, steps)
        fused, fused_s = train(True, device, steps)
    gap = max(abs(a - b) for a, b in zip(eager, fused, strict=True))
    finite = all(map(math.isfinite, eager + fused))
    good = finite and gap <= GAP_BOUND and (steps < 20 or fused[-1] < fused[0])
    cpu = "CPU (Triton's interpreter)" if interpreted() else "CPU (both run PyTorch's own operators)"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    draw_curves(eager, fused, out, where)
    text = CORPUS.read_text(encoding="utf-8")
    print(f"\n{len(text)} characters of corpus.txt, {len(set(text))} different; {steps} steps, float32 on {device}")
    rows = [
        [
            name,
            f"{losses[0]:.4f}",
            f"{losses[-1]:.4f}",
            f"{sum(losses[-20:]) / len(losses[-20:]):.4f}",
            f"{s:.1f}",
        ]
        for name, losses, s in (("eager GeGLU", eager, eager_s), ("FusedGeGLUMLP", fused, fused_s))
    ]
    print(table(["loss, nats per character", "first", "last", "mean of last 20", "seconds"], rows))
    verdict = "within the bound" if good else "OUT OF BOUNDS"
    print(f"  largest gap of the curves {gap:.2e}, bound {GAP_BOUND:g}: {verdict}")
    if device.type == "cpu":
        print(on_cpu_line("any gap"))
    print(f"  curves: {out}")
    return good
