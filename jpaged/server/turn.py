"""Defines a turn, which is what a client asks of a conversation's next message, and the events of its answer.

Both are in no protocol's words. A protocol makes a `Turn` of its request; `Serving.answer` yields what the model adds
to the answer as events, of which the protocol renders its stream or its whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.outputs import Logprob
from jpaged.server.cache_use import NO_USE, CacheUse
from jpaged.server.errors import ClientNames


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments; None: any object.
        strict: whether a schema with a keyword that cannot be followed is refused; otherwise such a keyword is left to
            the model.
        takes_text: whether the client's tool takes one text, which the model is shown as the argument `input`.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None
    takes_text: bool = False

    def shown(self) -> dict[str, Any]:
        """Return the tool for the chat template."""
        names = ("name", "description", "parameters", "strict")
        function = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Says which tools an answer may call. The prompt has all tools, unless the mode is "none".

    Attributes:
        mode: "required": the answer is a call.
        names: the tools that may be called; None: all.
        parallel: whether an answer may call several.
    """

    mode: Literal["auto", "required", "none"] = "auto"
    names: tuple[str, ...] | None = None
    parallel: bool = True


@dataclass(frozen=True)
class Marked:
    """A beginning of a conversation that later requests have too.

    Attributes:
        messages: the messages up to the mark; the last one may be cut there. They lack those after the system's where
            the tools are marked, as templates show tools there.
        seconds: how long it is kept from the last request that marks it.
    """

    messages: Sequence[Mapping[str, Any]]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Holds what a client asks of the next message of a conversation.

    Attributes:
        messages: the conversation, as chat templates take it.
        params: the engine's parameters, without the shape of the answer.
        names: the client's names of what its request has, for errors.
        tools: the tools that the model may call.
        choice: which of them.
        shape: the shape of the answer's text; None: it is free.
        covers_thought: whether the shape is that of the whole text, thought included, unless the prompt begins a
            thought.
        shows_thoughts: whether the answer has the model's thoughts.
        controls: settings of thoughts and length, by name, for templates that have a variable of the name. `thinks` is
            whether the model thinks, `thought_budget` the most tokens of its thoughts, where these are split off.
        variables: further variables of the template.
        mm_processor_kwargs: settings of the processor of images for this request.
        begins_message: whether the prompt ends with the beginning of the assistant's message.
        continues_message: whether the answer continues the last message.
        drops_oldest: whether the oldest messages of a conversation that does not fit are dropped.
        moves_system: whether a message of the system joins a neighbour where the template cannot show it.
        last_tokens: the prompt's tokens that are kept, from its end; None: all.
        hides_marks: whether the text lacks special tokens; None: as the model's tool calls need.
        resumable: whether an aborted answer may go on in another process, so that nothing is said to end with it.
        marked: beginnings of the conversation that the client marks to be kept.
        model, priority, cache_salt: see `Serving.generate`.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams | BeamSearchParams
    names: ClientNames = field(default_factory=ClientNames)
    tools: Sequence[Tool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    shape: StructuredOutputsParams | None = None
    covers_thought: bool = False
    shows_thoughts: bool = True
    controls: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] | None = None
    begins_message: bool = True
    continues_message: bool = False
    drops_oldest: bool = False
    moves_system: bool = False
    last_tokens: int | None = None
    hides_marks: bool | None = None
    resumable: bool = False
    marked: Sequence[Marked] = ()
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class Begun:
    """The answer begins: the engine has taken the prompt."""

    prompt_tokens: int
    cached_tokens: int
    cache: CacheUse = NO_USE


@dataclass(frozen=True)
class Thought:
    """More of a thought."""

    text: str


@dataclass(frozen=True)
class Text:
    """More of the answer's own text."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call begins; its arguments follow.

    Attributes:
        index: number of the call in the answer, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """A call ends.

    Attributes:
        is_cut: whether the output ended within it, by a stop string or a limit: it is not one to carry out.
    """

    index: int
    is_cut: bool = False


@dataclass(frozen=True)
class Ended:
    """The answer ends.

    Attributes:
        reason: "calls": with calls to carry out.
        stop: the stop string or token that ended it; None: the end of the turn, or another reason. With "abort", why
            the answer cannot go on; None: the server ends, or cannot run an answer that another one may resume.
        output_tokens, thought_tokens: tokens of the answer, and those of them that are thoughts; None: thoughts are not
            split off.
    """

    reason: Literal["stop", "calls", "length", "abort"]
    stop: str | int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    thought_tokens: int | None
    cache: CacheUse = NO_USE

    @property
    def failure(self) -> str | None:
        """Return why the engine gave the answer up, as where no token fits its grammar; None for every other end."""
        return str(self.stop) if self.reason == "abort" and self.stop is not None else None


Event = Begun | Thought | Text | CallBegun | Arguments | CallEnded | Ended


@dataclass(frozen=True)
class Piece:
    """What one step adds to one of a turn's answers.

    Attributes:
        index: number of the answer, from 0.
        token_ids, logprobs: its new tokens.
        thought_tokens: tokens of its thoughts so far; None if they are not split off.
    """

    index: int
    events: tuple[Event, ...]
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None
    thought_tokens: int | None

    @property
    def ended(self) -> Ended | None:
        """Return its last event, if that is the answer's end."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Ended) else None


@dataclass(frozen=True)
class Step:
    """What one output of the engine adds to a turn's answers."""

    prompt_token_ids: Sequence[int]
    cached_tokens: int
    prompt_logprobs: Any
    pieces: Sequence[Piece]
    cache: CacheUse = NO_USE
