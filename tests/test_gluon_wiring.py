"""What the launchers hand to the warp-specialised kernels: recorded on meta tensors, as on an H200."""

from __future__ import annotations

import pytest
import torch
from support.aot import DEVICES, Recorded, pretended
from support.gluon import needs_gluon
from torch import Tensor

from fusedmlp import explain_plan, functional, settings

M, D, H = 2048, 1024, 4096
H200 = DEVICES["nvidia-h200"]


def weight(rows: int, columns: int, room: int = 0) -> Tensor:
    """With room for that many elements between its rows."""
    made = torch.empty(rows, columns + room, dtype=torch.bfloat16, device="meta")
    return made[:, :columns].detach().requires_grad_()


def step(biases: bool = False, gate_room: int = 0, up_room: int = 0, **forced) -> list[Recorded]:
    """The launches of ours of a gated and a two-layer training step."""
    x = weight(M, D)
    gate, up, down = weight(H, D, gate_room), weight(H, D, up_room), weight(D, H)
    b, b_out = (weight(1, H)[0], weight(1, D)[0]) if biases else (None, None)
    with pretended(H200) as recorded, settings.override(**forced):
        for y in (
            functional.glu_mlp(x, gate, up, down, b, b, b_out, "gelu_tanh"),
            functional.mlp(x, gate, down, b, b_out, "gelu_tanh"),
        ):
            y.backward(torch.empty_like(y))
    return [launch for launch in recorded if launch.name.endswith("_gluon")]


def gated_step(biases: bool, keep_activation: bool, **forced) -> list[Recorded]:
    """The launches of ours of a gated training step."""
    b, b_out = (weight(1, H)[0], weight(1, D)[0]) if biases else (None, None)
    operands = weight(M, D), weight(H, D), weight(H, D), weight(D, H), b, b, b_out
    with pretended(H200) as recorded, settings.override(**forced):
        y = functional.glu_mlp(*operands, "gelu_tanh", keep_activation=keep_activation)
        y.backward(torch.empty_like(y))
    return recorded


def named(launches: list[Recorded], name: str) -> list[Recorded]:
    found = [launch for launch in launches if launch.name == name]
    assert found
    return found


@needs_gluon
@pytest.mark.parametrize("gate_room, up_room", [(0, 1024), (8, 0), (16, 8)])
def test_gate_and_up_are_each_described_by_their_own_rows(gate_room, up_room):
    launches = step(gate_room=gate_room, up_room=up_room)
    (gated,) = [launch for launch in named(launches, "hidden_forward_gluon") if 2 in launch.tiles]
    assert gated.tiles[1].strides == (D + gate_room, 1)
    assert gated.tiles[2].strides == (D + up_room, 1)
    (grads,) = named(launches, "glu_grads_gluon")
    assert (grads.tiles[2].strides, grads.tiles[3].strides) == ((D + gate_room, 1), (D + up_room, 1))


@needs_gluon
@pytest.mark.parametrize("forced", [{"parts": 1}, {"block_n": 256, "parts": 1}, {"stages": 1}], ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_rings_have_two_places_at_least(forced, biases):
    """With one, a warpgroup would wait for what comes into the place that it gives back afterwards."""
    launches = step(biases, **forced)
    assert len(named(launches, "hidden_backward_gluon")) == 2
    for launch in launches:
        constants = launch.named_constants
        assert constants["STAGES"] >= 2
        assert constants.get("SLOTS", 2) >= 2


@needs_gluon
@pytest.mark.parametrize("stages, gated, alone", [(4, 4, 8), (5, 2, 4), (6, 2, 2)])
def test_chunks_take_the_room_that_operands_leave(stages, gated, alone):
    """A stage is 32 KB of the 227, a chunk of gate and up 8, of one alone 4, in each of two warpgroups."""
    forced = {"family": "gluon", "block_m": 128, "block_n": 128, "block_k": 64, "parts": 4, "stages": stages}
    backward = named(step(**forced), "hidden_backward_gluon")
    assert [launch.named_constants["SLOTS"] for launch in backward] == [gated, alone]


@needs_gluon
def test_a_grid_behind_a_barrier_is_resident():
    for ctas in (1, 2):
        for launch in named(step(True, ctas_per_sm=ctas), "hidden_backward_gluon"):
            assert dict(launch.options)["launch_cooperative_grid"]
            assert launch.grid <= H200.sms
    assert not any(dict(launch.options).get("launch_cooperative_grid") for launch in step())


def test_the_stand_in_of_weights_that_lie_apart_is_named():
    """Row strides that differ: one descriptor cannot span both, so that the pointer kernel runs."""
    x, gate, up, down = weight(64, D), weight(H, D), weight(H, D, 8), weight(D, H)
    with pretended(H200), settings.override(family="tma"), torch.no_grad():
        (note,) = explain_plan(functional.glu_mlp, x, gate, up, down).notes
    assert "forward: pointer" in note.settings and "[pointer" in note.forward[0]
    assert "dgrad: pointer" in note.settings and "[pointer" in note.backward[2]  # behind dWdown


@pytest.mark.parametrize("family", [pytest.param("gluon", marks=needs_gluon), "tma", "pointer", "pair"])
@pytest.mark.parametrize("biases", [False, True])
def test_a_kept_activation_is_not_stored_again(family, biases):
    """The launches of the default, of which the one back to the hidden layer stores no activation."""
    by_default, kept = (gated_step(biases, keep, family=family) for keep in (False, True))
    assert [launch.name for launch in kept] == [launch.name for launch in by_default]
    back = {"pair": "glu_act_backward", "gluon": "hidden_backward_gluon"}.get(family, f"glu_backward_{family}")
    for launches, stored in ((by_default, True), (kept, False)):
        (launch,) = named(launches, back)
        assert launch.named_constants["STORE_H"] is stored
    others = [[launch for launch in launches if launch.name != back] for launches in (by_default, kept)]
    assert others[0] == others[1]
    if family == "gluon":
        (grads,) = named(kept, "glu_grads_gluon")
        assert grads.tiles[8].shape == (M, H) and grads.tiles[8].strides == (H, 1)
