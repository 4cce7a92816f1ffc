"""The device's half of the work: writes vectors to the pool before the tokens that get them are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from held_kind.holds import Steering, Write

from jpaged.execution import Runner


def write(runner: Runner, writes: Sequence[Write]) -> None:
    """Write vectors to their blocks, each as the bytes of a block."""
    groups = runner.spec.layout.groups
    (number,) = (g for g, plan in enumerate(groups) if isinstance(plan.spec.policy, Steering))
    for vectors, stored in writes:
        contents = np.ascontiguousarray(vectors.numbers, np.float32).view(np.uint8)[None]
        padding = groups[number].block_bytes - contents.shape[2]
        runner.worker.load_blocks(number, stored.blocks, np.pad(contents, ((0, 0), (0, 0), (0, padding))))
