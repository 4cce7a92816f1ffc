"""What each option of `chat` does to the prompt."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import pytest
import tiny_chat_model

from jpaged.text import template_forms
from jpaged.text.chat_template import ChatOptions, templated
from jpaged.text.prompt import Conversation, Tokenization, chat_prompt, parse_prompt

HELLO = [{"role": "user", "content": "hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
FULL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[{{ name | default('assistant') }}]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat_model.tokenizer()


@pytest.fixture
def text(tokenizer):
    return lambda messages, **options: chat_prompt(Conversation(messages, ChatOptions(**options)), tokenizer)["prompt"]


def test_a_template_may_be_given_and_has_variables(text):
    assert text(HELLO) == "<s>user: hello<s>assistant:"
    assert text(HELLO, chat_template=FULL) == "[user]hello[assistant]"
    assert text(HELLO, chat_template=FULL, chat_template_kwargs={"name": "bot"}) == "[user]hello[bot]"


def test_the_prompt_ends_before_behind_or_in_the_last_message(text):
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    assert text(HELLO, add_generation_prompt=False) == "<s>user: hello"
    closed = FULL.replace("{{ m.content }}", "{{ m.content }}[end]")
    goes_on = text(begun, chat_template=closed, add_generation_prompt=False, continue_final_message=True)
    assert goes_on == "[user]hello[end][assistant]Well"


def test_both_a_new_message_and_the_last_one_is_refused():
    with pytest.raises(ValueError, match="give add_generation_prompt=False with it"):
        ChatOptions(continue_final_message=True)


def test_tools_reach_the_template_or_are_refused(text):
    assert json.loads(text(HELLO, chat_template=FULL, tools=[TOOL]).partition("[user]")[0]) == [TOOL]
    with pytest.raises(
        ValueError, match=r"the chat template has no place for them; .* chat_template= .*--chat-template"
    ):
        text(HELLO, tools=[TOOL])


def test_arguments_of_tool_calls_are_given_as_what_they_mean(text):
    def called(arguments):
        call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": arguments}}
        return [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]

    options = {"chat_template": FULL, "add_generation_prompt": False}
    assert text(called('{"city": "Ulm"}'), **options) == text(called({"city": "Ulm"}), **options)
    assert text(called('{"city": "Ulm"}'), **options).endswith('[assistant]{"city": "Ulm"}')
    assert text(called("{nope"), **options).endswith('[assistant]"{nope"')


def test_parts_of_a_content_are_joined_or_given_as_they_are(text):
    takes_parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert text(PARTS) == "<s>user: one\ntwo<s>assistant:"
    given = {"chat_template": takes_parts, "add_generation_prompt": False}
    assert text(PARTS, chat_template_content_format="openai", **given) == "<one><two>"
    assert text(PARTS, chat_template=FULL, chat_template_content_format="string") == "[user]one\ntwo[assistant]"


ONLY_PARTS = (  # as LLaVA-OneVision's
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content | selectattr('type', 'equalto', 'image') %}<image>"
    "{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("form", ["auto", "openai"])
def test_a_template_that_takes_only_parts_gets_a_text_as_one(text, form):
    given = {"chat_template": ONLY_PARTS, "add_generation_prompt": False, "chat_template_content_format": form}
    answered = [*HELLO, {"role": "assistant", "content": "hi"}, *PARTS]
    assert text(answered, **given) == "[user]hello[assistant]hi[user]onetwo"
    assert text([*HELLO, {"role": "assistant", "content": ""}], **given) == "[user]hello[assistant]"


def test_such_a_template_writes_the_place_of_an_image_itself(tokenizer):
    options = ChatOptions(chat_template=ONLY_PARTS, add_generation_prompt=False)
    messages = [{"role": "system", "content": "look"}, {"role": "user", "content": [{"type": "image", "image": "x"}]}]
    assert templated(messages, tokenizer, options, {"image": "<image>"}) == "[system]look[user]<image>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_generation_prompt": 1}, "add_generation_prompt=1 must be True or False"),
        ({"chat_template": ""}, "chat_template='' must be the text of a template"),
        ({"chat_template_content_format": "xml"}, "'xml' is not one of auto, string, openai"),
        ({"tools": TOOL}, "must be a list of mappings"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs=\[1\] must be a mapping"),
        ({"chat_template_kwargs": {"tools": []}}, r"has \['tools'\], which are no variables but arguments of chat"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ChatOptions(**options)


def test_a_template_that_is_no_jinja_is_blamed_itself_with_its_line(text):
    with pytest.raises(ValueError, match=r"^the chat template is damaged, in line 2: Expected an expression"):
        text([{"role": "user", "content": "a"}], chat_template="{{ 1 }}\n{% for %}")


def test_a_model_without_a_template_says_what_to_give(tokenizer):
    bare = tiny_chat_model.tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="the model has no chat template: give chat_template="):
        parse_prompt(Conversation(HELLO), bare)
    assert parse_prompt(Conversation(HELLO, ChatOptions(chat_template=FULL)), bare).text == "[user]hello[assistant]"


def test_the_tokenizer_adds_nothing_to_what_a_template_made_unless_told_to(tokenizer):
    class Adding:
        chat_template = FULL

        def encode(self, text, add_special_tokens):
            return [1] * add_special_tokens + [len(text)]

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    told = Tokenization.of({"add_special_tokens": True})
    conversation = Conversation(HELLO, ChatOptions(chat_template=FULL))
    assert parse_prompt("abc", Adding()).token_ids == [1, 3]
    assert parse_prompt("abc", Adding(), Tokenization.of({"add_special_tokens": False})).token_ids == [3]
    assert len(parse_prompt(conversation, Adding()).token_ids) == 1
    assert len(parse_prompt(conversation, Adding(), told).token_ids) == 2


def test_what_a_template_takes_is_remembered_no_longer_than_its_tokenizer(tokenizer):
    own = copy.copy(tokenizer)
    chat_prompt(Conversation(HELLO, ChatOptions()), own)
    assert own in template_forms._FORMS
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None


STRICT = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}{% if m.content is string and 'bad' in m.content %}
{{ raise_exception('No such words') }}{% endif %}{{ m.content + '' }}{{ m.name.first.letter if m.name }}
{% for c in m.tool_calls %}{{ c.function.arguments.items() | list }}{% endfor %}{% endfor %}
{% if tools %}{{ tools[0].nothing.there }}{% endif %}{% if mood %}{{ mood + 1 }}{% endif %}"""
TURNS = [{"role": role, "content": "so"} for role in ("user", "assistant", "user", "assistant", "user")]


