"""Attaches grammars and stop-string searches to sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jpaged.scheduling import Request
from jpaged.scheduling.hooks import TokenRules
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.grammar import Grammar, GrammarCompiler
from jpaged.text.masks import MaskMaker
from jpaged.text.thought_budget import ThoughtForms


class TokenHooks:
    """Makes the hooks of one engine's requests; any number of threads may ask at once.

    Args:
        tokenizer: a transformers tokenizer; None where the model has none.
        vocab_size: ids of tokens that can be drawn are below it.
        eos_ids: tokens that end a sequence unless it ignores them.
        opening: a mark that must be one of those by which thoughts begin; "" = none.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int], opening: str = "") -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_ids)
        self._thoughts = ThoughtForms(tokenizer, opening)

    def prepare(self) -> None:
        """Do now what the first request with structured_outputs would do, and hold the interpreter for a second."""
        with contextlib.suppress(ValueError):  # the first request with a grammar raises it
            self._grammars.prepare()

    def attach(self, request: Request, *, streamed: bool) -> None:
        """Give the request's sequences their hooks.

        Raises:
            ValueError: the tokenizer cannot be used for the request's settings.
        """
        params = request.params
        sequences = [seq for part in request.all_requests for seq in part.sequences]
        rules = self._rules(request)
        if rules is not None:
            for seq in sequences:
                seq.grammar = rules if seq.index == 0 else rules.copy()
        if self._tokenizer is None or not params.detokenize or not (streamed or params.stop_strings):
            return
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise ValueError(
                f"stop strings and streams need a tokenizer with a tokenizer.json, not {type(self._tokenizer).__name__}"
            )
        if params.stop_strings:
            for seq in sequences:
                seq.stop_search = Detokenizer(self._tokenizer, params, request.prompt_token_ids)

    def attach_again(self, request: Request) -> None:
        """Give the sequences of a request that was saved their hooks, and show these the tokens that are there.

        Raises:
            ValueError: see `attach`.
        """
        self.attach(request, streamed=False)
        for seq in (seq for part in request.all_requests for seq in part.sequences):
            if seq.grammar is not None:
                seq.grammar.restart(seq.output_token_ids)
            if seq.stop_search is not None:
                hidden = seq.num_output > 0 and request.hides_last(seq, seq.finish_reason)
                found = seq.stop_search.push(seq.token_ids[seq.num_prompt : len(seq.token_ids) - hidden])
                # An abort keeps the text unchanged; every other end settles it.
                if found is None and seq.finished and (seq.finish_reason, seq.stop_reason) != ("abort", None):
                    seq.stop_search.finish()

    def _rules(self, request: Request) -> TokenRules | None:
        """Make the rules that say which tokens of the request may come; None if there are none."""
        params = request.params
        shape = None if params.structured_outputs is None else self._shape(request, params.structured_outputs)
        if params.thinking_token_budget is None:
            return shape
        return self._thoughts.budget(request, self._vocab_size, shape)

    def _shape(self, request: Request, structure: StructuredOutputsParams) -> Grammar | CombinedRules:
        """Make the rules of the request's shape, without the tokens that its other parameters forbid."""
        grammar, params = self._grammars.compile(structure), request.params
        if not (params.min_tokens or params.ignore_eos or request.bad_words or request.allowed_mask is not None):
            return grammar
        limits = Limits(
            self._vocab_size,
            allowed=request.allowed_mask,
            bad_words=request.bad_words,
            never=self._eos_ids if params.ignore_eos else (),
            late=request.stop_ids,
            min_tokens=params.min_tokens,
            endings=self._eos_ids,
        )
        return CombinedRules(grammar, limits)


