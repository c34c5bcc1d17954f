"""How much of the hidden layer a forward keeps for its backward: levels, each with all that the one below keeps."""

from __future__ import annotations

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
