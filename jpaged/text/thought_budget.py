"""Ends thoughts that have used up their tokens: rules that force a thought's closing mark.

The tokens are read by the model's answer format, as its text is, so a thought that ends by itself is left alone and
nothing is forced within a call.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from jpaged.answers.bound import BoundFormat, format_of, hidden_tokens
from jpaged.answers.parts import CallStart
from jpaged.answers.reader import AnswerReader
from jpaged.answers.rows import thought_formats, tool_formats
from jpaged.scheduling import Request
from jpaged.scheduling.hooks import Masks, TokenRules
from jpaged.text.answer_choice import Choice, chosen_formats
from jpaged.text.detokenizer import IncrementalDecoder
from jpaged.validation import one_of, shown

_SEEN = 64
"""Characters of the text before a thought in which the mark that began it is looked for."""


class ThoughtForm:
    """The thoughts of an answer format, in the tokens of one tokenizer.

    Args:
        form: the format, which has thoughts.
        tokenizer: a transformers tokenizer with a tokenizer.json.
    """

    def __init__(self, form: BoundFormat, tokenizer: Any) -> None:
        self.form = form
        self.tokenizer = tokenizer
        assert form.form.thought is not None
        self.marks = form.form.thought
        self.of_token = {token: text for text, token in form.tokens.items()}

    def closing(self, begun: str, held: str = "") -> tuple[int, ...]:
        """Return the tokens that end a thought.

        Args:
            begun: the text in which the thought began, which says by which mark.
            held: the beginning of the closing mark, if the thought's text ends with that.
        """
        begin, end = self.marks.begin, self.marks.end
        number = max(range(len(begin)), key=lambda i: begun.rfind(begin[i].strip())) if len(begin) == len(end) else 0
        mark = end[number].strip()
        return self._tokens(mark[len(held) :]) if held and mark.startswith(held) else self.closings[number]

    @cached_property
    def closings(self) -> list[tuple[int, ...]]:
        """Return the tokens of each closing mark."""
        return [self._tokens(mark.strip()) for mark in self.marks.end]

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Return the tokens of a prompt before which no thought can have begun that is open at its end."""
        pieces = [piece for mark in self.marks.begin for piece in self.form.pieces(mark.strip())]
        begins = {self.form.tokens[piece] for piece in pieces if piece in self.form.tokens}
        return (hidden_tokens(self.tokenizer) | self.of_token.keys()) - begins

    def decoder(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """Return a decoder of the tokens after a prompt, which shows marks."""
        return IncrementalDecoder(self.tokenizer, skip_special_tokens=False, prompt=prompt)

    def around_closing(self, text: str, vocab_size: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens of a text that come before the mark that ends a thought and after it; without the mark, all
        come before it.

        Args:
            vocab_size: number of the model's logits; None = tokens that it has no logit for are not looked for.

        Raises:
            ValueError: what comes before the mark is no text of a thought, as it has a mark that begins a call, what
                comes after it begins a call or a thought, or a token cannot be drawn.
        """
        ends = [mark.strip() for mark in self.marks.end if mark.strip() in text]
        before, mark, after = text.partition(min(ends, key=text.index)) if ends else (text, "", "")
        tokens, tokens_after = self._tokens(before), self._tokens(after)
        largest = max((*tokens, *tokens_after), default=0)
        if vocab_size is not None and largest >= vocab_size:
            raise ValueError(
                f"reasoning_end_str={shown(text)} has token {largest}, which is outside the vocabulary "
                f"[0, {vocab_size}): give another text"
            )
        reader, decoder = self.form.reader(thought="runs", placed=True), self.decoder()
        for token in tokens:
            reader.push(*decoder.push_placed(token))
            if reader.open_thought is None:
                raise ValueError(
                    f"reasoning_end_str={shown(text)} must be text of a thought, and has a mark that begins a call"
                )
        for token in self._tokens(mark):
            reader.push(*decoder.push_placed(token))
        for token in tokens_after:
            parts = reader.push(*decoder.push_placed(token))
            is_call = reader.is_in_call or any(isinstance(part, CallStart) for part in parts)
            if is_call or reader.open_thought is not None:
                raise ValueError(
                    f"reasoning_end_str={shown(text)} begins a {'call' if is_call else 'thought'} after the mark "
                    f"{shown(mark)}: end it before that"
                )
        return tokens, tokens_after

    def _tokens(self, text: str) -> tuple[int, ...]:
        found: list[int] = []
        for piece in self.form.pieces(text):
            token = self.form.tokens.get(piece)
            found += [token] if token is not None else self.tokenizer.encode(piece, add_special_tokens=False)
        return tuple(found)

    def begun(self, prompt: Sequence[int]) -> tuple[str, int] | None:
        """Return the text with which a prompt begins a thought, and how many tokens of the thought it has; None if it
        ends within no thought.

        A thought that the user quotes is none: the tokens that end messages are special, and so is each that ends a
        thought. White space after the opening mark is no thought yet.
        """
        start = next((i + 1 for i in range(len(prompt) - 1, -1, -1) if prompt[i] in self._ends), 0)
        text, ends, decoder = "", list[int](), self.decoder()
        for token in prompt[start:]:
            text += self.form.encoded(*decoder.push_placed(token))
            ends.append(len(text))
        found = self.form.thought_begun(text)
        if found is None:
            return None
        opening, before = found
        return before[-_SEEN:], sum(end > opening for end in ends) if text[opening:].strip() else 0


class ThoughtBudget:
    """Follows one sequence's tokens, and lets nothing but the closing mark come where the thoughts' tokens are used up.

    Marks do not count. All thoughts of an answer share the tokens, and those of a thought that the prompt begins count.
    Where a grammar does not allow the mark, as within a character, it comes as soon as the grammar does.

    A text may come before the mark, and one after it. It does not count either, it comes once in a thought, and it is
    left out where a grammar does not allow its next token but the mark.

    Attributes:
        waits: as in `TokenRules`: the mark may come after the next token, or there are other rules. A thought that
            begins amid text has at least one token, so that text is not waited for.

    Args:
        form: says where thoughts begin and end.
        budget: the most tokens of thoughts.
        around: the tokens that come before the mark and after it.
        prompt: the tokens before the first one.
        vocab_size: number of the model's logits.
        banned: tokens that other parameters forbid at times, which are never forced.
        rules: what else says which tokens may come, as a grammar; None: nothing does.
    """

    def __init__(
        self,
        form: ThoughtForm,
        budget: int,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        banned: Collection[int] = (),
        rules: TokenRules | None = None,
    ) -> None:
        self._form = form
        self._before, self._after = around
        self._prompt = prompt
        self._begun = form.begun(prompt)
        self._budget = budget
        self._num_words = -(-vocab_size // 32)
        self._banned = frozenset(banned)
        self._rules = rules
        self.waits = True
        self._begin()
        self._choose()

    @property
    def masks(self) -> Masks | None:
        return None if self._rules is None else self._rules.masks

    @property
    def grammar(self) -> Any:
        return None if self._rules is None else self._rules.grammar

    @property
    def is_ready(self) -> bool:
        return self._rules is None or self._rules.is_ready

    @property
    def is_slow(self) -> bool:
        return self._rules is not None and self._rules.is_slow

    @property
    def complete(self) -> bool:
        return self._rules is not None and self._rules.complete

    @property
    def error(self) -> str | None:
        return None if self._rules is None else self._rules.error

    @property
    def mask(self) -> Int[np.ndarray, " words"] | None:
        mask = None if self._rules is None else self._rules.mask
        if not self._endings or self.complete or self.error is not None:
            return mask
        for token, *_ in self._endings:
            word, bit = token // 32, token % 32
            if token not in self._banned if mask is None else mask[word] >> bit & 1:
                only = np.zeros(self._num_words, np.int32)
                only[word] = np.uint32(1 << bit).astype(np.int32)
                return only
        return mask

    def forced(self) -> Sequence[int]:
        """Return tokens that come next whatever the model says: those of an ending that no grammar may forbid, or those
        of the other rules that no mark interrupts."""
        if self._rules is None:
            run = self._endings[0] if self._endings else ()
            return run if self._banned.isdisjoint(run) else ()
        if self._may_close or self._endings:
            return ()
        return self._rules.forced()[: max(1, self._left)]

    def _begin(self) -> None:
        self._seen, num_tokens = self._begun or ("", 0)
        self._left = self._budget - num_tokens
        self._decoder = self._form.decoder(self._prompt)
        self._reader: AnswerReader = self._form.form.reader(thought="runs" if self._begun else "may", placed=True)
        self._ending: tuple[int, ...] = ()  # the rest of a run of forced tokens
        self._endings: list[tuple[int, ...]] = []  # runs to force, of which the first one that is allowed counts
        self._is_ending = False  # whether the open thought has forced tokens

    def accept(self, token: int) -> None:
        """Go on by a token of the mask."""
        if self._rules is not None:
            self._rules.accept(token)
        self._follow(token)
        self._choose()

    def restart(self, tokens: Sequence[int]) -> None:
        """Follow `tokens` from the beginning, and forget tokens accepted before."""
        if self._rules is not None:
            self._rules.restart(tokens)
        self._begin()
        self._choose()
        for token in tokens:
            self._follow(token)
            self._choose()

    def copy(self) -> ThoughtBudget:
        """Return independent rules at the same place."""
        twin = copy.copy(self)
        twin._rules = None if self._rules is None else self._rules.copy()
        twin._decoder, twin._reader = self._decoder.copy(), self._reader.copy()
        return twin

    def _follow(self, token: int) -> None:
        self._ending = next((run[1:] for run in self._endings if run[0] == token), ())
        self._is_ending |= bool(self._ending)
        reader = self._reader
        was_open, was_between = reader.open_thought is not None, reader.is_between
        text, spans = self._decoder.push_placed(token)
        reader.push(text, spans)
        is_open = reader.open_thought is not None
        if was_open and is_open:
            self._left -= 1
            return
        self._is_ending = False
        self._seen = (self._seen + text)[-_SEEN:]
        if is_open and not was_between:
            self._left = max(1, self._left)  # see `waits`

    def _choose(self) -> None:
        """Begin to close a thought without tokens left, and tell whether the next token may lead there."""
        held = self._reader.open_thought
        self._endings = [self._ending] if self._ending else []
        if held is not None and self._left <= 0:
            mark = self._form.closing(self._seen, held)
            if not self._is_ending:
                is_whole = mark in self._form.closings  # of a mark that the model has begun the rest comes at once
                self._endings = [(self._before if is_whole else ()) + mark + self._after]
            self._endings.append(mark)
        self.waits = self._rules is not None or self._may_close or bool(self._endings)

    @property
    def _may_close(self) -> bool:
        """Tell whether a thought may have no tokens left after the next one."""
        is_open = self._reader.open_thought is not None
        return self._left <= is_open and (is_open or self._reader.is_between)


class ThoughtForms:
    """Finds the thoughts of a model's answers; any number of threads may ask at once.

    Args:
        tokenizer: a transformers tokenizer; None where the model has none.
        opening: a mark that must be one of those by which thoughts begin; "" = none.
    """

    def __init__(self, tokenizer: Any, opening: str = "") -> None:
        self._tokenizer = tokenizer
        self._opening = opening.strip()
        self._made: dict[tuple[str | None, str], ThoughtForm] = {}

    @cached_property
    def _choice(self) -> Choice:
        return chosen_formats(self._tokenizer)

    def budget(self, request: Request, vocab_size: int, rules: TokenRules | None) -> ThoughtBudget:
        """Return the rules of a request with a thinking_token_budget.

        Args:
            rules: what else says which tokens may come; None: nothing does.

        Raises:
            ValueError: the model's thoughts are of no known form, or other parameters forbid their closing mark.
        """
        params = request.params
        budget = params.thinking_token_budget
        assert budget is not None
        form = self._form(f"thinking_token_budget={budget}", params.reasoning_parser, params.tool_parser)
        around = form.around_closing(params.reasoning_end_str or "", vocab_size)
        banned = {word[-1] for word in request.bad_words} | (request.stop_ids if params.min_tokens else set())
        allowed = params.allowed_token_ids
        for mark, tokens in zip(form.marks.end, form.closings, strict=True):
            if max(tokens) >= vocab_size:
                raise ValueError(f"thinking_token_budget={budget} ends thoughts by {mark!r}, which cannot be drawn")
            if not banned.isdisjoint(tokens) or not (allowed is None or set(tokens) <= {*allowed}):
                forbids = "bad_words" if any(word[-1] in tokens for word in request.bad_words) else "stop_token_ids"
                forbids = "allowed_token_ids" if banned.isdisjoint(tokens) else forbids
                raise ValueError(f"thinking_token_budget={budget} ends thoughts by {mark!r}, which {forbids} forbids")
        said = {*around[0], *around[1]}
        if not banned.isdisjoint(said) or not (allowed is None or said <= {*allowed}):
            raise ValueError(
                f"reasoning_end_str={shown(params.reasoning_end_str)} has tokens that bad_words, stop_token_ids or "
                "allowed_token_ids forbid: give another text, or none"
            )
        return ThoughtBudget(
            form, budget, request.prompt_token_ids, vocab_size, around=around, banned=banned, rules=rules
        )

    def _checked(self, form: ThoughtForm, thoughts: str) -> ThoughtForm:
        """Return the form of thoughts of a row, if `opening` begins them."""
        marks = [mark.strip() for mark in form.marks.begin]
        if self._opening and self._opening not in marks:
            raise ValueError(
                f"reasoning_start_str={shown(self._opening)} begins no thought of the format {thoughts!r}, but "
                f"{' or '.join(map(repr, marks))} does: leave it out, or let reasoning_parser name another format"
            )
        return form

    def check_text(self, text: str, reasoning_parser: str | None, tool_parser: str | None, vocab_size: int) -> None:
        """Refuse a text that could end no thought, before a request asks for it.

        Args:
            reasoning_parser, tool_parser: as in `SamplingParams`.

        Raises:
            ValueError: there is no known form of thoughts, or the text does not fit it.
        """
        said = f"reasoning_end_str={shown(text)}"
        self._form(said, reasoning_parser, tool_parser).around_closing(text, vocab_size)

    def _form(self, said: str, thoughts: str | None, tools: str | None) -> ThoughtForm:
        """Return the form of thoughts that a request, or a server's option, asks for."""
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            kind = "the model has none" if self._tokenizer is None else f"not {type(self._tokenizer).__name__}"
            raise ValueError(f"{said} needs a tokenizer with a tokenizer.json, {kind}")
        for name, given, known in (
            ("reasoning_parser", thoughts, thought_formats()),
            ("tool_parser", tools, ("none", *tool_formats())),
        ):
            if given is not None:
                one_of(name, given, known)
        if thoughts is None:
            thoughts = self._choice.thoughts
            if thoughts is None:
                why = self._choice.why_no_thoughts
                raise ValueError(
                    f"{said} needs the form of the model's thoughts, and {why}: reasoning_parser names one"
                )
        tools = self._choice.tools if tools is None else None if tools == "none" else tools
        if (tools, thoughts) not in self._made:
            bound = BoundFormat(format_of(tools, thoughts, self._tokenizer), self._tokenizer)
            self._made[tools, thoughts] = self._checked(ThoughtForm(bound, self._tokenizer), thoughts)
        return self._made[tools, thoughts]
