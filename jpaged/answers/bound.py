"""A format in one tokenizer: the readers and grammars that a server or an engine's caller takes from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jpaged.answers.format import AnswerFormat
from jpaged.answers.grammar import AnswerGrammar, Thought
from jpaged.answers.marks import Marks
from jpaged.answers.parts import TokenSpan
from jpaged.answers.reader import AnswerReader, Patterns
from jpaged.answers.response_template import RESPONSE_TEMPLATE, format_of_template
from jpaged.answers.rows import ANSWER_FORMATS


class BoundFormat:
    """A format with the tokens that its marks are in a tokenizer.

    Attributes:
        tokens: the marks that are tokens, with their ids.
        grammar: makes its grammars.
    """

    def __init__(self, form: AnswerFormat, tokenizer: Any = None) -> None:
        self.form = form
        self._tokenizer = tokenizer
        self._added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._marks = marks = Marks(form.texts(), self._token_of)
        self.tokens = marks.tokens
        self.grammar = AnswerGrammar(form, marks)
        self._of_tokens = Patterns(form, marks)
        self._of_text = Patterns(form, Marks((), self._token_of)) if self.tokens else self._of_tokens

    def _token_of(self, text: str) -> int | None:
        return mark_token(self._tokenizer, text, self._added)

    def reader(
        self,
        *,
        thought: Thought = "may",
        shaped: bool = False,
        functions: Sequence[Mapping[str, Any]] = (),
        placed: bool = False,
    ) -> AnswerReader:
        """Return a reader of one output; see `AnswerReader`.

        Args:
            placed: whether the reader is given the places of tokens, see `gets_places`; a mark that is a token then
                counts only there. Otherwise text that spells it counts.
        """
        schemas = {one["name"]: one.get("parameters") or {} for one in functions}
        patterns = self._of_tokens if placed else self._of_text
        return AnswerReader(patterns, thought=thought, shaped=shaped, functions=schemas)

    @property
    def gets_places(self) -> bool:
        """Tell whether outputs say where tokens stand: those of a tokenizer without a tokenizer.json do not."""
        return hasattr(self._tokenizer, "backend_tokenizer")

    @property
    def hides_thoughts(self) -> bool:
        """Tell whether a text without special tokens lacks the marks of thoughts."""
        marks = self.form.thought
        texts = () if marks is None else (*marks.begin, *marks.end)
        tokens = (token for mark, token in self.tokens.items() if any(mark in text for text in texts))
        return any(_is_hidden(self._tokenizer, token, self._added) for token in tokens)

    @property
    def end_tokens(self) -> list[int]:
        """Return the tokens that end the turn besides the model's end-of-sequence tokens."""
        return [self.tokens[mark] for mark in self.form.ends if mark in self.tokens]

    @property
    def end_of_thought(self) -> int | None:
        """Return the token that ends a thought; None if it is none, or more than one does."""
        marks = self.form.thought
        return None if marks is None or len(marks.end) != 1 else token_of(self._tokenizer, marks.end[0].strip())

    def pieces(self, text: str) -> list[str]:
        """Return a text as a list of tokens that are marks and of texts between them, none empty."""
        return self._marks.pieces(text)

    def encoded(self, text: str, places: Sequence[TokenSpan]) -> str:
        """Return a text with a character in the place of each mark that is a token, as `thought_begun` takes it."""
        return self._marks.encoded(text, places)

    def thought_begun(self, encoded: str) -> tuple[int, str] | None:
        """Return where in a text the thought begins in which it ends, and the text before that, with its opening mark.

        None if it ends in no thought.
        """
        begin, end = self._of_tokens.thought_begin, self._of_tokens.thought_end
        assert begin is not None and end is not None
        start = max((found.end() for found in begin.finditer(encoded)), default=None)
        if start is None or end.search(encoded, start):
            return None
        return start, self._marks.decoded(encoded[:start])

    def after(self, prompt: str, continued: str = "") -> Thought:
        """Return the thought that an answer to a prompt may have.

        Args:
            prompt: the rendered conversation.
            continued: the beginning of the answer, if the conversation's last message is continued.
        """
        marks = self.form.thought
        if marks is None:
            return "none"
        prompt, continued = prompt.rstrip(), continued.strip()
        begins, ends = tuple(map(str.rstrip, marks.begin)), tuple(map(str.strip, marks.end))
        begun = continued.startswith(begins)
        if prompt.endswith(ends) or (begun and any(end in continued for end in ends)):
            return "over"
        return "runs" if begun or prompt.endswith(begins) else "may"


def token_of(tokenizer: Any, text: str) -> int | None:
    """Return the token that is a text, or None.

    A tokenizer with an unknown token gives that token's id for a text that is no token.
    """
    if tokenizer is None:
        return None
    token = tokenizer.convert_tokens_to_ids(text)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == text else None


def mark_token(tokenizer: Any, text: str, added_tokens: Mapping[int, Any]) -> int | None:
    """Return the token that is a mark and that no text spells; None if there is none.

    These are the tokenizer's special tokens, and added ones of the form ``<...>``, as llguidance has it.

    Args:
        added_tokens: the tokenizer's added tokens by id.
    """
    token = token_of(tokenizer, text)
    if token is None:
        return None
    tagged = token in added_tokens and text.startswith("<") and text.endswith(">")
    return token if tagged or _is_hidden(tokenizer, token, added_tokens) else None


def hidden_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that a text without special tokens lacks; many of them have no role in the tokenizer."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token for token in (*added, *tokenizer.all_special_ids) if _is_hidden(tokenizer, token, added))


def _is_hidden(tokenizer: Any, token: int, added_tokens: Mapping[int, Any]) -> bool:
    """Tell whether a text without special tokens lacks a token; many that are special have no role in `tokenizer`."""
    added = added_tokens.get(token)
    return token in tokenizer.all_special_ids if added is None else added.special


def format_of(tools: str | None, thoughts: str | None, tokenizer: Any = None) -> AnswerFormat:
    """Return the format with the calls of one row and the thoughts of another, each None for none.

    The marks of text and those between regions are of the row of the calls or, without one, of that of the thoughts. A
    row's name also means its variant, if the tokenizer has the variant's token.
    """
    if tools is None:
        return AnswerFormat() if thoughts is None else replace(variant_of(thoughts, tokenizer), calls=())
    made = variant_of(tools, tokenizer)
    return made.with_thoughts_of(None if thoughts is None else variant_of(thoughts, tokenizer))


def variant_of(name: str, tokenizer: Any = None) -> AnswerFormat:
    """Return the row of a name, or that of its variant, or the format of the tokenizer's own template; see `format_of`.

    Raises:
        ValueError: that template is missing, or has something that no format has.
    """
    if name == RESPONSE_TEMPLATE:
        return format_of_template(getattr(tokenizer, "response_template", None))
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    for form in ANSWER_FORMATS.values():
        if form.variant_of == name and mark_token(tokenizer, form.variant_token, added) is not None:
            return form
    return ANSWER_FORMATS[name]
