"""One row adds a form of tool calls or of thoughts; one router adds a path, with the access that its marks say."""

import json

import pytest
from fastapi import APIRouter
from llguidance import LLMatcher, LLTokenizer
from tiny_chat_model import byte_level_tokenizer
from turn_forms import form_of
from typer.testing import CliRunner

from jpaged.cli.main import app as command
from jpaged.server import app
from jpaged.server.access import Key, admin_only, open_to_all
from jpaged.server.messages.parts import CallArguments, CallStart, Content, Reasoning
from jpaged.server.messages.thoughts import THOUGHT_FORMATS, ThoughtFormat
from jpaged.server.messages.tool_calls import TOOL_FORMATS, ToolFormat, tool_families
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.settings import ServerSettings

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "f", "parameters": CITY}}


def allows(grammar, text):
    tokenizer = byte_level_tokenizer()
    tokens = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=211, eos_token=[2])
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_form_of_tool_calls_is_one_row(monkeypatch):
    with pytest.raises(ValueError, match="tool_parser='angles'"):
        ServerSettings(model="m", tool_parser="angles")
    monkeypatch.setitem(TOOL_FORMATS, "angles", ToolFormat("<<", "", ">><<", ">>"))
    settings = ServerSettings(model="m", tool_parser="angles")
    body = ChatRequest(messages=HELLO, tools=[TOOL], tool_choice="required")
    turn = form_of(body, byte_level_tokenizer(), tool_parser=settings.tool_parser)
    turn.follow("hi")
    text = '<<{"name": "f", "arguments": {}}>>'
    assert allows(turn.parameters()["structured_outputs"].grammar, text)
    reader = turn.reader()
    assert [*reader.push(text), *reader.finish()] == [CallStart(0, "f"), CallArguments(0, "{}")]


class WordCalls(ToolFormat):
    """Calls as ``<<f city=Paris>>``: arguments are words, not JSON."""

    def call_rules(self, number, function, special):
        names = " | ".join(f'"{name}"' for name in function["parameters"]["properties"])
        return [f'call_{number}: "{function["name"]}" (" " name_{number} "=" /\\w+/)*', f"name_{number}: {names}"]


class WordReader:
    """Reads outputs of `WordCalls`, whole."""

    def __init__(self, form, *, shaped=False):
        self.form, self.text = form, ""

    def push(self, text):
        self.text += text
        return []

    def finish(self):
        said, found, call = self.text.partition(self.form.begin)
        if not found:
            return [Content(said)]
        name, *words = call.removesuffix(self.form.closing).split()
        return [CallStart(0, name), CallArguments(0, json.dumps(dict(word.split("=") for word in words)))]


def test_a_form_of_tool_calls_without_json_is_a_subclass_and_its_reader(monkeypatch):
    monkeypatch.setitem(TOOL_FORMATS, "words", WordCalls("<<", "", ">><<", ">>", parser=WordReader))
    body = ChatRequest(messages=HELLO, tools=[WEATHER], tool_choice="required")
    turn = form_of(body, byte_level_tokenizer(), tool_parser="words")
    turn.follow("hi")
    grammar = turn.parameters()["structured_outputs"].grammar
    assert allows(grammar, "<<f city=Paris>>") and allows(grammar, "<<f>>")
    assert not allows(grammar, "<<f town=Paris>>") and not allows(grammar, '<<{"name": "f", "arguments": {}}>>')
    reader = turn.reader()
    parts = [*reader.push("<<f city="), *reader.push("Paris>>"), *reader.finish()]
    assert parts == [CallStart(0, "f"), CallArguments(0, '{"city": "Paris"}')]


@pytest.mark.parametrize(("begin", "end"), [("[THINK]", "[/THINK]"), ("(*", "*)")])
def test_a_form_of_thoughts_is_one_row(monkeypatch, begin, end):
    with pytest.raises(ValueError, match="reasoning_parser='other'"):
        ServerSettings(model="m", reasoning_parser="other")
    monkeypatch.setitem(THOUGHT_FORMATS, "other", ThoughtFormat(begin, end))
    settings = ServerSettings(model="m", reasoning_parser="other")
    body = ChatRequest(messages=HELLO, response_format={"type": "json_object"})
    turn = form_of(body, byte_level_tokenizer(), reasoning_parser=settings.reasoning_parser)
    turn.follow("hi")
    text = f"{begin}so{end}{{}}"
    assert allows(turn.parameters()["structured_outputs"].grammar, text)
    reader = turn.reader()
    assert [*reader.push(text), *reader.finish()] == [Reasoning("so"), Content("{}")]
    turn.follow(f"hi{begin}")
    assert allows(turn.parameters()["structured_outputs"].grammar, f"so{end}{{}}")


@pytest.mark.parametrize("name", ["serve", "run-batch"])
def test_the_help_names_every_row(name):
    text = CliRunner().invoke(command, [name, "--help"]).stdout
    assert all(family in text for family in (*tool_families(), *THOUGHT_FORMATS))


def test_a_path_is_one_router(monkeypatch, serve):
    router = APIRouter()

    @router.get("/open")
    @open_to_all
    async def for_all() -> str:
        return "open"

    @router.get("/mine/{number}")
    async def with_a_key(number: int) -> int:
        return number

    @router.get("/all/{number}")
    @admin_only
    async def for_admins(number: int) -> int:
        return number

    routers_of = app.routers_of
    monkeypatch.setattr(app, "routers_of", lambda serving: (*routers_of(serving), router))
    server = serve(keys=(Key.of("one", "alice"), Key.of("root", "admin", admin=True)))

    def statuses(path):
        keys = ({}, {"Authorization": "Bearer one"}, {"Authorization": "Bearer root"})
        return [server.http.get(path, headers=headers).status_code for headers in keys]

    assert statuses("/open") == [200, 200, 200]
    assert statuses("/mine/1") == [401, 200, 200]
    assert statuses("/all/1") == [401, 403, 200]
    assert "/mine/{number}" in server.http.get("/openapi.json", headers={"Authorization": "Bearer one"}).json()["paths"]
