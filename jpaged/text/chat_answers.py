"""Makes messages of a model's answers: what the texts have of thoughts and tool calls, by its answer format."""

from __future__ import annotations

import string
import threading
from collections.abc import Sequence
from dataclasses import replace
from random import SystemRandom
from typing import Any

from jpaged.answers.bound import BoundFormat, format_of
from jpaged.answers.parts import CallArguments, CallEnd, CallStart, Content, PlainReader, Reader, Reasoning, TokenSpan
from jpaged.answers.rows import thought_formats
from jpaged.outputs import AnswerMessage, CompletionOutput, RequestOutput, ToolCall
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from jpaged.text.answer_choice import chosen_formats
from jpaged.text.prompt import Conversation
from jpaged.validation import one_of

_RANDOM = SystemRandom()
_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Characters of a call's id; templates of Mistral's models take no others."""

_MOST_FORMS = 16
"""Formats that are remembered: callers may give a template with each conversation."""


class MessageReader:
    """Collects the message of one output as its text comes.

    Args:
        reader: finds the parts of the text.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._open: CallStart | None = None
        self._arguments: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str, spans: Sequence[TokenSpan] = ()) -> None:
        """Read more text."""
        self._read(self._reader.push(text, spans))

    def finish(self) -> AnswerMessage:
        """Return the message of the text, which has ended."""
        self._read(self._reader.finish())
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        return AnswerMessage(
            content=None if self._calls and not content.strip() else content,
            reasoning=reasoning.strip() or None,
            tool_calls=self._calls,
        )

    def _read(self, parts: Sequence[Any]) -> None:
        for part in parts:
            if isinstance(part, Content):
                self._content.append(part.text)
            elif isinstance(part, Reasoning):
                self._reasoning.append(part.text)
            elif isinstance(part, CallStart):
                self._open, self._arguments = part, []
            elif isinstance(part, CallArguments):
                self._arguments.append(part.text)
            elif isinstance(part, CallEnd) and self._open is not None:
                made = "".join(_RANDOM.choices(_LETTERS, k=_ID_LENGTH))
                self._calls.append(ToolCall(self._open.call_id or made, self._open.name, "".join(self._arguments)))
                self._open = None


class ChatAnswers:
    """Reads the answers of one model's chats; any number of threads may do so at once.

    Args:
        tokenizer: a transformers tokenizer; None where the model has none.
        reasoning_parser: the format of thoughts; None = the one that a chat template renders.

    Raises:
        ValueError: the format is unknown, or is a response template, which the tokenizer lacks.
    """

    def __init__(self, tokenizer: Any, reasoning_parser: str | None = None) -> None:
        if reasoning_parser is not None:
            one_of("reasoning_parser", reasoning_parser, thought_formats())
            format_of(None, reasoning_parser, tokenizer)
        self._tokenizer = tokenizer
        self._reasoning_parser = reasoning_parser
        self._lock = threading.Lock()
        self._forms: dict[tuple[str | None, bool], BoundFormat] = {}

    def reader(self, conversation: Conversation, params: SamplingParams, prompt: str | None) -> MessageReader:
        """Return the reader of one answer.

        Args:
            conversation: what it answers, with the tools that it may call.
            params: its parameters. A text with a shape is not searched for calls that come after its beginning.
            prompt: the rendered conversation.
        """
        options = conversation.options
        form = self._form(options.chat_template, bool(options.tools))
        if form.form.thought is None and not form.form.calls:
            return MessageReader(PlainReader())
        shaped = params.structured_outputs is not None
        continued = conversation.messages[-1].get("content") if options.continue_final_message else ""
        thought = form.after(prompt or "", continued if isinstance(continued, str) else "")
        return MessageReader(
            form.reader(
                thought="may" if shaped and thought == "runs" else thought,
                shaped=shaped,
                functions=[tool.get("function", tool) for tool in options.tools or ()],
                placed=form.gets_places,
            )
        )

    def with_messages(
        self, outputs: Sequence[RequestOutput], batch: Sequence[Conversation], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Return whole outputs with the message of each answer."""
        each = zip(outputs, batch, params, strict=True)
        return [ChatReader(self, conversation, of_it).read(output) for output, conversation, of_it in each]

    def _form(self, template: str | None, calls: bool) -> BoundFormat:
        """Return the format that a template renders, None for the model's own; with or without calls."""
        with self._lock:
            if (template, calls) not in self._forms:
                if len(self._forms) >= _MOST_FORMS:
                    self._forms.clear()
                choice = chosen_formats(self._tokenizer, template)
                thoughts = self._reasoning_parser or choice.thoughts
                form = format_of(choice.tools if calls else None, thoughts, self._tokenizer)
                self._forms[template, calls] = BoundFormat(form, self._tokenizer)
            return self._forms[template, calls]


class ChatReader:
    """Reads the messages of one chat's answers as its outputs come.

    Args:
        chats: the model's.
        conversation, params: see `ChatAnswers.reader`.
    """

    def __init__(self, chats: ChatAnswers, conversation: Conversation, params: SamplingParams) -> None:
        self._chats = chats
        self._conversation = conversation
        self._params = params
        self._deltas: dict[int, list[CompletionOutput]] = {}
        self._messages: dict[int, AnswerMessage] = {}

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output with the messages of the answers that have ended."""
        return replace(output, outputs=[self._with_message(one, output.prompt) for one in output.outputs])

    def _with_message(self, answer: CompletionOutput, prompt: str | None) -> CompletionOutput:
        deltas = self._deltas.setdefault(answer.index, [])
        if self._params.output_kind is not RequestOutputKind.DELTA:
            deltas.clear()
        deltas.append(answer)
        if not (self._params.detokenize and answer.finished()):
            return answer
        if answer.index not in self._messages:
            reader = self._chats.reader(self._conversation, self._params, prompt)
            for one in deltas:
                reader.push(one.text, one.added_token_spans)
            self._messages[answer.index] = reader.finish()
        return replace(answer, message=self._messages[answer.index])
