"""Applies a turn to one model: options of the chat template, the grammar of the answer, and the reader of its text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.server.errors import shortened
from jpaged.server.messages.answer_reader import AnswerReader
from jpaged.server.messages.parts import PlainReader, Reader
from jpaged.server.messages.thoughts import THOUGHT_FORMATS, Thought, ThoughtReader, ThoughtTokens, shape_rule
from jpaged.server.messages.tool_calls import format_of
from jpaged.server.turn import Tool, Turn

_THINKS = "the model's chat template cannot switch thoughts off"
_CONTROLS = {
    "reasoning_effort": "the model's chat template has no control of its effort",
    "verbosity": "the model's chat template has no control of its verbosity",
}
"""Controls of a turn, with the reason where the template has no variable of the name."""


class TurnForm:
    """The next turn of a conversation with one model.

    Args:
        turn: what the client asks.
        tokenizer: the model's tokenizer, for the special tokens of tool calls.
        tool_parser: family whose tool calls are read, of `tool_calls.TOOL_FORMATS`; None: tools are refused.
        reasoning_parser: family whose thoughts are split off, of `thoughts.THOUGHT_FORMATS`; None: none are.

    Attributes:
        custom: names of the tools whose calls have an input in place of arguments.
        unhonoured: controls that the model's chat template cannot follow, with the reason.

    Raises:
        ApiError: the turn needs a feature that the server or the model lacks.
    """

    def __init__(
        self, turn: Turn, tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        self.turn = turn
        self._marks = None if reasoning_parser is None else THOUGHT_FORMATS[reasoning_parser]
        self._tokenizer = tokenizer
        self._tools = self._offered(tool_parser)
        self.custom = frozenset(tool.name for tool in self._tools if tool.takes_text)
        self.unhonoured: dict[str, str] = {}
        self._controls = self._template_controls()
        self._form = format_of(tool_parser, self._special) if self._tools and tool_parser else None
        self._thought: Thought = "none"

    def _offered(self, tool_parser: str | None) -> tuple[Tool, ...]:
        """Return the tools that the model may call."""
        tools, choice, refuse = self.turn.tools, self.turn.choice, self.turn.names.about
        if not tools:
            if choice.mode == "required" or choice.names is not None:
                raise refuse("tool_choice", "tool_choice needs tools that the server can offer, and there are none")
            return ()
        if tool_parser is None:
            raise refuse("tools", "tools need a server that was started with --tool-parser")
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise refuse("tools", f"tools has two functions of one name: {_listed(names)}")
        for name in choice.names or ():
            if name not in names:
                raise refuse("tool_choice", f"tool_choice names {shortened(name)!r}, and tools has {_listed(names)}")
        return () if choice.mode == "none" else tuple(tools)

    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `AsyncLLM.chat_prompt` other than the messages."""
        turn = self.turn
        variables = {**self._controls, **turn.variables}
        return {
            "add_generation_prompt": turn.begins_message and not turn.continues_message,
            "continue_final_message": turn.continues_message,
            "chat_template_kwargs": variables or None,
            "tools": [tool.shown() for tool in self._tools] or None,
        }

    def _template_controls(self) -> dict[str, Any]:
        """Return the template's variables for the turn's controls, and note those that it lacks."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        text = template if isinstance(template, str) else " ".join(map(str, template.values()))
        controls: dict[str, Any] = {}
        thinks = self.turn.controls.get("thinks")
        if thinks is not None and "enable_thinking" in text:
            controls["enable_thinking"] = thinks
        elif thinks is False and self._marks is not None:
            self.unhonoured["thinks"] = _THINKS
        for name, reason in _CONTROLS.items():
            value = self.turn.controls.get(name)
            if value is None:
                continue
            if name in text:
                controls[name] = value
            elif name == "reasoning_effort" and value == "none" and "enable_thinking" in text:
                controls["enable_thinking"] = False
            else:
                self.unhonoured[name] = reason
        return controls

    def follow(self, prompt: str) -> None:
        """Take note of the prompt that the answer follows: it may have begun or ended a thought."""
        if self._marks is not None:
            last = (self.turn.messages[-1].get("content") or "") if self.turn.continues_message else ""
            begun = last if isinstance(last, str) else "".join(part.get("text") or "" for part in last)
            self._thought = self._marks.after(prompt, begun)

    def params(self) -> SamplingParams | BeamSearchParams:
        """Return the engine's parameters. Call `follow` before.

        Raises:
            ApiError: the answer's grammar cannot be made.
        """
        params = self.turn.params
        if isinstance(params, BeamSearchParams):
            return params
        shape = {} if self.turn.shape is None else {"structured_outputs": self.turn.shape}
        try:
            return replace(params, **{**shape, **self.parameters()})
        except (ValueError, TypeError) as error:
            raise self.turn.names.refusal(error) from error

    def parameters(self) -> dict[str, Any]:
        """Return the sampling parameters for tool calls or for a shape after a thought. Call `follow` before."""
        if self._form is None:
            return self._shape_after_thought()
        turn, refuse = self.turn, self.turn.names.about
        thought = self._thought
        if turn.covers_thought and thought == "may":
            thought = "none"  # the shape applies to the whole text
        try:
            grammar = self._form.grammar(
                [{"name": one.name, "parameters": one.parameters, "strict": one.strict} for one in self._callable()],
                self._special,
                forced=turn.choice.mode == "required",
                parallel=turn.choice.parallel,
                thought=thought,
                shape=turn.shape,
                **({} if self._marks is None else {"marks": self._marks}),
            )
        except ValueError as error:
            about_shape = turn.covers_thought and not str(error).startswith("the parameters of")
            raise refuse("structured_outputs" if about_shape else "tools", str(error)) from error
        shown = {"skip_special_tokens": False} if any(self._special(mark) for mark in self._form.special) else {}
        if shown and turn.hides_marks:
            raise refuse("skip_special_tokens", "skip_special_tokens=true would hide the model's tool calls")
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar), **shown}

    def _callable(self) -> list[Tool]:
        """Return the tools that the answer may call; the prompt has all."""
        allowed = self.turn.choice.names
        return [tool for tool in self._tools if allowed is None or tool.name in allowed]

    def _shape_after_thought(self) -> dict[str, Any]:
        """Return a shape that allows a thought first, if thoughts are split off; see `Turn.covers_thought`."""
        shape = self.turn.shape
        if self._marks is None or self._thought == "over" or shape is None:
            return {}
        if not self.turn.covers_thought:
            schema = shape.json if shape.json is not None else {"type": "object"}
            grammar = self._marks.before_json(schema, self._thought)
        elif self._thought == "runs":
            try:
                grammar = self._marks.before_rule(shape_rule(shape), self._thought)
            except ValueError as error:
                raise self.turn.names.about("structured_outputs", str(error)) from error
        else:
            return {}
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar)}

    def _special(self, text: str) -> int | None:
        token = None if self._tokenizer is None else _token_of(self._tokenizer, text)
        return token if token is not None and token in self._tokenizer.all_special_ids else None

    @property
    def splits(self) -> bool:
        """Tell whether the text is read for tool calls or thoughts."""
        return self._marks is not None or self._form is not None

    def reader(self) -> Reader:
        """Return a reader of one output's text."""
        shaped = self.turn.shape is not None and self.turn.choice.mode == "auto"
        answer: Reader = PlainReader() if self._form is None else self._form.reader(shaped=shaped)
        return answer if self._marks is None else self._marks.reader(answer, inside=self._thought == "runs")

    def answer_reader(self) -> AnswerReader:
        """Return a reader of one of the turn's answers. Call `follow` before."""
        reader = self.reader()
        return AnswerReader(reader, self._thought_tokens(reader), resumable=self.turn.resumable)

    def _thought_tokens(self, reader: Reader) -> ThoughtTokens | None:
        """Return a counter for the thought of the output that `reader` reads; None if thoughts are not split off."""
        if self._marks is None or not isinstance(reader, ThoughtReader):
            return None
        tokenizer = self._tokenizer
        end = _token_of(tokenizer, self._marks.end)
        decode = partial(tokenizer.decode, skip_special_tokens=self.turn.hides_marks is not False)
        return ThoughtTokens(reader, end, decode)


def _listed(names: list[str]) -> str:
    """Return names for an error, as many as fit."""
    return shortened(", ".join(names))


def _token_of(tokenizer: Any, text: str) -> int | None:
    """Return the token that is a text, or None.

    A tokenizer with an unknown token gives that token's id for a text that is no token.
    """
    token = tokenizer.convert_tokens_to_ids(text)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == text else None
