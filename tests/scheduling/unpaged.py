"""The tokens of a request that has a device to itself, without paging or batching: what others are compared with.

KV at a position is a name that depends on everything its layers read. The next token is a pure function of the last
name, so whatever is read in the wrong place changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import reduce

from jpaged.memory import (
    GroupSpec,
    ImageFeatures,
    NoTable,
    PromptBudget,
    SlidingWindow,
    StateCheckpoints,
)
from jpaged.memory.policies import VerifiedStates
from jpaged.scheduling import BeamSearch, Request
from jpaged.scheduling.beam import Hypothesis
from jpaged.scheduling.top_tokens import TokenRanking

VOCAB = 13

Model = Callable[[Hashable], int]


def hash_model(name: Hashable) -> int:
    """A next token that any change of an earlier token is likely to change."""
    return hash(("next", name)) % VOCAB


def draw(model: Model, name: Hashable, index: int) -> int:
    """The next token of a request's output number `index`: each has a random stream of its own."""
    return model(name if index == 0 else hash((name, index)))


def allowed(token: int, mask: int | None) -> int:
    """The first token from `token` on whose bit is set; with no mask, or an empty one, the token itself."""
    if not mask:
        return token
    return next(other % VOCAB for other in range(token, token + VOCAB) if mask >> other % VOCAB & 1)


def most_likely(name: Hashable, num_top: int) -> TokenRanking:
    """Made-up log-probabilities of the tokens that may follow, the best first, no two alike."""
    scores = {token: -((hash((name, token)) % 997) + token / VOCAB) / 997 for token in range(VOCAB)}
    tokens = sorted(scores, key=lambda token: -scores[token])[:num_top]
    return TokenRanking(1, tokens, [scores[token] for token in tokens])


def is_images(spec: GroupSpec) -> bool:
    return isinstance(spec.policy, ImageFeatures)


def keeps_no_tokens(spec: GroupSpec) -> bool:
    """Whether it holds something else than what layers keep of tokens, or states for another group."""
    return isinstance(spec.policy, NoTable) or is_ring(spec)


def feature(digest: bytes, number: int) -> int:
    """One of an image's features, as a token."""
    return hash((digest, number))


def is_state(spec: GroupSpec) -> bool:
    return isinstance(spec.policy, StateCheckpoints)


def is_ring(spec: GroupSpec) -> bool:
    """Whether it holds the running states of the group before it, one behind each token that is verified."""
    return isinstance(spec.policy, VerifiedStates)


def next_state(state: Hashable, name: Hashable) -> Hashable:
    """Return what a recurrent layer keeps when one more token has been computed."""
    return hash(("state", state, name))


def first_read(spec: GroupSpec, position: int) -> int:
    """The first position that a query at `position` sees."""
    return max(0, position - spec.policy.window + 1) if isinstance(spec.policy, SlidingWindow) else 0


def num_dropped(spec: GroupSpec, num_prompt: int, position: int) -> int:
    """Tokens of a prompt that a query at `position` finds no more in this group."""
    dropped = num_prompt - spec.policy.budget if isinstance(spec.policy, PromptBudget) else 0
    return max(0, dropped) if position >= num_prompt else 0


def kept_names(spec: GroupSpec, names: list[Hashable]) -> list[Hashable]:
    """Return what a group with a budget keeps of a prompt: some choice that all its names have a part in."""
    by_score = sorted(range(len(names)), key=lambda position: hash((names[position], names[-1])))
    return [names[position] for position in sorted(by_score[: spec.policy.budget])]


def seen_names(spec: GroupSpec, names: list[Hashable], num_prompt: int) -> tuple[Hashable, ...]:
    """Return the tokens that the next one's query sees, or the state of all, on a device without paging."""
    if is_state(spec):
        return (reduce(next_state, names, None),) if names else ()
    if num_dropped(spec, num_prompt, len(names)):
        return (*kept_names(spec, names[:num_prompt]), *names[num_prompt:])
    return tuple(names[first_read(spec, len(names)) :])


def last_name(tokens: list[int], groups: list[GroupSpec], num_prompt: int) -> Hashable:
    """KV of the last of `tokens`, on a device without paging."""
    names: list[Hashable] = []
    for token in tokens:
        names.append(hash((token, tuple(seen_names(spec, names, num_prompt) for spec in groups))))
    return names[-1]


def alone_beams(request: Request, groups: list[GroupSpec]) -> list[Hypothesis]:
    """Return what a beam request finds when every beam is computed anew from its tokens at every step."""
    search = BeamSearch(request.beam.params, request.beam.max_tokens, request.eos_ids)
    outputs: list[list[int]] = [[]]
    while outputs:
        prompt = request.prompt_token_ids
        names = [last_name([*prompt, *output], groups, len(prompt)) for output in outputs]
        going_on = search.advance(outputs, [most_likely(name, search.num_candidates) for name in names])
        outputs = [[*outputs[beam.parent], beam.token] for beam in going_on]
    return search.finished


def alone(
    request: Request,
    groups: list[GroupSpec],
    model: Model = hash_model,
    index: int = 0,
    show: Callable[[int, int], Hashable] = lambda position, token: token,
) -> tuple[list[int], str]:
    """(generated tokens, finish reason) of one output of a request that has a device to itself, without paging or
    batching; `show` says what the token at a position is to the model."""
    tokens, names = list(request.prompt_token_ids), []
    while True:
        for token in tokens[len(names) :]:
            read = tuple(seen_names(spec, names, len(request.prompt_token_ids)) for spec in groups)
            names.append(hash((show(len(names), token), read)))
        tokens.append(draw(model, names[-1], index))
        output = tokens[len(request.prompt_token_ids) :]
        if output[-1] in request.stop_ids and len(output) >= request.params.min_tokens:
            return output, "stop"
        if len(tokens) >= request.max_total_tokens:
            return output, "length"
