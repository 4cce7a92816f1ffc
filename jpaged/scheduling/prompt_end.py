"""Where the end of a prompt lies in its chunks, for layers that choose there which of its tokens they keep."""

from __future__ import annotations

from jpaged.scheduling.request import Sequence


def tokens_before_end(seq: Sequence, most: int, tail: int) -> int:
    """Return how many of a sequence's next `most` tokens one chunk may take.

    A chunk ends with the prompt, and the last `tail` tokens of a prompt (all of a shorter one) are computed together,
    so that one step has their queries. 0 where `most` are too few for that.

    Args:
        tail: what the layers' policies ask for, see `Policy.prompt_tail`; 0 = chunks end anywhere. It is at most what
            one prompt gets in a step, however many decodes there are.
    """
    rest = seq.num_prompt - seq.num_computed
    if tail == 0 or rest <= 0:
        return most
    return rest if most >= rest else max(0, min(most, rest - tail))
