"""Computes which tokens may come next in a structured output, by the llguidance library."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from jpaged.json_schema import followable
from jpaged.kept_newest import KeptNewest
from jpaged.structured_outputs import StructuredOutputsParams, is_gbnf
from jpaged.text.grammar_dialects import ascii_classes, ascii_classes_in_lark, lark_of
from jpaged.text.grammar_limits import check_limits
from jpaged.text.masks import MaskMaker, Pace

_MOST_ITEMS = 1000
"""Most places in its rules where a text may stand; an ambiguous grammar has more of them with each token, and a step
takes their square. llguidance has 2,000."""


_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    "[a-z]+",
    *(f"{_IN_STRING}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 15, 30)),
    f"{_IN_STRING}+",
)
"""Groups of tokens, each token in the first that it fits. Where all of a group may come, a mask takes it whole;
llguidance walks through the other tokens. Its own groups lack words, and the short strings that end a bounded one."""
_MOST_KEPT = 64
"""Compiled grammars that are kept."""
_MOST_KEPT_CHARACTERS = 4 << 20
"""Most characters of the sources of kept grammars; one may have a million, and compiles to some megabytes."""


class Grammar:
    """Follows one sequence's tokens.

    Args:
        matcher: llguidance's, at any place; it becomes the grammar's own.
        num_words: words of a mask.
        masks: makes the masks of all grammars of an engine.
        pace: how long masks of the compiled grammar take.

    The mask, and what shows only with it, are made when they are first read, or by `MaskMaker` for many at once.

    Attributes:
        grammar: itself: what `MaskMaker` takes.
        is_ready: whether the mask after the accepted tokens is made, or none is needed.
    """

    waits = True

    def __init__(self, matcher: Any, num_words: int, masks: MaskMaker, pace: Pace | None = None) -> None:
        self.matcher = matcher
        self.num_words = num_words
        self.masks = masks
        self.pace = Pace() if pace is None else pace
        self._mask: Int[np.ndarray, " words"] = np.zeros(num_words, np.int32)
        self._error: str | None = None
        self._accepted()

    @property
    def grammar(self) -> Grammar:
        return self

    @property
    def mask(self) -> Int[np.ndarray, " words"]:
        """Return packed bits of the tokens that may come next, as in `TokenMasks.mask`; end-of-sequence is among them
        where the text is complete."""
        self.look_ahead()
        return self._mask

    @property
    def complete(self) -> bool:
        """Tell whether nothing but end-of-sequence can come."""
        return self._is_stopped

    @property
    def error(self) -> str | None:
        """Return why the grammar cannot be followed any further (it grew too complex); None while it can."""
        self.look_ahead()
        return self._error

    @property
    def is_slow(self) -> bool:
        """Tell whether its masks outlast a step."""
        return self.pace.is_slow

    def copy(self) -> Grammar:
        """Return an independent grammar at the same place."""
        twin = Grammar(self.matcher.deep_copy(), self.num_words, self.masks, self.pace)
        if self.is_ready and not twin.is_ready:
            twin.take(self._mask)
        return twin

    def accept(self, token: int) -> None:
        """Go on by a token of the mask."""
        self.matcher.consume_token(token)
        self._accepted()

    def restart(self, tokens: Sequence[int]) -> None:
        """Follow `tokens` from the beginning, and forget tokens accepted before."""
        self.matcher.reset()
        self.matcher.consume_tokens(list(tokens))
        self._accepted()

    def look_ahead(self) -> None:
        """Make the mask after the accepted tokens, in this thread."""
        from llguidance.numpy import fill_next_token_bitmask

        if not self.is_ready:
            mask = np.zeros((1, self.num_words), np.int32)
            fill_next_token_bitmask(self.matcher, mask)
            self.take(mask[0])

    def take(self, mask: Int[np.ndarray, " words"]) -> None:
        """Take the mask that was made after the accepted tokens."""
        self._mask = mask
        self._error = _in_one_line(self.matcher.get_error()) if self.matcher.is_error() else None
        self.is_ready = True

    def forced(self) -> list[int]:
        """Return tokens that come next whatever the model says, one after the other."""
        return [] if self.complete or self.error is not None else self.matcher.compute_ff_tokens()

    def _accepted(self) -> None:
        is_error = self.matcher.is_error()
        self._is_stopped = self.matcher.is_stopped() and not is_error
        self._error = _in_one_line(self.matcher.get_error()) if is_error else None
        self.is_ready = self._is_stopped or is_error


class GrammarCompiler:
    """Makes grammars over one model's tokens; any number of threads may do so at once.

    Args:
        tokenizer: the model's tokenizer, with a tokenizer.json; None where the model has none.
        vocab_size: number of the model's logits.
        eos_ids: tokens that end a sequence.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()  # guards `_made`
        self._made: Any = None
        self._masks = MaskMaker()
        self._kept_lock = threading.Lock()  # guards `_kept`, and its grammars while they are copied
        self._kept = KeptNewest[Grammar](_MOST_KEPT, _MOST_KEPT_CHARACTERS)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar at its beginning. Compiled ones are kept, since agents send the same one each turn.

        Raises:
            ValueError: the grammar is not well-formed, is beyond what `check_limits` lets through, or the model's
                tokenizer cannot be used for grammars.
        """
        try:
            key = _key(params)
        except (ValueError, RecursionError):  # as for a schema of too many levels, which is refused with its reason
            return self._compile(params)
        with self._kept_lock:
            if (kept := self._kept.get(key)) is not None:
                return kept.copy()
        grammar = self._compile(params)
        with self._kept_lock:
            self._kept.put(key, grammar, len(key))
            return grammar.copy()

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=_MOST_ITEMS)
        source = _source(params)
        matcher = with_deep_stack(lambda: LLMatcher(self._tokens, source, log_level=0, limits=limits))
        grammar = Grammar(matcher, -(-self._vocab_size // 32), self._masks)
        if grammar.error is not None:
            raise ValueError(f"{params.kind}={getattr(params, params.kind)!r} cannot be followed: {grammar.error}")
        return grammar

    def prepare(self) -> None:
        """Make the part that all grammars share: the vocabulary in llguidance's form.

        It holds the interpreter for about a second where the vocabulary is large, so a server does it before it serves.

        Raises:
            ValueError: the model's tokenizer cannot be used for grammars.
        """
        with self._lock:
            if self._made is None:
                self._made = self._make_tokens()

    @property
    def _tokens(self) -> Any:
        self.prepare()
        return self._made

    def _make_tokens(self) -> Any:
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._eos_ids:
            raise ValueError("structured_outputs needs a tokenizer with a tokenizer.json and an end-of-sequence token")
        try:
            return LLTokenizer(
                _drawable(backend.to_str(), self._vocab_size),
                n_vocab=self._vocab_size,
                eos_token=self._eos_ids,
                slices=list(_SLICES),
            )
        except ValueError as error:
            raise ValueError(f"structured_outputs cannot use this model's tokenizer: {error}") from error


def _drawable(described: str, vocab_size: int) -> str:
    """Return a tokenizer.json without the tokens beyond a model's logits, such as a padding token that was added.

    A grammar must not see them: it would take one for the next token where its text fits.
    """
    tokenizer = json.loads(described)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    vocabulary = model["vocab"]
    by_name = isinstance(vocabulary, dict)
    size = max(vocabulary.values(), default=-1) + 1 if by_name else len(vocabulary)
    if size <= vocab_size and all(token["id"] < vocab_size for token in added):
        return described
    tokenizer["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    tokenizer["post_processor"] = None  # it may name such a token
    if not by_name:
        model["vocab"] = vocabulary[:vocab_size]
        return json.dumps(tokenizer)
    model["vocab"] = kept = {token: number for token, number in vocabulary.items() if number < vocab_size}
    if "merges" in model:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
        model["merges"] = [merge for merge, pair in pairs if {*pair, "".join(pair)} <= kept.keys()]
    return json.dumps(tokenizer)


def _in_one_line(error: str) -> str:
    """Return llguidance's message without the excerpts of the grammar and the dump of the parser's state.

    >>> _in_one_line('at 1(8): unknown name: "foo"\\n   1 | start: foo\\n              ^\\n')
    'at 1(8): unknown name: "foo"'
    """
    lines = error.partition("<state>")[0].splitlines()
    reason = " ".join(line.strip() for line in lines if not re.match(r"\s*(\d+ \||\^)", line))
    return "no text fits it" if reason.strip() == "NoExtensionBias" else reason.strip()


def _key(params: StructuredOutputsParams) -> str:
    """Return what two grammars have in common only if they are the same."""
    given = (params.json, params.regex, params.choice, params.grammar, params.json_object)
    return json.dumps([*given, params.disable_any_whitespace])


def _source(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's own form."""
    from llguidance import LLMatcher

    lark = None if params.grammar is None else _lark(params.grammar)
    check_limits(params, lark)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(ascii_classes(params.regex))
    if params.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in params.choice))
    if lark is not None:
        return LLMatcher.grammar_from_lark(lark)
    # as text: llguidance does not take each of Python's integers
    schema = json.dumps({"type": "object"} if params.json is None else followable(params.json))
    if params.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(schema)


def _lark(grammar: str) -> str:
    return lark_of(grammar) if is_gbnf(grammar) else ascii_classes_in_lark(grammar)


STACK_BYTES = 64 << 20
"""Stack of the calling thread; only its used part takes memory."""
_SIZE = threading.Lock()
"""Held while the size of all new threads' stacks is another one."""

T = TypeVar("T")


def with_deep_stack(call: Callable[[], T]) -> T:
    """Return ``call()``, run in a new thread with a stack of `STACK_BYTES`; its exceptions are raised here."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run, name="jpaged-deep-stack", daemon=True)
    with _SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return found.result()