class Limits:
    """Tokens that a request forbids in addition to its grammar.

    Args:
        vocab_size: number of the model's logits.
        allowed: packed bits of the only tokens that may come; None = all.
        bad_words: token sequences that the output cannot hold.
        never: tokens that never come: end-of-sequence where it is ignored.
        late: tokens that do not come before `min_tokens`.
        endings: tokens that a grammar allows where its text is complete.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Int[np.ndarray, " words"] | None,
        bad_words: Sequence[tuple[int, ...]],
        never: Collection[int],
        late: Collection[int],
        min_tokens: int,
        endings: Collection[int],
    ) -> None:
        always = np.full(-(-vocab_size // 32), -1, np.int32) if allowed is None else allowed
        banned = [*never, *(word[0] for word in bad_words if len(word) == 1)]
        self._always = always & ~packed_bits(banned, vocab_size)
        self._early = self._always & ~packed_bits(late, vocab_size)
        self._min_tokens = min_tokens
        self._phrases = [word for word in bad_words if len(word) > 1]
        self.endings = packed_bits(endings, vocab_size)

    def mask(self, tokens: Sequence[int]) -> Int[np.ndarray, " words"]:
        """Return packed bits of the tokens that may come after `tokens`, which were generated."""
        mask = self._early if len(tokens) < self._min_tokens else self._always
        lasts = [last for *before, last in self._phrases if tokens[-len(before) :] == before]
        if lasts:
            mask = mask.copy()
            for token in lasts:
                mask[token // 32] &= np.int32(~np.uint32(1 << token % 32).astype(np.int32))
        return mask


class CombinedRules:
    """Follows one sequence's tokens: a grammar and limits, whose masks are combined on the host.

    Where they leave no token, the text has ended if the grammar's is complete there, and cannot go on if not.

    Attributes:
        grammar: the grammar alone.

    Raises:
        ValueError: the grammar and the limits leave no token for the first place.
    """

    waits = True

    def __init__(self, grammar: Grammar, limits: Limits) -> None:
        self.grammar = grammar
        self._limits = limits
        self._tokens: list[int] = []
        self._combined: tuple[Int[np.ndarray, " words"], bool, str | None] | None = None
        if not self.mask.any():
            raise ValueError(
                "structured_outputs, allowed_token_ids, bad_words, min_tokens and ignore_eos together leave no token "
                "that the output could begin with"
            )

    @property
    def masks(self) -> MaskMaker:
        return self.grammar.masks

    @property
    def is_ready(self) -> bool:
        return self.grammar.is_ready

    @property
    def is_slow(self) -> bool:
        return self.grammar.is_slow

    @property
    def mask(self) -> Int[np.ndarray, " words"]:
        return self._combine()[0]

    @property
    def complete(self) -> bool:
        return self._combine()[1]

    @property
    def error(self) -> str | None:
        return self._combine()[2]

    def copy(self) -> CombinedRules:
        """Return independent rules at the same place."""
        twin = object.__new__(CombinedRules)
        twin.grammar, twin._limits, twin._tokens = self.grammar.copy(), self._limits, self._tokens.copy()
        twin._combined = self._combined
        return twin

    def accept(self, token: int) -> None:
        """Go on by a token of the mask."""
        self.grammar.accept(token)
        self._tokens.append(token)
        self._combined = None

    def restart(self, tokens: Sequence[int]) -> None:
        """Follow `tokens` from the beginning, and forget tokens accepted before."""
        self.grammar.restart(tokens)
        self._tokens = list(tokens)
        self._combined = None

    def forced(self) -> list[int]:
        """Return tokens that come next whatever the model says, as far as the limits allow them."""
        tokens, run = self._tokens.copy(), []
        for token in self.grammar.forced():
            if not self._limits.mask(tokens)[token // 32] >> (token % 32) & 1:
                break
            run.append(token)
            tokens.append(token)
        return run

    def _combine(self) -> tuple[Int[np.ndarray, " words"], bool, str | None]:
        """Return the mask with the limits, whether the text is complete, and the error."""
        if self._combined is None:
            mask = self.grammar.mask & self._limits.mask(self._tokens)
            complete, error = self.grammar.complete, self.grammar.error
            if not (complete or error is not None or mask.any()):
                complete = bool((self.grammar.mask & self._limits.endings).any())
                if not complete:
                    error = (
                        "structured_outputs needs a token here that allowed_token_ids, bad_words or min_tokens forbid"
                    )
            self._combined = mask, complete, error
        return self._combined


def packed_bits(tokens: Iterable[int], vocab_size: int) -> Int[np.ndarray, " words"]:
    """Return the bits of `tokens`, 32 tokens a word, lowest bit first."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
