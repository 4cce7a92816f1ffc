"""What a user asks of beam search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpaged.checks import boolean, integer, number
from jpaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """How one request's beams are kept and when the search ends; the meaning of each is that of transformers.

    Attributes:
        beam_width: beams, and outputs. Each needs one of the engine's max_num_seqs places.
        max_tokens: most tokens of an output.
        length_penalty: an output's score is its log-probability over its length to this power; above 0 favours long
            ones; in [-50, 50].
        early_stopping: True ends with the first beam_width finished outputs; False when no running beam, were it to
            end now, would be better than the worst of them; "never" when none could become so by max_tokens.
        ignore_eos: go on after the model's end-of-sequence token.

    Raises:
        ValueError: naming the value that is out of its range.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            object.__setattr__(self, name, integer(name, getattr(self, name), low=1))
        penalty = number("length_penalty", self.length_penalty, low=-50.0, high=50.0)
        object.__setattr__(self, "length_penalty", penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping={self.early_stopping!r} is not True, False or 'never'")
        boolean("ignore_eos", self.ignore_eos)

    def sampling_params(self) -> SamplingParams:
        """What a beam request has in common with one of `beam_width` greedy outputs."""
        return SamplingParams(
            n=self.beam_width, temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )
