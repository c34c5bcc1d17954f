"""calculate_settings: heuristic, tables, overrides."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from importlib.resources import files
from pathlib import Path
from unittest import mock

import pytest
import torch

from fusedmlp import calculate_settings, settings
from fusedmlp.settings import device, heuristic, tables
from fusedmlp.settings.device import DeviceInfo
from fusedmlp.settings.types import GLUON_ONLY_OPS, GLUON_OPS, OPS, PRODUCTS, SMALL_TOKENS, Settings

H200 = DeviceInfo("nvidia-h200", (9, 0), 132)
UNKNOWN = DeviceInfo("nvidia-unknown", (9, 0), 132)
A100 = DeviceInfo("nvidia-a100", (8, 0), 108)
TABLES = sorted(p.name for p in files("fusedmlp.settings").iterdir() if p.name.endswith(".json"))
WIDTHS = ((384, 1536), (768, 3072), (1024, 4096), (2304, 9216), (4096, 14336), (511, 1001))
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.heuristic import distances  # noqa: E402


def on(info: DeviceInfo):
    return mock.patch.object(settings.device, "info", return_value=info)


def test_unknown_op_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown op 'gemm'.*linear_act.*dual_dgrad"):
        calculate_settings("gemm", 1, 16, 16, torch.bfloat16, "cpu")


def test_override_refuses_unknown_fields():
    with pytest.raises(TypeError, match=r"\['tile'\].*block_m"), settings.override(tile=3):
        pass


def test_kernels_for_small_batches_serve_no_more_tokens_than_a_row_says():
    """They would read the weights anew for each of their tiles of tokens."""
    lasts = [
        (op, N, K, rows[-1].M)
        for (op, dtype, _, N, K), rows in tables.load("nvidia-h200").items()
        if dtype == "bfloat16" and rows[-1].settings.family == "small"
    ]
    assert lasts
    for op, N, K, M in lasts:
        at = (N, K, torch.bfloat16, "", True, True)
        assert tables.find("nvidia-h200", op, M, *at) is not None
        assert tables.find("nvidia-h200", op, M + 1, *at) is None
    with on(H200):
        assert calculate_settings("down", 64, 4096, 14336, torch.bfloat16, "cuda").family == "small"
        assert calculate_settings("down", 65, 4096, 14336, torch.bfloat16, "cuda").family == "pair"


def test_programs_that_share_a_sum_are_about_a_wave():
    """Of narrow layers tiles are half as wide; each program has three steps at least; many tokens need fewer."""
    wanted = {384: (32, 4), 768: (32, 4), 1024: (64, 8)}
    wanted |= {
        N: (64, parts) for N, parts in ((2048, 4), (2304, 4), (2560, 4), (3072, 3), (4096, 2), (5120, 2), (8192, 1))
    }
    many = {384: (64, 4), 576: (64, 2), 768: (64, 2), 1024: (64, 2)}
    with on(UNKNOWN):
        for M, shares in ((16, wanted), (256, many)):
            for N, (block_n, parts) in shares.items():
                found = calculate_settings("down", M, N, 4 * N, torch.bfloat16, "cuda")
                assert (found.family, found.block_n, found.parts) == ("small", block_n, parts), (M, N)


def test_override_of_one_op_leaves_the_others_alone():
    own = settings.calculate_settings("glu", 512, 3072, 768, torch.bfloat16, "cpu")
    with settings.override(warps=2), settings.override("glu", stages=2), settings.override("dual_dgrad", warps=1):
        found = settings.calculate_settings("glu", 512, 3072, 768, torch.bfloat16, "cpu")
        other = settings.calculate_settings("dual_dgrad", 512, 768, 3072, torch.bfloat16, "cpu")
        assert (found.warps, found.stages) == (2, 2)
        assert other.warps == 1
        assert other.stages != 2 or other.stages == own.stages
    assert settings.calculate_settings("glu", 512, 3072, 768, torch.bfloat16, "cpu") == own


def test_override_refuses_an_unknown_op():
    with pytest.raises(ValueError, match="unknown op 'gemm'.*dual_dgrad"), settings.override("gemm", stages=2):
        pass


def test_override_forces_single_fields_and_ends():
    plain = calculate_settings("glu", 512, 768, 3072, torch.bfloat16, "cpu")
    with settings.override(stages=2), settings.override(warps=2):
        forced = calculate_settings("glu", 512, 768, 3072, torch.bfloat16, "cpu")
    assert (forced.stages, forced.warps) == (2, 2)
    assert forced.block_m == plain.block_m
    assert calculate_settings("glu", 512, 768, 3072, torch.bfloat16, "cpu") == plain


@pytest.mark.usefixtures("gluon_serves")
@pytest.mark.parametrize("op", [op for op in OPS if op not in PRODUCTS])
@pytest.mark.parametrize("family", ["gluon", "tma", "pointer", "pair"])
def test_a_forced_family_is_the_one_used(op, family):
    """At every size, also where the heuristic or a table would take another."""
    for M, (D, H) in itertools.product((1, 128, 1024, 8192), WIDTHS[:5]):
        for info in (H200, UNKNOWN):
            with on(info), settings.override(family=family, warps=8):
                found = calculate_settings(op, M, H, D, torch.bfloat16, "cuda")
                expected = "tma" if family == "gluon" and op not in GLUON_OPS else family
                if op in GLUON_ONLY_OPS and family != "gluon":
                    expected = "pair"
                assert (found.family, found.warps) == (expected if op != "relu_stack" else "pointer", 8)


@pytest.mark.parametrize("op", OPS)
def test_the_kernels_for_small_batches_are_forced_only_there(op):
    for M, info in itertools.product((1, 16, 17, 64, 65, 256, 257, 8192), (H200, A100)):
        with on(info), settings.override(family="small", stages=2):
            found = calculate_settings(op, M, 768, 3072, torch.bfloat16, "cuda")
        small = M <= SMALL_TOKENS.get(op, 0)
        other = (
            "pair"
            if op in (*PRODUCTS, *GLUON_ONLY_OPS)
            else "tma"
            if info is H200 and op != "relu_stack"
            else "pointer"
        )
        assert (found.family, found.stages) == ("small" if small else other, 2)
        assert not small or found.block_m >= min(M, 64)


def test_the_last_product_is_cublas_where_another_family_is_forced():
    for family in ("gluon", "tma", "pointer", "pair"):
        with on(H200), settings.override(family=family):
            assert calculate_settings("down", 16, 768, 3072, torch.bfloat16, "cuda").family == "pair"


def test_a_row_for_small_batches_serves_no_larger_ones():
    row = {"op": "down", "dtype": "bfloat16", "precision": "", "N": 768, "K": 3072, "M": 256}
    text = json.dumps({"rows": [{**row, "settings": {"family": "small", "parts": 8}}]})
    with on(UNKNOWN), mock.patch.object(tables, "load", return_value=tables.parse(text)):
        for M, family in ((64, "small"), (256, "small"), (257, "pair")):
            assert calculate_settings("down", M, 768, 3072, torch.bfloat16, "cuda").family == family
        # Measured with rows at multiples of 16 bytes; elsewhere each element has an address in registers.
        assert calculate_settings("down", 64, 768, 3072, torch.bfloat16, "cuda", tma=False).family == "pair"


@pytest.mark.usefixtures("gluon_serves")
def test_gluon_is_forced_only_where_there_is_such_a_kernel():
    with settings.override(family="gluon"):
        b200 = DeviceInfo("nvidia-b200", (10, 0), 148)
        for info, tma, expected in [(H200, True, "gluon"), (H200, False, "pointer"), (A100, True, "pointer")]:
            with on(info):
                assert calculate_settings("glu", 8192, 3072, 768, torch.bfloat16, "cuda", tma=tma).family == expected
        with on(b200):
            assert calculate_settings("glu", 8192, 3072, 768, torch.bfloat16, "cuda").family == "tma"
        with on(H200):
            assert calculate_settings("glu", 8192, 3072, 768, torch.float32, "cuda").family == "pointer"


@pytest.mark.usefixtures("gluon_serves")
def test_products_are_grouped_where_that_is_forced_or_pays():
    def families(N=3072, K=768, dtype=torch.bfloat16, tma=True):
        tokens = (1, 128, 129, 4096, 4097, 8192, 8193)
        return [calculate_settings("glu_grads", M, N, K, dtype, "cuda", tma=tma).family for M in tokens]

    for info in (H200, UNKNOWN):
        with on(info), settings.override(family="gluon"):
            assert families() == ["gluon"] * 7
            assert families(dtype=torch.float32) == families(tma=False) == ["pair"] * 7
    with on(UNKNOWN):
        assert families() == ["gluon"] * 4 + ["pair"] * 3
        assert families(9216, 2304) == ["pair"] * 2 + ["gluon"] * 2 + ["pair"] * 3  # few tokens, wide weights
        assert families(1536, 384) == ["gluon"] * 6 + ["pair"]
        assert families(dtype=torch.float32) == families(tma=False) == ["pair"] * 7
    with on(A100), settings.override(family="gluon"):
        assert families() == ["pair"] * 7


@pytest.mark.usefixtures("gluon_serves")
def test_few_tiles_of_long_sums_are_half_as_high():
    with on(UNKNOWN):
        found = [calculate_settings("glu_grads", M, 3072, 768, torch.bfloat16, "cuda").block_m for M in (1, 640, 641)]
    assert found == [64, 64, 128]  # 5 x 6 tiles of 128 x 128, and 6 x 6


@pytest.mark.parametrize("version, expected", [("3.5.1", "tma"), ("3.6.0", "gluon"), ("3.10.0", "tma")])
def test_gluon_serves_under_the_tritons_it_was_checked_with(version, expected):
    device._has_gluon.cache_clear()
    try:
        with on(H200), mock.patch("triton.__version__", version), settings.override(family="gluon"):
            assert calculate_settings("glu", 8192, 3072, 768, torch.bfloat16, "cuda").family == expected
    finally:
        device._has_gluon.cache_clear()


@pytest.mark.parametrize("version, stages", [("3.5.1", 3), ("3.6.0", 4), ("3.10.0", 4)])
def test_tiles_fit_the_shared_memory_that_an_older_triton_takes(version, stages):
    """What they take is compiled in tests/test_aot.py, under the Triton that is there."""
    b200 = DeviceInfo("nvidia-b200", (10, 0), 148)
    with mock.patch("triton.__version__", version):
        assert heuristic.settings("glu", 128, 3072, 768, torch.bfloat16, "tma", b200).stages == stages


@pytest.mark.usefixtures("gluon_serves")
def test_a_gluon_row_does_not_serve_what_its_kernel_lacks():
    row = {"op": "glu_backward", "dtype": "bfloat16", "precision": "", "N": 3072, "K": 768, "M": 64}
    text = json.dumps({"rows": [{**row, "settings": {"family": "gluon"}}]})
    for info, expected in [(UNKNOWN, "gluon"), (DeviceInfo("nvidia-b200", (10, 0), 148), "tma")]:
        with on(info), mock.patch.object(tables, "load", return_value=tables.parse(text)):
            found = calculate_settings("glu_backward", 64, 3072, 768, torch.bfloat16, "cuda")
            assert found.family == expected


def test_tma_cannot_be_forced_on_what_tma_cannot_describe():
    with settings.override(family="tma"):
        assert calculate_settings("glu", 64, 96, 31, torch.bfloat16, "cpu", tma=False).family == "pointer"
        with on(A100):
            assert calculate_settings("glu", 64, 96, 32, torch.bfloat16, "cuda").family == "pointer"


@pytest.mark.parametrize("info", [H200, UNKNOWN, A100], ids=lambda info: info.slug)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_few_specialisations_over_all_token_counts(op, dtype, info):
    """At most 8 compilations of a kernel for one layer, whatever its token counts."""
    with on(info):
        for N, K in WIDTHS:
            found = {calculate_settings(op, M, N, K, dtype, "cuda") for M in [*range(1, 600), *range(600, 20000, 37)]}
            assert 1 <= len(found) <= 8


def test_a_table_wins_where_it_has_the_shape(tmp_path):
    row = {"op": "glu", "dtype": "bfloat16", "precision": "", "N": 3072, "K": 768}
    wide, narrow = {"family": "pointer", "block_m": 128}, {"family": "pointer", "block_m": 16}
    text = json.dumps({"rows": [{**row, "M": 64, "settings": narrow}, {**row, "M": 512, "settings": wide}]})
    with on(UNKNOWN), mock.patch.object(tables, "load", return_value=tables.parse(text)):

        def block_m(M: int, dtype: torch.dtype = torch.bfloat16, N: int = 3072) -> int:
            return calculate_settings("glu", M, N, 768, dtype, "cuda").block_m

        assert [block_m(M) for M in (1, 64, 65, 512, 9999)] == [16, 16, 128, 128, 128]
        other = heuristic.settings("glu", 64, 3072, 768, torch.float16, "tma", UNKNOWN).block_m
        assert block_m(64, torch.float16) == other
        assert block_m(64, N=3088) == heuristic.settings("glu", 64, 3088, 768, torch.bfloat16, "tma", UNKNOWN).block_m


def test_a_tma_row_does_not_serve_misaligned_operands():
    row = {"op": "glu", "dtype": "bfloat16", "precision": "", "N": 3072, "K": 768, "M": 64}
    text = json.dumps({"rows": [{**row, "settings": {"family": "tma"}}]})
    with on(UNKNOWN), mock.patch.object(tables, "load", return_value=tables.parse(text)):
        assert calculate_settings("glu", 64, 3072, 768, torch.bfloat16, "cuda", tma=False).family == "pointer"


@pytest.mark.parametrize(
    "settings_row,op",
    [({"family": "tma", "tile": 3}, "glu"), ({"family": "cuda"}, "glu"), ({"family": "tma"}, "gemm")],
)
def test_a_broken_table_says_which_row(settings_row, op):
    row = {"op": op, "dtype": "bfloat16", "precision": "", "N": 1, "K": 1, "M": 1, "settings": settings_row}
    with pytest.raises(ValueError, match="settings table.*row"):
        tables.parse(json.dumps({"rows": [row]}))


@pytest.mark.parametrize("name", TABLES)
def test_shipped_tables_parse(name):
    table = tables.load(name.removesuffix(".json"))
    assert table
    for rows in table.values():
        assert [row.M for row in rows] == sorted({row.M for row in rows})
        assert all(isinstance(row.settings, Settings) for row in rows)


def test_the_heuristic_stays_near_the_measured_best():
    """Of what the sweeps timed on an H200, its choice is within 8 % of the best at the median, within 4 % by the mean
    of each kernel, and nowhere 30 % behind."""
    found = distances(sorted((ROOT / "bench/results/h200").glob("sweep*.json")))
    shapes = len(found.found) + len(found.unmeasured) + len(found.unswept)
    assert len(found.unswept) < 0.15 * shapes
    assert len(found.found) > 0.9 * (shapes - len(found.unswept))
    assert found.median < 1.08
    assert max(d.ratio for d in found.found) < 1.3
    for op in {d.op for d in found.found}:
        assert statistics.geometric_mean(d.ratio for d in found.found if d.op == op) < 1.04, op


def test_slugs():
    assert device.slug_of("NVIDIA H200") == "nvidia-h200"
    assert device.slug_of("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


def test_small_shared_memory_means_pointer_kernels():
    """Consumer GPUs of compute capability 12.x have TMA, but not the shared memory that its tiles count on."""
    consumer = DeviceInfo("nvidia-geforce", (12, 0), 170, shared=101_376)
    with on(consumer):
        found = calculate_settings("glu", 8192, 9216, 2304, torch.bfloat16, "cuda")
    assert found.family == "pointer"


def test_a_lone_layer_that_cublas_serves_best_goes_the_eager_way():
    """float32 on a GPU: our pointwise kernel beside cuBLAS would be as many launches as eager's."""
    from support.aot import DEVICES, pretended

    from fusedmlp import explain_plan, linear_act

    def note(**forced):
        x, weight = (torch.empty(64, 32, device="meta", requires_grad=True) for _ in range(2))
        with settings.override(**forced), pretended(DEVICES["nvidia-h200"]):
            return explain_plan(linear_act, x, weight, None, "gelu").notes[0]

    assert note().path == "eager"
    assert "cuBLAS" in note().reason
    assert note(family="pair").path == note(family="pointer").path == "fused"
