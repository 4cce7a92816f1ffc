"""What a step's arrays say where layers keep only part of a prompt: how far its tokens have moved up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.memory.layout import PoolLayout
from jpaged.memory.policies import PromptBudget
from jpaged.scheduling.step import Chunk


class KeptBatch(NamedTuple):
    """Beside a `StepBatch`; groups come in the pool layout's order.

    Attributes:
        dropped: tokens of each sequence's prompt that a group keeps no more; its tokens lie so many slots before
            their positions.
        ending: sequences of the batch whose prompt ends with this step and is longer than some group keeps; the
            places behind them hold -1.
    """

    dropped: Int[HostOrDevice, "groups seqs"]
    ending: Int[HostOrDevice, " seqs"]


def prompt_budgets(layout: PoolLayout) -> tuple[int, ...]:
    """Tokens of a prompt that each group keeps; nothing where groups keep all."""
    policies = (group.spec.policy for group in layout.groups)
    return tuple(policy.budget for policy in policies if isinstance(policy, PromptBudget))


def kept_batch(chunks: Sequence[Chunk], budgets: tuple[int, ...], seqs: int) -> KeptBatch:
    """The arrays of a step, padded to `seqs` sequences."""
    dropped = np.zeros((len(budgets), seqs), np.int32)
    prompts = np.array([chunk.seq.num_prompt for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    stops = starts + np.array([chunk.length for chunk in chunks], np.int32)
    too_long = np.maximum(0, prompts - np.array(budgets, np.int32)[:, None])
    dropped[:, : len(chunks)] = np.where(starts >= prompts, too_long, 0)
    ending = np.full(seqs, -1, np.int32)
    (rows,) = np.nonzero((starts < prompts) & (stops == prompts) & (prompts > min(budgets)))
    ending[: len(rows)] = rows
    return KeptBatch(dropped, ending)
