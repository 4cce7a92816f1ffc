"""Applies the fields of a chat request: template options, the shape of the answer, and the reader of its text."""

from __future__ import annotations

from functools import partial
from typing import Any

from jpaged import StructuredOutputsParams
from jpaged.answers.bound import BoundFormat, format_of
from jpaged.answers.grammar import Thought, shape_rule
from jpaged.answers.reader import AnswerReader
from jpaged.answers.thought_tokens import ThoughtTokens
from jpaged.server.errors import ApiError, shortened
from jpaged.server.messages.parts import PlainReader, Reader
from jpaged.server.protocol.chat import AllowedTools, ChatRequest, Function, NamedTool, Tool
from jpaged.server.protocol.field_classes import EFFORT, VERBOSITY


class ChatTurn:
    """The next turn of a conversation, as a request asks for it.

    Args:
        tool_parser: family whose tool calls are read, of `answers.rows.ANSWER_FORMATS`; None: tools are refused.
        reasoning_parser: family whose thoughts are split off, of the same; None: none are.
        tokenizer: the model's tokenizer, for the special tokens of tool calls.

    Attributes:
        include_reasoning: whether the answer contains the model's thoughts.
        custom: names of the tools whose calls have an input in place of arguments.
        unhonoured: fields that the model's chat template cannot follow, with the reason.

    Raises:
        ApiError: the request needs a feature that the server or the model lacks.
    """

    def __init__(
        self, body: ChatRequest, tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self.include_reasoning = body.include_reasoning
        self._tools = self._offered(tool_parser)
        self.custom = frozenset(tool.custom.name for tool in self._tools if tool.custom is not None)
        self.unhonoured: dict[str, str] = {}
        self._controls = self._template_controls()
        form = format_of(tool_parser if self._tools else None, reasoning_parser, tokenizer)
        self._form = BoundFormat(form, tokenizer)
        self._thinks = form.thought is not None
        self._thought: Thought = "none"
        both = body.continue_final_message and body.add_generation_prompt
        if both and "add_generation_prompt" in body.model_fields_set:
            message = "continue_final_message=true continues a message, and add_generation_prompt=true begins one"
            raise _refusal("continue_final_message", message)

    def _offered(self, tool_parser: str | None) -> list[Tool]:
        """Return the tools that the model may call."""
        body, choice = self._body, self._body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise _refusal("tool_choice", "tool_choice needs tools that the server can offer, and there are none")
            return []
        if tool_parser is None:
            raise _refusal("tools", "tools need a server that was started with --tool-parser")
        names = [tool.as_function().name for tool in body.tools]
        if len(set(names)) < len(names):
            raise _refusal("tools", f"tools has two functions of one name: {_listed(names)}")
        for name in _named_by(choice) or ():
            if name not in names:
                raise _refusal("tool_choice", f"tool_choice names {shortened(name)!r}, and tools has {_listed(names)}")
        return [] if choice == "none" else body.tools

    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `AsyncLLM.chat_prompt` other than the messages."""
        body = self._body
        variables = {**self._controls, **(body.chat_template_kwargs or {})}
        return {
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "chat_template_kwargs": variables or None,
            "tools": [tool.shown() for tool in self._tools] or None,
        }

    def _template_controls(self) -> dict[str, Any]:
        """Return the template's variables for `reasoning_effort` and `verbosity`, and note those that it lacks."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        text = template if isinstance(template, str) else " ".join(map(str, template.values()))
        controls: dict[str, Any] = {}
        for name, reason in (("reasoning_effort", EFFORT), ("verbosity", VERBOSITY)):
            value = getattr(self._body, name)
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
        if self._thinks:
            last = (self._body.messages[-1].content or "") if self._body.continue_final_message else ""
            begun = last if isinstance(last, str) else "".join(part.text or "" for part in last)
            self._thought = self._form.after(prompt, begun)

    def parameters(self) -> dict[str, Any]:
        """Return the sampling parameters for tool calls or for a shape after a thought. Call `follow` before."""
        if not self._tools:
            hides = self._thinks and self._form.hides_thoughts and self._body.skip_special_tokens is not True
            return self._shape_after_thought() | ({"skip_special_tokens": False} if hides else {})
        body, choice = self._body, self._body.tool_choice
        named = isinstance(choice, NamedTool)
        required = choice.mode == "required" if isinstance(choice, AllowedTools) else choice == "required"
        functions = self._callable()
        shape, thought = self._shape(), self._thought
        if body.structured_outputs is not None and thought == "may":
            thought = "none"  # the shape applies to the whole text
        try:
            grammar = self._form.grammar.answer(
                _described(functions),
                forced=named or required,
                parallel=body.parallel_tool_calls and not named,
                thought=thought,
                shape=shape,
            )
        except ValueError as error:
            about_shape = body.structured_outputs is not None and not str(error).startswith("the parameters of")
            raise _refusal("structured_outputs" if about_shape else "tools", str(error)) from error
        shown: dict[str, Any] = {"skip_special_tokens": False} if self._form.tokens else {}
        if shown and body.skip_special_tokens:
            raise _refusal("skip_special_tokens", "skip_special_tokens=true would hide the model's tool calls")
        if ends := self._form.end_tokens:
            shown["stop_token_ids"] = [*(body.stop_token_ids or ()), *ends]
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar), **shown}

    def _callable(self) -> list[Function]:
        """Return the functions that the answer may call; the prompt has all tools."""
        offered, allowed = [tool.as_function() for tool in self._tools], _named_by(self._body.tool_choice)
        return [function for function in offered if allowed is None or function.name in allowed]

    def _shape(self) -> StructuredOutputsParams | None:
        """Return the shape of an answer's text.

        Raises:
            ApiError: the shape is invalid, or there are two.
        """
        try:
            return self._body.shape()
        except (ValueError, TypeError) as error:
            name = "response_format" if self._body.structured_outputs is None else "structured_outputs"
            raise _refusal(name, str(error)) from error

    def _shape_after_thought(self) -> dict[str, Any]:
        """Return a shape that allows a thought first, if thoughts are split off.

        A shape of structured_outputs applies to the whole text, thought included, unless the prompt began a thought.
        """
        if not self._thinks or self._thought == "over":
            return {}
        if self._body.structured_outputs is not None:
            if self._thought != "runs":
                return {}
            try:
                rule = shape_rule(self._body.structured_outputs.shape())
            except (ValueError, TypeError) as error:
                raise _refusal("structured_outputs", str(error)) from error
            grammar = self._form.grammar.before_rule(rule, self._thought)
            return {"structured_outputs": StructuredOutputsParams(grammar=grammar)}
        form = self._body.response_format
        shape = None if form is None else form.shape()
        if shape is None:
            return {}
        schema = shape.json if shape.json is not None else {"type": "object"}
        grammar = self._form.grammar.before_json(schema, self._thought)
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar)}

    @property
    def splits(self) -> bool:
        """Tell whether the text is read for tool calls or thoughts."""
        return self._thinks or bool(self._tools)

    def reader(self) -> Reader:
        """Return a reader of one output."""
        choice = self._body.tool_choice
        may = choice in (None, "auto") or (isinstance(choice, AllowedTools) and choice.mode == "auto")
        shaped = self._body.has_shape and may
        if not self.splits:
            return PlainReader()
        functions = _described([tool.as_function() for tool in self._tools])
        return self._form.reader(thought=self._thought, shaped=shaped and bool(self._tools), functions=functions)

    def thought_tokens(self, reader: Reader) -> ThoughtTokens | None:
        """Return a counter for the thought of the output that `reader` reads; None if thoughts are not split off."""
        if not self._thinks or not isinstance(reader, AnswerReader):
            return None
        tokenizer = self._tokenizer
        end = self._form.end_of_thought
        decode = partial(tokenizer.decode, skip_special_tokens=self._body.skip_special_tokens is not False)
        return ThoughtTokens(reader, end, decode)


def _named_by(choice: Any) -> list[str] | None:
    """Return the names of the tools that a `tool_choice` allows; None: all."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    return [tool.name for tool in choice.tools] if isinstance(choice, AllowedTools) else None


def _listed(names: list[str]) -> str:
    """Return names for an error, as many as fit."""
    return shortened(", ".join(names))


def _described(functions: list[Function]) -> list[dict[str, Any]]:
    return [{"name": one.name, "parameters": one.parameters, "strict": one.strict} for one in functions]


def _refusal(name: str, message: str) -> ApiError:
    return ApiError(message, param=name, code="invalid_value")
