"""Gives sequences what looks at their tokens: the rules of a grammar, and the search for stop strings."""

from __future__ import annotations

import contextlib
from typing import Any

from jpaged.scheduling import Request
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.combined_rules import CombinedRules, Limits
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.grammar import Grammar, GrammarCompiler


class TokenHooks:
    """Makes the hooks of one engine's requests; any number of threads may ask at once.

    Args:
        tokenizer: a transformers tokenizer; None where the model has none.
        vocab_size: ids of tokens that can be drawn are below it.
        eos_ids: tokens that end a sequence unless it ignores them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_ids)

    def prepare(self) -> None:
        """Do now what the first request with structured_outputs would do, and hold the interpreter for a second."""
        with contextlib.suppress(ValueError):  # such a request will be told
            self._grammars.prepare()

    def attach(self, request: Request, *, streamed: bool) -> None:
        """Give the request's sequences their hooks.

        Raises:
            ValueError: the tokenizer cannot be used for what the request asks.
        """
        params = request.params
        sequences = [seq for part in request.parts for seq in part.sequences]
        if params.structured_outputs is not None:
            rules = self._rules(request, params.structured_outputs)
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
        for seq in (seq for part in request.parts for seq in part.sequences):
            if seq.grammar is not None:
                seq.grammar.restart(seq.output_token_ids)
            if seq.stop_search is not None:
                hidden = seq.num_output > 0 and request.hides_last(seq, seq.finish_reason)
                found = seq.stop_search.push(seq.token_ids[seq.num_prompt : len(seq.token_ids) - hidden])
                # Whoever aborts a sequence leaves its text as it is; every other end settles it.
                if found is None and seq.finished and (seq.finish_reason, seq.stop_reason) != ("abort", None):
                    seq.stop_search.finish()

    def _rules(self, request: Request, structure: StructuredOutputsParams) -> Grammar | CombinedRules:
        """Make the rules of the request's shape, less what its other parameters forbid."""
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
