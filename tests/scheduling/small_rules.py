"""Made-up grammars over the made-up model's tokens, and requests that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

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


def with_runs(tokens: Sequence[int]) -> set[int]:
    """As `changing`, but after each token below 5 the next tokens, as many as it says, are forced."""
    left = 0
    for number, token in enumerate(tokens):
        left = left - 1 if left else token if token < 5 else 0
        last = number
    return {(7 * last + tokens[last]) % VOCAB} if left else changing(tokens)


class Masks:
    """Notes which masks are made, in which calls; those of slow rules are made when a test says so.

    Attributes:
        calls: how many masks each call made.
        begun: masks that are being made "in a thread".
    """

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.begun: list[tuple[Rules, Future[None]]] = []

    def make(self, rules: Sequence[Rules]) -> None:
        self.calls.append(len(rules))
        for each in rules:
            each.look_ahead()

    def begin(self, rules: Rules) -> Future[None]:
        made: Future[None] = Future()
        made.set_running_or_notify_cancel()
        self.begun.append((rules, made))
        return made

    def finish(self) -> None:
        """Make the masks that were begun."""
        for rules, made in self.begun:
            rules.look_ahead()
            made.set_result(None)
        self.begun.clear()


class Rules:
    """A grammar that makes its mask when `Masks` says so, or a test's mistake reads it before."""

    waits = True

    def __init__(self, follows: Follows, masks: Masks) -> None:
        self._follows = follows
        self._tokens: list[int] = []
        self.masks = masks
        self.is_slow = False
        self.error: str | None = None
        self.look_ahead()

    @property
    def grammar(self) -> Rules:
        return self

    def look_ahead(self) -> None:
        self._following = self._follows(self._tokens)
        self.is_ready = True

    @property
    def complete(self) -> bool:
        return not self._follows(self._tokens)

    @property
    def mask(self) -> np.ndarray:
        assert self.is_ready, "the mask is read before it is made"
        return np.array([sum(1 << token for token in self._following)], np.int32)

    def accept(self, token: int) -> None:
        assert token in self._follows(self._tokens), f"{token} cannot follow {self._tokens}"
        self._tokens.append(token)
        self.is_ready = False

    def forced(self) -> list[int]:
        run: list[int] = []
        while len(following := self._follows([*self._tokens, *run])) == 1:
            run += following
        return run

    def restart(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self.is_ready = False

    def copy(self) -> Rules:
        twin = Rules(self._follows, self.masks)
        twin._tokens = list(self._tokens)
        twin.look_ahead()
        return twin


def constrained_request(
    prompt: int | list[int], max_tokens: int, follows: Follows = changing, masks: Masks | None = None, **params
) -> Request:
    shape = StructuredOutputsParams(regex="of the made-up model")
    request = make_request(prompt, max_tokens, structured_outputs=shape, **params)
    for seq in request.sequences:
        seq.grammar = Rules(follows, masks or Masks())
    return request


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
