"""``python -m fusedmlp profile`` without a GPU: guesses, what the host dispatched, the reports, and every refusal."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusedmlp import cli
from fusedmlp.profiling import guess, profile_report, tables
from fusedmlp.profiling.assertions import training_step
from fusedmlp.profiling.html import write_html
from fusedmlp.profiling.profile_run import Ceilings, Result, whole_passes
from fusedmlp.profiling.trace.load import load
from fusedmlp.profiling.trace_report import TraceReport
from fusedmlp.profiling.workloads import WorkloadError, mlp, mlp_workload, model_workload, variant

TRACES = Path(__file__).resolve().parent / "traces"
SMALL = ["--batch", "2", "--dim", "16", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def profiled(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    assert cli.main(["profile", *arguments, "--out", str(tmp_path)]) == 0
    return json.loads((tmp_path / "report.json").read_text())  # type: ignore[no-any-return]


def test_an_mlp_in_three_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = profiled(tmp_path, "mlp", *SMALL, "--seq", "4", "--hidden", "32", "--backward")
    rows = {(r["variant"], r["pass"]): (r["guess"], r["seen"], r["mark"]) for r in content["guesses"]}
    assert rows == {
        ("eager", "forward"): (5, 5, "equal"),
        ("eager", "step"): (15, 15, "equal"),
        ("compile", "forward"): (4, None, "not seen"),
        ("compile", "step"): (12, None, "not seen"),
        ("fused", "forward"): (5, 5, "equal"),
        ("fused", "step"): (15, 15, "equal"),
    }
    names = {p.name for p in (tmp_path / "traces").iterdir()}
    assert names == {f"cpu-geglu-{v}-{p}.json.gz" for v in ("eager", "compile", "fused") for p in ("forward", "step")}
    said = capsys.readouterr().out
    assert said.index("Guess: kernels of a call") < said.index("Guessed and seen")
    assert "No CUDA device" in said


def test_linear_and_naive(tmp_path: Path) -> None:
    rows = profiled(tmp_path / "a", "linear", *SMALL, "--seq", "4", "--eager", "--backward")["guesses"]
    assert [r["seen"] for r in rows] == [1, 4]
    rows = profiled(tmp_path / "b", "linear", *SMALL, "--no-bias", "--eager", "--backward")["guesses"]
    assert [r["seen"] for r in rows] == [1, 3]
    rows = profiled(tmp_path / "c", "mlp", "--kind", "naive", *SMALL, "--eager", "--fused", "--backward")["guesses"]
    assert [r["seen"] for r in rows] == [6, 18, 6, 18]


MODEL = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(3, 4)
def wrong():
    return 3
"""


def test_a_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    content = profiled(tmp_path / "out", "model", "users_model:make", "--dtype", "float32", "--eager", "--backward")
    assert [r["seen"] for r in content["guesses"]] == [2, 5]
    with pytest.raises(WorkloadError, match=r"must return \(module, inputs\), it returned int"):
        model_workload("users_model:wrong", (), 1, 1, "float32", "cpu")


@pytest.mark.parametrize(
    "target, settings",
    [
        ("LlamaConfig", "hidden_size=32 intermediate_size=64 num_hidden_layers=1 num_attention_heads=2 vocab_size=50"),
        ("ViTConfig", "hidden_size=32 intermediate_size=64 num_hidden_layers=1 num_attention_heads=2 image_size=32"),
    ],
)
def test_a_configuration_of_transformers(target: str, settings: str, tmp_path: Path) -> None:
    keys = [*settings.split(), "num_key_value_heads=2"] if target == "LlamaConfig" else settings.split()
    command = ["model", target, "--set", *keys, "--batch", "1", "--seq", "4", "--dtype", "float32"]
    rows = profiled(tmp_path, *command, "--eager", "--fused", "--backward")["guesses"]
    assert [r["mark"] for r in rows] == ["equal"] * 4
    assert rows[0]["seen"] > 10


