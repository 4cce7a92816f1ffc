"""What transformers on torch generates greedily, one prompt at a time, and how far it can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from transformers import PreTrainedModel

from jpaged import RequestOutput, SamplingParams

NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 23, 31, 33, 40, 57, 79)
"""Lengths of 16 prompts: around the borders of blocks of 8 and of windows of 7, and longer than both."""

_TIE = 1e-4


class Reference(NamedTuple):
    """Attributes:
    tokens: that torch generated.
    certain: how many of the first ones no rounding error can change: torch's two best logits are further
        apart than `_TIE` at each of them.
    logprob: sum of the tokens' log-probabilities.
    """

    tokens: list[int]
    certain: int
    logprob: float


def random_prompts(vocab_size: int = 211, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Prompts without special tokens, in an order that mixes long and short ones."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, int(length)).tolist() for length in rng.permutation(lengths)]


def torch_greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = NUM_TOKENS,
    guesses: Sequence[Sequence[int]] | None = None,
) -> list[Reference]:
    """A `Reference` each, with end-of-sequence ignored.

    Args:
        guesses: tokens that torch may well generate. Where it does, one call with all of them shows it, instead of one
            a token; a guess that is wrong anywhere is thrown away.
    """
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    guesses = [()] * len(prompts) if guesses is None else guesses
    with one_torch_thread():
        return [_one(model, *pair, num_tokens) for pair in zip(prompts, guesses, strict=True)]


def torch_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], outputs: Sequence[Sequence[int]]
) -> Float[np.ndarray, "outputs tokens"]:
    """Return the log-probabilities of the tokens of several outputs of one length behind a prompt."""
    ids = torch.tensor([[*prompt, *tokens] for tokens in outputs])
    with torch.inference_mode(), one_torch_thread():
        logprobs = model(ids).logits[:, len(prompt) - 1 : -1].double().log_softmax(-1)
    return logprobs.gather(2, ids[:, len(prompt) :, None])[..., 0].numpy()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """For tiny matrices: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _one(model: PreTrainedModel, prompt: Sequence[int], guess: Sequence[int], num_tokens: int) -> Reference:
    with torch.inference_mode():
        if len(guess) == num_tokens:
            ids = torch.tensor([[*prompt, *guess]])
            logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
            found = _reference(logits, list(guess))
            if logits.argmax(-1).tolist()[: found.certain] == found.tokens[: found.certain]:
                return found
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return _reference(torch.cat(out.logits).double(), out.sequences[0, len(prompt) :].tolist())


def _reference(logits: torch.Tensor, tokens: list[int]) -> Reference:
    """Return the reference of tokens that follow from their `logits`, ``[tokens, vocab]``."""
    best, second = logits.topk(2).values.T
    close = torch.nonzero(best - second < _TIE)
    certain = int(close[0]) if len(close) else len(tokens)
    logprob = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].sum()
    return Reference(tokens, certain, float(logprob))


def assert_same_tokens(
    outputs: Sequence[RequestOutput], references: Sequence[Reference], compared: float = 0.95
) -> None:
    """The first output of each prompt has its reference's tokens, see `assert_tokens`."""
    assert_tokens([output.outputs[0].token_ids for output in outputs], references, compared)


def assert_tokens(found: Sequence[Sequence[int]], references: Sequence[Reference], compared: float = 0.95) -> None:
    """Every token up to a reference's first tie is equal, and ties leave at least that share of the tokens to
    compare."""
    assert sum(r.certain for r in references) >= compared * sum(len(r.tokens) for r in references)
    for number, (tokens, reference) in enumerate(zip(found, references, strict=True)):
        assert len(tokens) == len(reference.tokens)
        assert tokens[: reference.certain] == reference.tokens[: reference.certain], f"prompt {number}"
