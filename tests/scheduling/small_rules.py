"""Made-up grammars over the made-up model's tokens, and requests that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from small_schedulers import make_request
from unpaged import VOCAB, allowed, draw, hash_model, last_name

from jpaged.memory import GroupSpec
from jpaged.scheduling import Request
from jpaged.structured_outputs import StructuredOutputsParams

Follows = Callable[[Sequence[int]], set[int]]
"""Returns the tokens that may follow some tokens; none = the text is complete."""


def changing(tokens: Sequence[int]) -> set[int]:
    """A mask that is another one after each token, so that one of the step before allows a wrong one."""
    return {token for token in range(VOCAB) if (token + sum(tokens) + len(tokens)) % 3}


class Rules:
    """A grammar; `error` and `complete` are set as a real one sets them."""

    def __init__(self, follows: Follows) -> None:
        self._follows = follows
        self._tokens: list[int] = []
        self.error: str | None = None
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.following = self._follows(self._tokens)
        self.complete = not self.following
        self.mask = np.array([sum(1 << token for token in self.following)], np.int32)

    def accept(self, token: int) -> None:
        assert token in self.following, f"{token} cannot follow {self._tokens}"
        self._tokens.append(token)
        self._look_ahead()

    def restart(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._look_ahead()

    def copy(self) -> Rules:
        twin = Rules(self._follows)
        twin.restart(self._tokens)
        return twin


def constrained(request: Request, follows: Follows = changing) -> Request:
    """Give each sequence of a request a grammar."""
    for seq in request.sequences:
        seq.grammar = Rules(follows)
    return request


def constrained_request(prompt: int | list[int], max_tokens: int, follows: Follows = changing, **params) -> Request:
    shape = StructuredOutputsParams(regex="of the made-up model")
    return constrained(make_request(prompt, max_tokens, structured_outputs=shape, **params), follows)


def constrained_alone(request: Request, groups: list[GroupSpec], follows: Follows = changing) -> list[list[int]]:
    """Return the tokens of each output when every mask is made before its draw, without paging or batching."""
    outputs = []
    for index in range(len(request.sequences)):
        tokens, output = list(request.prompt_token_ids), []
        while len(tokens) < request.max_total_tokens and (following := follows(output)):
            name = last_name(tokens, groups, len(request.prompt_token_ids))
            token = allowed(draw(hash_model, name, index), sum(1 << other for other in following))
            output.append(token)
            tokens.append(token)
        outputs.append(output)
    return outputs
