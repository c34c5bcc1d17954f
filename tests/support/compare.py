"""The accuracy rule: an error against fp64 of at most 1.25x that of eager PyTorch in the same dtype, plus
1e-6.

The error is the relative Frobenius norm of the difference to an fp64 copy. Three points make the rule usable
at every size without making it lax at the sizes that matter:

* Yardstick. A tiny result may be exact in eager by luck, so the yardstick is the larger of eager's error and
  the error of rounding the fp64 result to the dtype once.
* Noise. With few independent roundings the ratio of two error norms is itself random (for n roundings of the
  order of 1/sqrt(n)), so below `PLENTY` roundings the factor grows by NOISE / sqrt(n), and the yardstick is
  at least one unit roundoff. From `PLENTY` on the factor is 1.25, without allowance.
* NaN and inf must stand exactly where eager has them; errors are taken over the finite rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FACTOR = 1.25
ADDED = 1e-6
PLENTY = 4096
NOISE = 4.0
UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}


class InaccurateError(AssertionError):
    """Shape, dtype and NaN pattern are right; the error is above the limit."""


def relative_error(value: Tensor, exact: Tensor, where: Tensor | None = None) -> float:
    """Frobenius norm of value - exact over that of exact, both in fp64; absolute where exact is all zero."""
    value, exact = value.detach().double(), exact.detach().double()
    if where is not None:
        value, exact = value[where], exact[where]
    scale = exact.norm().item()
    return (value - exact).norm().item() / (scale if scale > 0 else 1.0)


def allowed_error(eager: Tensor, exact: Tensor, where: Tensor | None = None, roundings: int | None = None) -> float:
    """The largest error permitted; `roundings`: how many independent roundings stand behind the tensor."""
    count = exact.numel() if roundings is None else min(roundings, exact.numel())
    yardstick = max(relative_error(eager, exact, where), relative_error(exact.to(eager.dtype), exact, where))
    if count >= PLENTY:
        return FACTOR * yardstick + ADDED
    yardstick = max(yardstick, UNIT_ROUNDOFF[eager.dtype])
    return FACTOR * (1 + NOISE / math.sqrt(max(count, 1))) * yardstick + ADDED


def _check_form(name: str, ours: Tensor, eager: Tensor) -> None:
    given = (tuple(ours.shape), ours.dtype, ours.device)
    wanted = (tuple(eager.shape), eager.dtype, eager.device)
    if given != wanted:
        raise AssertionError(f"{name}: shape, dtype, device are {given}, eager has {wanted}")


def _check_nonfinite(name: str, ours: Tensor, eager: Tensor, exact: Tensor, only_more: bool) -> None:
    kinds = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    if only_more:
        surplus = ~torch.isfinite(ours) & torch.isfinite(eager)
        hidden = torch.isfinite(ours) & ~torch.isfinite(eager) & ~torch.isfinite(exact.to(eager.dtype))
        wrong = {"not finite where eager is": surplus, "finite where eager and fp64 are not": hidden}
    else:
        wrong = {f"{kind} in ours and not in eager": test(ours) & ~test(eager) for kind, test in kinds.items()}
        wrong |= {f"{kind} in eager and not in ours": test(eager) & ~test(ours) for kind, test in kinds.items()}
    for what, mask in wrong.items():
        if mask.any():
            first = tuple(mask.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {what}, {int(mask.sum())} of {mask.numel()} entries, first at {first}: "
                f"ours {ours[first].item()}, eager {eager[first].item()}, fp64 {exact[first].item()}"
            )


def assert_matches(
    name: str,
    ours: Tensor | None,
    eager: Tensor | None,
    exact: Tensor | None,
    *,
    roundings: int | None = None,
    only_more_nonfinite: bool = False,
) -> None:
    """Apply the rule to one tensor; None (no gradient) must stand where eager has None.

    only_more_nonfinite: for extreme inputs, where eager's own formula may overflow: ours must be finite
    wherever eager is, and may be finite where only eager, and not fp64, left the range.
    """
    if ours is None or eager is None or exact is None:
        if ours is not None or eager is not None:
            raise AssertionError(f"{name}: is {_presence(ours)}, eager has {_presence(eager)}")
        return
    _check_form(name, ours, eager)
    if ours.numel() == 0:
        return
    ours, eager, exact = ours.detach(), eager.detach(), exact.detach().double()
    _check_nonfinite(name, ours, eager, exact, only_more_nonfinite)
    where = torch.isfinite(ours) & torch.isfinite(eager) & torch.isfinite(exact)
    error, limit = relative_error(ours, exact, where), allowed_error(eager, exact, where, roundings)
    if not error <= limit:
        at = int((ours.double() - exact).abs().where(where, 0).argmax())
        raise InaccurateError(
            f"{name} {tuple(ours.shape)} {ours.dtype}: relative error {error:.3e}, allowed {limit:.3e} "
            f"(eager {relative_error(eager, exact, where):.3e}); worst entry {at}: "
            f"ours {ours.flatten()[at].item():.9g}, eager {eager.flatten()[at].item():.9g}, "
            f"fp64 {exact.flatten()[at].item():.9g}"
        )


def _presence(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
