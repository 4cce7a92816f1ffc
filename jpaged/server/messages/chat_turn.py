"""The turn that a chat request asks for: how its prompt is made, what shape the answer has, how its text is read."""

from __future__ import annotations

from functools import partial
from typing import Any

from jpaged import StructuredOutputsParams
from jpaged.server.errors import ApiError
from jpaged.server.messages.parts import PlainReader, Reader
from jpaged.server.messages.thoughts import (
    BEGIN,
    END,
    ThinkReader,
    Thought,
    ThoughtTokens,
    before_shape,
    behind_thought,
    shape_rule,
)
from jpaged.server.messages.tool_calls import ToolReader, format_of
from jpaged.server.protocol.chat import ChatRequest, NamedTool, Tool
from jpaged.server.settings import ServerSettings


class Turn:
    """What the fields of a chat request mean for its prompt and its answer.

    Args:
        tokenizer: the model's, which knows what the special tokens of tool calls are.

    Attributes:
        tells_reasoning: whether the answer has the model's thoughts.

    Raises:
        ApiError: they ask for what the server or the model cannot do.
    """

    def __init__(self, body: ChatRequest, settings: ServerSettings, tokenizer: Any) -> None:
        self._body = body
        self._thinks = settings.reasoning_parser is not None
        self._tokenizer = tokenizer
        self.tells_reasoning = body.include_reasoning
        self._tools = self._offered(settings)
        self._form = format_of(settings.tool_parser, self._special) if self._tools and settings.tool_parser else None
        self._inside = False
        both = body.continue_final_message and body.add_generation_prompt
        if both and "add_generation_prompt" in body.model_fields_set:
            message = (
                "continue_final_message=true goes on with the last message, and add_generation_prompt=true begins one"
            )
            raise _refusal("continue_final_message", message)

    def _offered(self, settings: ServerSettings) -> list[Tool]:
        """Return the tools that the model may call."""
        body, choice = self._body, self._body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise _refusal("tool_choice", "tool_choice needs tools")
            return []
        if settings.tool_parser is None:
            raise _refusal("tools", "tools need a server that was started with --tool-parser")
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            raise _refusal("tools", f"tools has two functions of one name: {', '.join(names)}")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise _refusal("tool_choice", f"tool_choice names {choice.function.name!r}, and tools has {names}")
        if choice == "none":
            return []
        shaped = body.response_format is not None and body.response_format.type != "text"
        if shaped or body.structured_outputs is not None:
            name = "response_format" if shaped else "structured_outputs"
            raise _refusal(name, f"{name} and tools are two shapes for one text: give tool_choice='none' with it")
        return body.tools

    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `AsyncLLM.chat_prompt` beside the messages."""
        body = self._body
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            template = getattr(self._tokenizer, "chat_template", None)
            if isinstance(template, str) and "reasoning_effort" not in template:
                raise _refusal("reasoning_effort", "the model's chat template has no place for reasoning_effort")
            variables["reasoning_effort"] = body.reasoning_effort
        return {
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "chat_template_kwargs": variables or None,
            "tools": [tool.model_dump(exclude_unset=True) for tool in self._tools] or None,
        }

    def starts_behind(self, prompt: str) -> None:
        """Take note of the prompt that the answer follows; it may have begun a thought."""
        self._inside = self._thinks and prompt.rstrip().endswith(BEGIN)

    def parameters(self) -> dict[str, Any]:
        """Return the sampling parameters that tools ask for, and those of a shape that comes behind a thought."""
        if self._form is None:
            return self._shape_behind_thought()
        body, choice = self._body, self._body.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else None
        functions = [tool.function for tool in self._tools if named in (None, tool.function.name)]
        try:
            grammar = self._form.grammar(
                [{"name": function.name, "parameters": function.parameters} for function in functions],
                self._special,
                forced=named is not None or choice == "required",
                parallel=body.parallel_tool_calls and named is None,
                thought=self._thought,
            )
        except ValueError as error:
            raise _refusal("tools", str(error)) from error
        shown = {"skip_special_tokens": False} if any(self._special(mark) for mark in self._form.special) else {}
        if shown and body.skip_special_tokens:
            raise _refusal("skip_special_tokens", "skip_special_tokens=true would hide the model's tool calls")
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar), **shown}

    def _shape_behind_thought(self) -> dict[str, Any]:
        """Return a shape that lets the model think first, where thoughts are told apart.

        A shape of structured_outputs is that of the whole text, thought and all, unless the prompt began a thought.
        """
        if self._inside and self._body.structured_outputs is not None:
            before, rules = before_shape(self._thought)
            try:
                rule = shape_rule(self._body.structured_outputs.shape())
            except (ValueError, TypeError) as error:
                raise _refusal("structured_outputs", str(error)) from error
            grammar = "\n".join([f"start: {before} shape", *rules, f"shape: {rule}"])
            return {"structured_outputs": StructuredOutputsParams(grammar=grammar)}
        form = self._body.response_format
        shape = form.shape() if form is not None and self._thinks and self._body.structured_outputs is None else None
        if shape is None:
            return {}
        grammar = behind_thought(shape.json if shape.json is not None else {"type": "object"}, self._thought)
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar)}

    @property
    def _thought(self) -> Thought:
        return "runs" if self._inside else "may" if self._thinks else "none"

    def _special(self, text: str) -> int | None:
        token = self._tokenizer.convert_tokens_to_ids(text)
        return token if token in self._tokenizer.all_special_ids else None

    @property
    def splits(self) -> bool:
        """Tell whether the text is read for tool calls or thoughts."""
        return self._thinks or self._form is not None

    def reader(self) -> Reader:
        """Return what reads one output."""
        said: Reader = PlainReader() if self._form is None else ToolReader(self._form)
        return ThinkReader(said, inside=self._inside) if self._thinks else said

    def thought_tokens(self, reader: Reader) -> ThoughtTokens | None:
        """Return what counts the thought of an output that this reader reads; None where none is told apart."""
        if not isinstance(reader, ThinkReader):
            return None
        tokenizer = self._tokenizer
        end = tokenizer.convert_tokens_to_ids(END)
        decode = partial(tokenizer.decode, skip_special_tokens=self._body.skip_special_tokens is not False)
        return ThoughtTokens(reader, None if end == tokenizer.unk_token_id else end, decode)


def _refusal(name: str, message: str) -> ApiError:
    return ApiError(message, param=name, code="invalid_value")
