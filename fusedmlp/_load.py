"""``load_state_dict`` that leaves the layer untouched where it fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class CheckedLoad(nn.Module):
    """A module whose ``load_state_dict`` looks at every name and shape before it writes a tensor."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; a failing call changes nothing.

        Raises:
            RuntimeError: names are missing or surplus (with ``strict``) or shapes differ; the message lists
                them.
        """
        if isinstance(state_dict, Mapping) and all(map(_loads_as_usual, self.modules())):
            _check(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _loads_as_usual(module: nn.Module) -> bool:
    """Whether the module takes its tensors by name and shape alone: hooks may rename or convert."""
    hooked = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    return not hooked and type(module)._load_from_state_dict is nn.Module._load_from_state_dict


def _check(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    own = module.state_dict(keep_vars=True)
    problems = []
    missing = [k for k in own if k not in state_dict]
    surplus = [k for k in state_dict if k not in own]
    if strict and missing:
        problems.append(f"Missing key(s) in state_dict: {', '.join(missing)}.")
    if strict and surplus:
        problems.append(f"Unexpected key(s) in state_dict: {', '.join(surplus)}.")
    for key, mine in own.items():
        theirs = state_dict.get(key)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and mine.shape != theirs.shape:
            problems.append(f"size mismatch for {key}: got {list(theirs.shape)}, the layer has {list(mine.shape)}.")
    if problems:
        allowed = ", ".join(f"{k} {list(v.shape)}" for k, v in own.items() if isinstance(v, Tensor))
        lines = "\n\t".join([*problems, f"The layer takes: {allowed}. Nothing was loaded."])
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{lines}")