REFUSED = {
    "linear --fused": "nothing to fuse",
    "mlp --compile fastest": "--compile takes default, reduce-overhead",
    "mlp --kind relu --hub org/repo": "--hub has layers for geglu, swiglu",
    "model NoSuchConfig": "is no configuration class",
    "model Trainer": "is no configuration class",
    "model no_such_module:make": "cannot be called",
    "model json:nothing": "cannot be called",
    "model LlamaConfig --set layers": "KEY=VALUE",
    "model LlamaConfig --set num_hidden_layers=x": "LlamaConfig cannot be made",
    "model :make": "cannot be called",
    "model .relative:make": "cannot be called",
    "model json:__name__": "cannot be called",
    "model users_faulty:raises": "ValueError: broken",
    "model users_faulty:other_width": "does not run on its inputs",
    "model users_broken:make": "SyntaxError",
}
FAULTY = """
import torch
def raises():
    raise ValueError("broken")
def other_width():
    return torch.nn.Linear(2, 2), torch.ones(1, 3)
"""


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_had_is_said_with_exit_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_faulty.py").write_text(FAULTY)
    (tmp_path / "users_broken.py").write_text("def make(:")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["profile", *command.split(), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fusedmlp profile: ") and REFUSED[command] in said


@pytest.mark.parametrize("command", ["", "mlp --kind moe", "mlp --batch 0", "linear --dtype int8", "model"])
def test_usage_errors(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["profile", *command.split()])
    assert stop.value.code == 2


NESTED = """
import collections, torch
class Sum(torch.nn.Linear):
    def forward(self, parts, scale=None):
        return super().forward(parts[0] + parts[1]["b"]) * scale["s"]
def make():
    x = torch.ones(1, 2)
    return Sum(2, 2), collections.UserDict(parts=(x, {"b": x}), scale={"s": x})
"""


def test_inputs_of_any_structure_take_the_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tokenizer returns them: a mapping that is no dict, and tensors within."""
    (tmp_path / "users_nested.py").write_text(NESTED)
    monkeypatch.syspath_prepend(tmp_path)
    workload = model_workload("users_nested:make", [], 1, 1, "bfloat16", "cpu")
    assert workload.keywords["parts"][1]["b"].dtype == torch.bfloat16
    assert variant(workload, "eager").forward().dtype == torch.bfloat16


def test_settings_given_one_by_one_all_count() -> None:
    args = cli._parser().parse_args(["profile", "model", "LlamaConfig", "--set", "a=1", "b=2", "--set", "c=3"])
    assert args.set == ["a=1", "b=2", "c=3"]
    assert cli._parser().parse_args(["profile", "model", "LlamaConfig"]).set == []


def test_an_output_folder_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["profile", "linear", "--eager", *SMALL, "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_hub_is_asked_for_the_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fusedmlp import FusedGeGLUMLP

    asked: list[Any] = []

    def get_kernel(repository: str, **options: Any) -> Any:
        asked.append((repository, options))
        return SimpleNamespace(layers=SimpleNamespace(FusedGeGLUMLP=FusedGeGLUMLP))

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    workload = mlp_workload("geglu", (2, 3, 16), 32, "float32", "cpu")
    found = variant(workload, "hub", "org/fusedmlp")
    assert asked == [("org/fusedmlp", {"version": 1, "trust_remote_code": True})]
    torch.testing.assert_close(found.forward(), variant(workload, "eager").forward())
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(WorkloadError, match="needs kernels"):
        variant(workload, "hub", "org/fusedmlp")


# ------------------------------------------------------------------------------------------------------- guesses


def _calls(module: nn.Module, *shape: int) -> tuple[Any, Any]:
    x = torch.randn(*shape, requires_grad=True)

    def forward() -> Any:
        with torch.no_grad():
            return module(x)

    return forward, training_step(module, x)


@pytest.mark.parametrize(
    "kind, shape, forward, step",
    [("geglu", (4, 16), 4, 11), ("geglu", (2, 2, 16), 4, 12), ("naive", (4, 16), 6, 15), ("relu", (4, 16), 3, 9)],
)
def test_what_the_compiler_will_do(kind: str, shape: tuple[int, ...], forward: int, step: int) -> None:
    """As an H200 shows it; the gradients of a view are not added inside a product."""
    calls = _calls(mlp(kind, 16, 32), *shape)
    assert guess.guess_compiled(calls[0]).kernels == forward
    assert guess.guess_compiled(*calls).kernels == step


def test_a_long_sum_is_two_kernels_of_the_compiler() -> None:
    assert guess.guess_compiled(*_calls(nn.Linear(4, 4), 2000, 4)).kernels == 1 + 4
    assert guess.guess_compiled(*_calls(nn.Linear(4, 4), 20, 4)).kernels == 1 + 3


# ------------------------------------------------------------------------------------------------ reports of a GPU


def _result(variant_name: str, pass_: str, kernels: int) -> Result:
    """As if the shipped trace had just been recorded."""
    path = TRACES / f"h200-geglu-{variant_name}-{pass_}.json.gz"
    report = TraceReport(load(path))
    seen = sum(w.kind == "kernel" for w in report.work)
    found = guess.Guess(kernels, ("a part",) * kernels, "by the structure")
    return Result(variant_name, pass_, found, seen, 0, 120.0, report, report.verdict, path)


def test_what_a_gpu_run_prints_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ceilings = Ceilings(790.0, 4.25)
    results = [_result("eager", "step", 15), _result("compile", "step", 11), _result("fused", "step", 6)]
    profile_report.show(results, ceilings, top=20)
    said = capsys.readouterr().out
    assert said.count("equal") == 2 and "DIFFERS by +1" in said
    assert "compile step guessed: a part, a part" in said and "compile step seen: bfloat16 product" in said
    assert "8192 x 3072 x 768" in said and "compute-bound" in said
    flop = 9 * 2 * 8192 * 3072 * 768
    assert {row[1] for row in whole_passes(results)} == {flop}
    assert f"{flop / 1e9:.2f}" in said
    data, page = profile_report.write(results, "geglu", ceilings, tmp_path)
    content = json.loads(data.read_text())
    assert [r["mark"] for r in content["guesses"]] == ["equal", "DIFFERS by +1", "equal"]
    assert content["ceilings"] == {"gemm_tflop_s": 790.0, "copy_tb_s": 4.25}
    assert [v["launches"] for v in page_data(page)["variants"]] == [15, 12, 6]
    assert [g["mark"] for g in page_data(page)["guesses"]] == ["equal", "DIFFERS by +1", "equal"]


# --------------------------------------------------------------------------------------------------------- pages


def page_data(path: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))  # type: ignore[no-any-return]


def test_a_page_has_everything_within_itself(tmp_path: Path) -> None:
    report = TraceReport(load(TRACES / "h200-geglu-two-streams-forward.json.gz"))
    path = write_html(tmp_path / "page.html", [report], title="two </script> streams")
    text = path.read_text()
    assert re.findall(r"(?:src|href)=|https?://|@import", text) == []
    data = page_data(path)
    assert data["title"] == "two </script> streams"
    (shown,) = data["variants"]
    lanes = {lane["name"]: lane for lane in shown["lanes"]}
    assert [name for name in lanes if name.startswith("cuda:0")] and len(lanes) == 3
    device = [item for name, lane in lanes.items() if name.startswith("cuda") for item in lane["items"]]
    assert len([i for i in device if not i["n"].startswith("Mem")]) == shown["launches"] == 7
    assert all(
        0 <= i["s"] and i["s"] + i["d"] <= shown["length"] + 1e-3 for lane in lanes.values() for i in lane["items"]
    )
    assert any(i.get("o", "").startswith("aten::mm in aten::linear") for i in device)


def test_a_host_thread_draws_nested_operations_below_each_other(tmp_path: Path) -> None:
    report = TraceReport(load(TRACES / "h200-geglu-eager-forward.json.gz"))
    data = page_data(write_html(tmp_path / "page.html", [report]))
    host = data["variants"][0]["lanes"][0]
    levels = {item["n"]: item["l"] for item in host["items"]}
    assert levels["aten::linear"] == 0 < levels["aten::matmul"] < levels["aten::mm"] < levels["cuLaunchKernelEx"]
    assert host["depth"] == 1 + max(levels.values())


# -------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("rich", [True, False])
def test_tables_with_and_without_rich(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    tables.show_table("Title [x]", ("name", "number"), [("long [red] name " * 9, 12), ("b", 3)])
    text = capsys.readouterr().out
    assert "Title [x]" in text
    assert " ".join(text.split()).count("long [red] name") == 9
    with tables.progress_bar(10, "file") as update:
        assert update is None  # no terminal
