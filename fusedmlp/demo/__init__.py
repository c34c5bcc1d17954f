"""The demo: a real pretrained model before and after patch(), and a training run with both kinds of MLP."""

from __future__ import annotations

from pathlib import Path

from .common import DemoError, heading, resolve_device

__all__ = ["DemoError", "run"]


def run(
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path = "demo.png",
    steps: int = 200,
    repeats: int | None = None,
) -> int:
    """Runs both parts and prints their tables. Returns 0, or 1 where a difference is out of bounds.

    device: "cpu", "cuda" or None (cuda where there is one). dtype: name of the dtype of the pretrained model;
    None means float32, and bfloat16 too on a GPU. out: the PNG of the loss curves. steps: training steps of
    the character model. repeats: timed repeats of the pretrained model; None means 5 on a CPU, 50 on a GPU.
    Raises DemoError for what this machine cannot do.
    """
    from . import char_lm, embeddings

    chosen = resolve_device(device)
    if repeats is None:
        repeats = 50 if chosen.type == "cuda" else 5
    if steps < 1 or repeats < 1:
        raise DemoError(f"--steps and --repeats must be 1 or more, got {steps} and {repeats}")
    dtypes = [dtype] if dtype else ["float32", "bfloat16"] if chosen.type == "cuda" else ["float32"]
    heading("1. A pretrained model: all-MiniLM-L6-v2, before and after fusedmlp.patch()")
    good = [embeddings.show(chosen, name, repeats=repeats) for name in dtypes]
    heading("2. Training: a character-level transformer with GeGLU MLPs, eager and fused")
    good.append(char_lm.show(chosen, out=Path(out), steps=steps))
    verdict = "every difference is within its bound" if all(good) else "OUT OF BOUNDS, see above"
    print(f"\nresult: {verdict}")
    return 0 if all(good) else 1