@pytest.mark.parametrize(
    ("at", "change", "options", "said"),
    [
        (3, {"role": "user"}, {}, r"messages\[3\], of the role 'user', does not fit the chat template: Roles must alt"),
        (2, {"content": "bad"}, {}, r"content of messages\[2\], of the role 'user', does not fit .*: No such words"),
        (1, {"name": "Ann"}, {}, r"name of messages\[1\], of the role 'assistant', does not fit .*'first'"),
        (4, {"content": None}, {}, r"content of messages\[4\], of the role 'user', does not fit"),
        (0, {}, {"tools": [TOOL]}, "^tools do not fit the chat template: .*nothing"),
        (0, {}, {"chat_template_kwargs": {"mood": "low"}}, "^chat_template_kwargs do not fit the chat template: .*str"),
        (4, {"role": "assistant"}, {}, r"messages\[4\], of the role 'assistant', does not fit"),
    ],
)
def test_an_error_of_a_template_names_the_message_and_the_field(text, at, change, options, said):
    messages = [{**turn, **change} if i == at else turn for i, turn in enumerate(TURNS)]
    with pytest.raises(ValueError, match=said) as error:
        text(messages, chat_template=STRICT, **options)
    assert len(str(error.value)) < 300, "the conversation is not part of it"


def test_an_error_that_no_message_alone_causes_names_their_number(text):
    lacking = "{% if messages | length < 9 %}{{ raise_exception('Too few') }}{% endif %}{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"messages\[0\], of the role 'user', does not fit .*: Too few"):
        text(HELLO, chat_template=lacking)
    even = "{% if messages | length % 2 %}{{ raise_exception('Odd') }}{% endif %}{{ messages[0].content }}"
    with pytest.raises(ValueError, match="not fit the chat template: Odd"):
        text([*HELLO, *TURNS[1:], *TURNS[1:3]], chat_template=even)
