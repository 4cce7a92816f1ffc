"""The command ``jpaged chat``: a conversation on a terminal, with commands that begin with a slash."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import MaxTokens, Model, Seed, Temperature, TopK, TopP, sampling
from jpaged.cli.printing import print_text
from jpaged.validation import did_you_mean

HELP = """\
/help               these lines
/clear              forget the conversation; the system message stays
/system [TEXT]      show the system message, or replace it
/set [NAME VALUE]   show the parameters of answers, or change one: /set temperature 0.7
/save FILE          write the conversation as JSON
/bye                leave; Ctrl-D does so too
//TEXT              say /TEXT, a line that begins with a slash
Ctrl-C stops an answer and keeps its text. Escape, then Enter begins a new line."""

COMMANDS = ("/help", "/clear", "/system", "/set", "/save", "/bye")
SHARE_OF_ANSWER = 4
"""A quarter of the context is left for an answer, or less where `max_tokens` is less."""


@with_engine_options("model")
def chat(
    model: Model = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    *,
    engine: EngineOptions,
) -> None:
    """Talk to a model, one turn at a time.

    /help lists the commands of a conversation; /bye or the end of input ends it. Ctrl-C stops an answer.
    """
    params = sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    llm = engine.build(model, reads_text=True, max_num_seqs=1)
    conversation = Conversation(llm, params, system)
    _note(f"{model}, {llm.max_model_len} tokens of context. /help lists commands, /bye leaves, Ctrl-C stops an answer.")
    with llm.control.compilation_notes():
        _talk(conversation, _line_reader())


def _talk(conversation: Conversation, read: Callable[[], str]) -> None:
    """Answer lines until one ends the conversation."""
    while True:
        try:
            line = read()
        except EOFError:
            break
        except KeyboardInterrupt:
            _note("/bye or Ctrl-D leaves")
            continue
        if line.startswith("//"):
            _answer(conversation, line[1:])
        elif line.startswith("/"):
            if not _command(conversation, line):
                break
        elif line.strip():
            _answer(conversation, line)


class Conversation:
    """Holds the turns of a conversation, and asks a model for the next one.

    Args:
        llm: a `jpaged.LLM`.
        params: the `SamplingParams` of each answer.
        system: the system message; None = none.

    Attributes:
        messages: the turns so far, as a chat template takes them; thoughts are left out, as templates expect.
        num_dropped: messages that the last question did not fit with.
        cut_off: the limit that the last answer met, for people; "" if it ended by itself.
    """

    def __init__(self, llm: Any, params: Any, system: str | None = None) -> None:
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.num_dropped = 0
        self.cut_off = ""
        self._llm = llm

    @property
    def all_messages(self) -> list[dict[str, str]]:
        """Return the turns with the system message before them."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def ask(self, question: str) -> Generator[tuple[str, bool], None, None]:
        """Yield the pieces of the answer, and whether each is a thought.

        The oldest turns are dropped if the context has no room for them. Closing the iterator stops the model; the text
        so far then is the answer.

        Raises:
            ValueError: the question is too long, or as `LLM.stream`; the conversation is as it was.
        """
        from jpaged.answers.parts import Content, Reasoning

        before = list(self.messages)
        self.messages.append({"role": "user", "content": question})
        said: list[str] = []
        self.cut_off = ""
        try:
            prompt = self._prompt()
            form = self._form
            reader = form.reader(thought=form.after(prompt["prompt"]), placed=form.gets_places)
            deltas = self._llm.stream(prompt, self.params)
            try:
                for part in self._parts(deltas, reader):
                    if isinstance(part, Content):
                        said.append(part.text)
                    if isinstance(part, Content | Reasoning):
                        yield part.text, isinstance(part, Reasoning)
            finally:
                deltas.close()
        except Exception:
            self.messages = before
            said.clear()
            raise
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            elif self.messages[-1:] == [{"role": "user", "content": question}]:  # templates want turns to alternate
                self.messages.pop()

    @cached_property
    def _form(self) -> Any:
        """Return the format of the model's thoughts: the one that its chat template renders, or else the usual one."""
        from jpaged.answers.bound import BoundFormat, format_of

        tokenizer = self._llm.tokenizer
        return BoundFormat(format_of(None, self._llm.answer_formats().thoughts or "think", tokenizer), tokenizer)

    def _parts(self, deltas: Any, reader: Any) -> Iterator[Any]:
        num_tokens = 0
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            if delta.finish_reason == "length":
                most = self.params.max_tokens
                full = f"the context of {self._llm.max_model_len} tokens is full"
                by_most = f"max_tokens is {most}: /set max_tokens {2 * num_tokens} allows more"
                self.cut_off = by_most if most is not None and num_tokens >= most else full
            yield from reader.push(delta.text, delta.added_token_spans)
        yield from reader.finish()

    def _prompt(self) -> Any:
        """Return the prompt of the next answer; drop the oldest turns until it leaves room for one."""
        limit = self._llm.max_model_len
        limit -= min(self.params.max_tokens or limit, limit // SHARE_OF_ANSWER)
        self.num_dropped = 0
        while True:
            prompt = self._llm.chat_prompt(self.all_messages)
            if len(prompt["prompt_token_ids"]) <= limit or len(self.messages) == 1:
                return prompt
            turn = 2 if len(self.messages) > 2 and self.messages[1]["role"] == "assistant" else 1
            del self.messages[:turn]
            self.num_dropped += turn

    def change(self, name: str, value: str) -> None:
        """Change a parameter of the answers to come; `value` is JSON, or else text.

        Raises:
            ValueError, TypeError: as `SamplingParams`, or the parameter has no place here.
        """
        if name in ("n", "prompt_logprobs", "logprobs", "detokenize"):
            raise ValueError(f"{name} has no place in a chat")
        if name not in self.params.__dataclass_fields__:
            raise ValueError(f"{name} is no parameter{did_you_mean(name, self.params.__dataclass_fields__)}")
        changed = self.params.clone()
        setattr(changed, name, _parsed(value))
        self.params = changed

    def parameters(self) -> str:
        """Return the parameters that are not the default ones, and the usual ones."""
        usual = ("max_tokens", "temperature", "top_k", "top_p", "seed")
        plain = type(self.params)()
        names = [name for name in vars(plain) if not name.startswith("_")]
        shown = [n for n in names if n in usual or getattr(self.params, n) != getattr(plain, n)]
        return ", ".join(f"{name} {getattr(self.params, name)}" for name in shown)


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _answer(conversation: Conversation, question: str) -> None:
    """Print the answer to a question; Ctrl-C ends it."""
    pieces = conversation.ask(question)
    try:
        before: bool | None = None
        for text, thought in pieces:
            if before is None and conversation.num_dropped:
                _note(f"the context is full: the oldest {conversation.num_dropped} messages were dropped")
            if before and not thought:
                print_text("\n")
            before = thought
            print_text(text, end="", **({"dim": True} if thought else {}))
            sys.stdout.flush()
        print_text("")
        if conversation.cut_off:
            _note(f"[cut off] {conversation.cut_off}")
    except KeyboardInterrupt:
        pieces.close()
        print_text("")
        _note("stopped; the text so far stays in the conversation")
    except ValueError as error:
        typer.secho(f"refused: {str(error).removeprefix('prompt 0: ')}", fg="red", err=True)


def _command(conversation: Conversation, line: str) -> bool:
    """Obey a line that begins with a slash; return False if it ends the conversation."""
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    try:
        if name == "/bye":
            return False
        if name == "/help":
            _note(HELP)
        elif name == "/clear":
            conversation.messages.clear()
            _note("the conversation begins anew")
        elif name == "/system":
            if rest:
                conversation.system = rest
            _note(f"system message: {conversation.system or 'none'}")
        elif name == "/set":
            if rest:
                parameter, _, value = rest.partition(" ")
                conversation.change(parameter, value.strip())
            _note(conversation.parameters())
        elif name == "/save":
            _note(_save(conversation, rest))
        else:
            near = did_you_mean(name, COMMANDS) or ";"
            _note(f"{name} is no command{near} /help lists them, // says a line with a slash")
    except (ValueError, TypeError, OSError) as error:
        _note(str(error))
    return True


def _save(conversation: Conversation, name: str) -> str:
    """Write the conversation to a new file, readable by its owner only, and say so."""
    if not name:
        raise ValueError("/save needs the name of a file")
    path = Path(name).expanduser()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(conversation.all_messages, file, indent=1, ensure_ascii=False)
        file.write("\n")
    return f"wrote {len(conversation.all_messages)} messages to {path}"


def _note(text: str) -> None:
    """Print a line that the model did not write, on standard error."""
    typer.secho(text, dim=True, err=True)


def _plain_line() -> str:
    """Read a line; ask for it only if a person may see that, and not where the answers go."""
    if sys.stdin.isatty() and sys.stderr.isatty():
        typer.echo("> ", nl=False, err=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _line_reader() -> Callable[[], str]:
    """Return a call that reads a line: with editing and history on a terminal, else from standard input.

    The history lasts as long as the conversation: what people ask is not written to a disk.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory(),
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
    return lambda: session.prompt("> ")
