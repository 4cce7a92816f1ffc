"""Applies a turn to one model: options of the chat template, the grammar of the answer, and the reader of its text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.answers.bound import BoundFormat, format_of
from jpaged.answers.grammar import Thought, shape_rule
from jpaged.answers.reader import AnswerReader as PartReader
from jpaged.answers.thought_tokens import ThoughtTokens
from jpaged.server.errors import shortened
from jpaged.server.messages.answer_reader import AnswerReader
from jpaged.server.messages.kept_grammars import KeptGrammars
from jpaged.server.messages.parts import PlainReader, Reader
from jpaged.server.turn import Tool, Turn

_SWITCH = re.compile(r"\{%-?\s*(?:el)?if\b[^%]*(?<![\w.'\"])thinking\b(?![\w'\"])")
"""Matches a condition of a template that reads the variable ``thinking``, as DeepSeek's and Granite's, and no field of
a message of this name."""
_THINKS = "the model's chat template cannot switch thoughts off"
_NO_BUDGET = "the form of the model's thoughts is not known: --reasoning-parser names one"
_CONTROLS = {
    "reasoning_effort": "the model's chat template has no control of its effort",
    "verbosity": "the model's chat template has no control of its verbosity",
}
"""Controls of a turn, with the reason where the template has no variable of the name."""


Bound = Callable[[str | None, str | None], BoundFormat]


def bound_to(tokenizer: Any) -> Bound:
    """Return what makes the formats of a tokenizer, see `TurnForm`."""
    return lambda tools, thoughts: BoundFormat(format_of(tools, thoughts, tokenizer), tokenizer)


class TurnForm:
    """The next turn of a conversation with one model.

    Args:
        turn: what the client asks.
        tokenizer: the model's tokenizer, for the special tokens of tool calls.
        tool_parser: family whose tool calls are read, of `jpaged.answers.rows.ANSWER_FORMATS`; None: tools are refused.
        reasoning_parser: family whose thoughts are split off, of the same table; None: none are.
        grammars: keeps the grammars of turns with this tokenizer; None: only this turn's.
        bound: returns the format of the calls of one row and the thoughts of another, see `format_of`, in the
            tokenizer. Turns may share formats: a tokenizer with thousands of added tokens lists them all for each.
            None: it is made for this turn.

    Attributes:
        custom: names of the tools whose calls have an input in place of arguments.
        unhonoured: controls that the model's chat template cannot follow, with the reason.

    Raises:
        ApiError: the turn needs a feature that the server or the model lacks.
    """

    def __init__(
        self,
        turn: Turn,
        tokenizer: Any,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        grammars: KeptGrammars | None = None,
        bound: Bound | None = None,
    ) -> None:
        self.turn = turn
        self._grammars = KeptGrammars() if grammars is None else grammars
        self._tokenizer = tokenizer
        self._tools = self._offered(tool_parser)
        self._thoughts = {
            "reasoning_parser": reasoning_parser,
            "tool_parser": tool_parser if self._tools else "none",
        }
        self._form = (bound or bound_to(tokenizer))(tool_parser if self._tools else None, reasoning_parser)
        self._thinks = self._form.form.thought is not None
        self.custom = frozenset(tool.name for tool in self._tools if tool.takes_text)
        self.unhonoured: dict[str, str] = {}
        self._controls = self._template_controls()
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
            "mm_processor_kwargs": turn.mm_processor_kwargs,
        }

    def _template_controls(self) -> dict[str, Any]:
        """Return the template's variables for the turn's controls, and note those that it lacks."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        text = template if isinstance(template, str) else " ".join(map(str, template.values()))
        controls: dict[str, Any] = {}
        switch = "enable_thinking" if "enable_thinking" in text else "thinking" if _SWITCH.search(text) else None
        thinks = self.turn.controls.get("thinks")
        if thinks is not None and switch is not None:
            controls[switch] = thinks
        elif thinks is False and self._thinks:
            self.unhonoured["thinks"] = _THINKS
        if self.turn.controls.get("thought_budget") is not None and not self._thinks:
            self.unhonoured["thought_budget"] = _NO_BUDGET
        for name, reason in _CONTROLS.items():
            value = self.turn.controls.get(name)
            if value is None:
                continue
            if name in text:
                controls[name] = value
            elif name == "reasoning_effort" and value == "none" and switch is not None:
                controls[switch] = False
            else:
                self.unhonoured[name] = reason
        return controls

    def follow(self, prompt: str) -> None:
        """Take note of the prompt that the answer follows: it may have begun or ended a thought."""
        if self._thinks:
            last = (self.turn.messages[-1].get("content") or "") if self.turn.continues_message else ""
            begun = last if isinstance(last, str) else "".join(part.get("text") or "" for part in last)
            self._thought = self._form.after(prompt, begun)

    async def params_made_in_thread(self) -> SamplingParams | BeamSearchParams:
        """Return what `params` does, and let the event loop go on while a grammar is made."""
        if self._tools or self.turn.shape is not None:
            return await asyncio.to_thread(self.params)
        return self.params()

    def params(self) -> SamplingParams | BeamSearchParams:
        """Return the engine's parameters. Call `follow` before.

        Raises:
            ApiError: the answer's grammar cannot be made.
        """
        params = self.turn.params
        if isinstance(params, BeamSearchParams):
            return _MarkedBeams(**vars(params)) if self._shows_marks else params
        shape = {} if self.turn.shape is None else {"structured_outputs": self.turn.shape}
        try:
            return replace(params, **{**shape, **self._bound_of_thoughts(params), **self.parameters()})
        except (ValueError, TypeError) as error:
            raise self.turn.names.refusal(error) from error

    def _bound_of_thoughts(self, params: SamplingParams) -> dict[str, Any]:
        """Return the sampling parameters that bound the answer's thoughts."""
        wish = self.turn.controls.get("thought_budget") if self._thinks else None
        budget = params.thinking_token_budget if wish is None else wish
        return {} if budget is None else {"thinking_token_budget": budget, **self._thoughts}

    def parameters(self) -> dict[str, Any]:
        """Return the sampling parameters for tool calls or for a shape after a thought. Call `follow` before."""
        if not self._tools:
            return self._shape_after_thought() | ({"skip_special_tokens": False} if self._shows_marks else {})
        turn, refuse = self.turn, self.turn.names.about
        thought = self._thought
        if turn.covers_thought and thought == "may":
            thought = "none"  # the shape applies to the whole text
        try:
            grammar = self._tool_grammar(thought)
        except ValueError as error:
            about_shape = turn.covers_thought and not str(error).startswith("the parameters of")
            raise refuse("structured_outputs" if about_shape else "tools", str(error)) from error
        shown: dict[str, Any] = {"skip_special_tokens": False} if self._form.tokens else {}
        if shown and turn.hides_marks:
            raise refuse("skip_special_tokens", "skip_special_tokens=true would hide the model's tool calls")
        if (ends := self._form.end_tokens) and isinstance(turn.params, SamplingParams):
            shown["stop_token_ids"] = [*(turn.params.stop_token_ids or ()), *ends]
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar), **shown}

    @property
    def _shows_marks(self) -> bool:
        """Tell whether the text needs special tokens, without which thoughts would be part of the answer."""
        return self._thinks and self._form.hides_thoughts and self.turn.hides_marks is not True

    def _tool_grammar(self, thought: Thought) -> str:
        choice, shape, functions = self.turn.choice, self.turn.shape, _described(self._callable())
        forced = choice.mode == "required"
        return self._grammars.of(
            [self._thoughts, functions, forced, choice.parallel, thought, None if shape is None else vars(shape)],
            lambda: self._form.grammar.answer(
                functions, forced=forced, parallel=choice.parallel, thought=thought, shape=shape
            ),
        )

    def _callable(self) -> list[Tool]:
        """Return the tools that the answer may call; the prompt has all."""
        allowed = self.turn.choice.names
        return [tool for tool in self._tools if allowed is None or tool.name in allowed]

    def _shape_after_thought(self) -> dict[str, Any]:
        """Return a shape that allows a thought first, if thoughts are split off; see `Turn.covers_thought`."""
        shape = self.turn.shape
        if not self._thinks or self._thought == "over" or shape is None:
            return {}
        if not self.turn.covers_thought:
            schema = shape.json if shape.json is not None else {"type": "object"}
            grammar = self._grammars.of(
                [self._thoughts, schema, self._thought],
                lambda: self._form.grammar.before_json(schema, self._thought),
            )
        elif self._thought == "runs":
            try:
                grammar = self._form.grammar.before_rule(shape_rule(shape), self._thought)
            except ValueError as error:
                raise self.turn.names.about("structured_outputs", str(error)) from error
        else:
            return {}
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar)}

    @property
    def splits(self) -> bool:
        """Tell whether the text is read for tool calls or thoughts."""
        return self._thinks or bool(self._tools)

    def reader(self) -> Reader:
        """Return a reader of one output's text."""
        if not self.splits:
            return PlainReader()
        shaped = self.turn.shape is not None and self.turn.choice.mode == "auto" and bool(self._tools)
        form, functions = self._form, _described(self._tools)
        return form.reader(thought=self._thought, shaped=shaped, functions=functions, placed=form.gets_places)

    def answer_reader(self) -> AnswerReader:
        """Return a reader of one of the turn's answers. Call `follow` before."""
        reader = self.reader()
        return AnswerReader(reader, self._thought_tokens(reader), resumable=self.turn.resumable)

    def _thought_tokens(self, reader: Reader) -> ThoughtTokens | None:
        """Return a counter for the thought of the output that `reader` reads; None if thoughts are not split off."""
        if not self._thinks or not isinstance(reader, PartReader):
            return None
        tokenizer = self._tokenizer
        end = self._form.end_of_thought
        decode = partial(tokenizer.decode, skip_special_tokens=self.turn.hides_marks is not False)
        return ThoughtTokens(reader, end, decode)


class _MarkedBeams(BeamSearchParams):
    """The text of the outputs has special tokens."""

    def sampling_params(self) -> SamplingParams:
        return replace(super().sampling_params(), skip_special_tokens=False)


def _listed(names: list[str]) -> str:
    """Return names for an error, as many as fit."""
    return shortened(", ".join(names))


def _described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [{"name": one.name, "parameters": one.parameters, "strict": one.strict} for one in tools]
