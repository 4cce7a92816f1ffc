"""Holds: pool blocks that a request takes in addition to the KV of its sequences, one file a kind.

`base` has the interface, `images` and `adapters` the two kinds, `kinds` all of a scheduler together. A further kind is
one subclass of `Held`, mostly of `HeldWhole`, in `KINDS`; a pool has it where one of its layer groups is of that kind.
"""

from jpaged.scheduling.held.base import Held, HeldWhole, Reach, SavedArrays, StepLimits, sure_tokens
from jpaged.scheduling.held.kinds import KINDS, Holds, PrefixName, made_by_weights

__all__ = [
    "KINDS",
    "Held",
    "HeldWhole",
    "Holds",
    "PrefixName",
    "Reach",
    "SavedArrays",
    "StepLimits",
    "made_by_weights",
    "sure_tokens",
]
