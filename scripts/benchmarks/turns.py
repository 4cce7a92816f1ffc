"""Counts the tokens that each turn of a conversation finds cached and computes, by chat template, without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout, StateCheckpoints
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request, Scheduler
from jpaged.scheduling import Sequence as TokenSequence
from jpaged.text.chat_template import ChatOptions, templated
from jpaged.text.earlier_turns import earlier_turns
from jpaged.text.message_ends import message_ends
from jpaged.text.template_rendering import render
from scripts.cases import Rows

BLOCK = 16
_WORDS = "{} looks at the next file and finds what it has to know of it there. "
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a file.",
        "parameters": {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"]},
    },
}


class Words:
    """Stands for the tokenizer of a model with a chat template: a token is a word, a mark or white space."""

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, template: str) -> None:
        self.chat_template = template
        self._ids: dict[str, int] = {}

    def get_chat_template(self, *_: Any) -> str:
        """Return the template."""
        return self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = False,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation."""
        return render(
            chat_template or self.chat_template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | variables,
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return a text's tokens."""
        return [self._ids.setdefault(piece, len(self._ids)) for piece in re.findall(r"\w+|\s+|[^\w\s]", text)]


def conversation(turns: int, *, calls: bool) -> list[dict[str, Any]]:
    """Return an agent's conversation: in every third turn it answers the user, in the others it calls a tool."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": _WORDS.format("The user") * 6},
    ]
    for turn in range(turns):
        said: dict[str, Any] = {"role": "assistant", "reasoning_content": _WORDS.format(f"Thought {turn}") * 4}
        if calls and turn % 3 < 2:
            call = {"name": "look", "arguments": {"file": f"part_{turn}"}}
            said |= {"content": "", "tool_calls": [{"id": f"call{turn:05}", "type": "function", "function": call}]}
            next_one = {"role": "tool", "tool_call_id": f"call{turn:05}", "name": "look"}
        else:
            said |= {"content": _WORDS.format(f"Answer {turn}") * 2}
            next_one = {"role": "user"}
        messages += [said, {**next_one, "content": _WORDS.format(f"Message {turn}") * 3}]
    return messages


class Turns:
    """Asks turn after turn of one conversation of a scheduler and its memory; the model says what is scripted.

    Args:
        tokenizer: the model's.
        interval: tokens between two checkpoints of a recurrent layer next to the attention; 0: there is none.
        variables: of the chat template.
    """

    def __init__(self, tokenizer: Words, interval: int = 0, variables: Mapping[str, Any] | None = None) -> None:
        specs = [GroupSpec("full", layer_bytes=8, num_layers=1, block_size=BLOCK, policy=FullAttention())]
        if interval:
            specs.append(GroupSpec("states", 64, 1, BLOCK, StateCheckpoints(interval)))
        layout = PoolLayout.plan(specs, PoolLayout.plan(specs, 1 << 20).page_bytes * 4000)
        self._memory = MemoryManager(layout, prefix_caching=True, max_step_tokens=256)
        self._scheduler = Scheduler(self._memory, max_num_seqs=4, max_num_batched_tokens=256)
        self._tokenizer, self._variables, self._numbers = tokenizer, variables, count()

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, calls: bool, begins: bool = True) -> Any:
        """Return the text of a conversation, its tokens, and the ends of messages among them."""
        options = ChatOptions(
            add_generation_prompt=begins,
            tools=[_TOOL] if calls else None,
            chat_template_kwargs=self._variables,
        )
        text = templated(messages, self._tokenizer, options)
        tokens = self._tokenizer.encode(text)
        ends = message_ends(messages, options, self._tokenizer, text, tokens) if self._memory.keeps_states else ()
        return text, tokens, ends

    def answer(self, tokens: list[int], ends: tuple[int, ...], said: list[int]) -> int:
        """Generate what the model says after a prompt; return the prompt's tokens that were cached."""
        sequence = TokenSequence(next(self._numbers), 0, list(tokens), len(tokens))
        request = Request(
            request_id=next(self._numbers),
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=len(said), ignore_eos=True),
            seed=0,
            max_total_tokens=len(tokens) + len(said),
            stop_ids=frozenset(),
            eos_ids=frozenset(),
            sequences=[sequence],
            prefix_ends=ends,
        )
        self._scheduler.add(request)
        while self._scheduler.has_work:
            step = self._scheduler.schedule()
            self._scheduler.dispatched(step)
            drawn = [said[one.chunk.start + one.chunk.length - len(tokens)] for one in step.samples]
            self._scheduler.update(step, drawn, [-1.0] * len(drawn))
        return request.num_cached_tokens

    def run(self, messages: Sequence[Mapping[str, Any]], *, calls: bool) -> list[dict[str, int]]:
        """Return for each turn the prompt's tokens, those that are new since the last answer, and those computed."""
        found, before = [], list[int]()
        for at in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            text, tokens, ends = self.prompt(messages[:at], calls=calls)
            whole, *_ = self.prompt(messages[: at + 1], calls=calls, begins=False)
            same = next((i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), len(text))
            said = self._tokenizer.encode(whole[same:])
            cached = self.answer(tokens, ends, said)
            grown = tokens[: len(before)] == before
            new = len(tokens) - len(before) if grown else -1
            found.append({"prompt": len(tokens), "cached": cached, "computed": len(tokens) - cached, "new": new})
            before = tokens + said
        return found


def turns(templates: Path | None = None, rounds: int = 6, interval: int = 256) -> Rows:
    """Tokens that each turn of an agent's conversation computes, of those in its prompt, by chat template.

    TEMPLATES is a folder of ``*.jinja``, by default those in trl, where that is installed. The scheduler and the
    memory manager are the engine's, with blocks of 16 tokens; a token is a word, a mark or white space, and the model
    says what the template then shows. A turn is "only new" if its prompt begins with the whole turn before. "States"
    are of a model with recurrent layers whose checkpoints lie INTERVAL tokens apart. Where a variable keeps the
    thoughts of earlier turns, the template has a second row with it.
    """
    if templates is None:
        found = find_spec("trl")
        if found is None or found.origin is None:
            raise ValueError("trl is not installed: give a folder of templates by --templates")
        templates = Path(found.origin).parent / "chat_templates"
    rows: Rows = []
    for file in sorted(templates.glob("*.jinja")):
        if file.stem.endswith("_training"):
            continue
        tokenizer = Words(file.read_text(encoding="utf-8"))
        kept = earlier_turns(tokenizer).kept_by
        for variables in ({}, *([] if kept is None else [dict([kept])])):
            row = _row(tokenizer, rounds, interval, variables)
            if row is not None:
                with_them = ", ".join(f"{name}={value}" for name, value in variables.items())
                rows.append({"template": f"{file.stem} {with_them}".strip(), **row})
    return rows


def _row(tokenizer: Words, rounds: int, interval: int, variables: Mapping[str, Any]) -> dict[str, Any] | None:
    for calls in (True, False):
        messages = conversation(rounds, calls=calls)
        try:
            plain, states = (Turns(tokenizer, size, variables).run(messages, calls=calls) for size in (0, interval))
        except ValueError:  # the template takes no tools, or no such conversation
            continue
        later = range(1, rounds)
        return {
            "calls": calls,
            "only new": f"{sum(plain[i]['new'] >= 0 for i in later)} of {len(later)}",
            "prompt": " ".join(str(plain[i]["prompt"]) for i in later),
            "computed": " ".join(str(plain[i]["computed"]) for i in later),
            "with states": " ".join(str(states[i]["computed"]) for i in later),
        }
    return None
