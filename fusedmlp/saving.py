"""How much of the hidden layer a forward keeps for its backward: levels, each with all that the one below keeps.

What is kept is *spent* in a backward that does not retain the graph: PyTorch frees it next, and until then results may
be written over it, as AOTAutograd does with donated buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

INPUT = 0  # nothing of it: backward makes it again from the operation's input
HIDDEN = 1  # what backward needs: of gated MLPs gate and up, of other layers what their activation is undone with
ACTIVATION = 2  # of gated MLPs act(gate) * up as well, which backward makes and stores again otherwise


def level(recompute: bool, keep_activation: bool = False) -> int:
    """The level that the two options of a call stand for.

    Raises:
        ValueError: both are set.
    """
    if recompute and keep_activation:
        raise ValueError(
            "recompute=True and keep_activation=True contradict each other: the first keeps only the input for the "
            "backward, the second the hidden activation too; set one of them, or neither to keep gate and up"
        )
    if keep_activation:
        return ACTIVATION
    return INPUT if recompute else HIDDEN


# PyTorch has no public names for these two.
_hooks = torch._C._autograd._top_saved_tensors_default_hooks
graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph  # True, too, outside a backward


def unseen() -> bool:
    """Whether what is saved now goes through no hooks (offloading, checkpointing), which may hold on to it.

    Hooks that a node's ``_raw_saved_tensors`` are given later are not seen.
    """
    return _hooks(True) is None


def mark_spent(tensor: Tensor) -> None:
    """Let autograd refuse a tensor that was saved, should another backward ask for it: one that is run again after it
    failed, or of somebody who took it from ``grad_fn.saved_tensors``."""
    torch.autograd.graph.increment_version(tensor)
