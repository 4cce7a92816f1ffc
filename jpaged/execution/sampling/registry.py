"""Lists the edits of logits and the truncations that a sampler applies, in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jpaged.execution.sampling.edit import Edit
from jpaged.execution.sampling.logit_edits import Bans, BiasAndPenalties, Masks
from jpaged.execution.sampling.truncations import MinP, Temperature, TopK, TopP
from jpaged.sampling_params import SamplingParams, parameters_of

TEMPERATURE = Temperature()

EDITS: list[Edit[Any]] = [BiasAndPenalties(), Bans(), Masks(), TEMPERATURE, MinP(), TopK(), TopP()]
"""All edits. The logits go through them one after the other, and the weights that a draw takes too. Programs that were
compiled keep the list of their time."""


def check_edits(edits: Sequence[Edit[Any]], params: type[SamplingParams] = SamplingParams) -> None:
    """Check that each parameter that edits logits or truncates is the own one of exactly one edit.

    A field that no edit reads would be accepted and ignored.

    Raises:
        TypeError: a field belongs to none, to two, or to an edit and another part; or the arrays of two edits have one
            name, by which messages to other processes know them. The message names it.
    """
    owners = Counter(name for edit in edits for name in edit.fields)
    for name, parameter in parameters_of(params).items():
        if parameter.part == "edit" and not owners[name]:
            raise TypeError(
                f"{params.__name__}.{name} is part of edit, and no class in EDITS of {__name__} has it in its fields"
            )
        if parameter.part != "edit" and owners[name]:
            raise TypeError(
                f"{params.__name__}.{name} is part of {parameter.part}, and a class in EDITS of {__name__} has it in "
                "its fields: its part must be edit"
            )
        if owners[name] > 1:
            raise TypeError(f"{params.__name__}.{name} is in the fields of {owners[name]} classes in EDITS, not of one")
    for name, count in Counter(edit.arrays.__name__ for edit in edits).items():
        if count > 1:
            raise TypeError(f"the arrays of {count} classes in EDITS are named {name}: each needs another name")


check_edits(EDITS)
