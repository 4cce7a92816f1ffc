"""Bodies that are as large as may be: the work before a refusal is bounded, however many things are wrong."""

import json

import pytest
from pydantic import ValidationError

from jpaged.server.bodies import Body
from jpaged.server.middleware import MOST_CONTAINERS, MOST_MEMBERS, MOST_VALUES, JsonCount
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.openai.bodies.fields import MOST_BIASES, MOST_TEXTS, MOST_TOKEN_IDS
from jpaged.server.openai.bodies.prompts import MOST_PROMPTS, CompletionRequest, DetokenizeRequest, TokenizeRequest
from jpaged.server.openai.bodies.responses import ResponsesRequest

MANY = 20_000
FEW = 10
"""Most errors of one body: each alternative of a union may have one."""
NEEDED = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    ResponsesRequest: {"input": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}
WRONG = [None, {}, [], 1.5, "x", {"role": "user", "content": [None] * 5}]


def errors_of(model: type[Body], body: dict) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    except Exception:
        return 1  # a field that is refused by name
    return 0


@pytest.mark.parametrize("model", NEEDED)
def test_of_many_wrong_entries_few_errors_are_built(model):
    for name in model.model_fields:
        for item in WRONG:
            for value in ([item] * MANY, [1] * MANY + [item], {str(i): item for i in range(MANY)}):
                assert errors_of(model, NEEDED[model] | {name: value}) <= FEW, (name, item)


def test_a_list_in_a_list_ends_at_its_first_error_too():
    parts = [{"role": "user", "content": [None] * MANY}] * 3
    assert errors_of(ChatRequest, {"messages": parts}) <= FEW
    assert errors_of(ResponsesRequest, {"input": parts}) <= FEW
    assert errors_of(CompletionRequest, {"prompt": [[1], ["a"] * MANY]}) <= FEW


@pytest.mark.parametrize("model", NEEDED)
def test_one_of_many_unknown_fields_is_named(model):
    unknown = {f"x{i}": 1 for i in range(MANY)}
    with pytest.raises(ValidationError) as error:
        model.model_validate(NEEDED[model] | unknown)
    assert [each["ctx"]["field"] for each in error.value.errors()] == ["x0"]


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("prompt", [""] * 10**6, MOST_PROMPTS),
        ("logit_bias", {str(i): 1 for i in range(49_000)}, MOST_BIASES),
        ("stop", ["a"] * 10**6, MOST_TEXTS),
        ("bad_words", ["a"] * 10**6, MOST_TEXTS),
        ("stop_token_ids", [1] * 10**6, MOST_TOKEN_IDS),
        ("allowed_token_ids", [1] * 10**6, MOST_TOKEN_IDS),
    ],
)
def test_the_entries_of_a_field_are_bounded_and_the_limit_is_named(server, name, value, limit):
    error = server.refusal("/v1/completions", {"prompt": "the cab", name: value})
    assert error["param"] == name and str(limit) in error["message"] and str(len(value)) in error["message"]


@pytest.mark.parametrize(
    ("item", "limit"),
    [("[]", MOST_CONTAINERS), ("{}", MOST_CONTAINERS), ("[[1]]", MOST_CONTAINERS), ("1", MOST_VALUES)],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_body_of_many_values_is_refused_before_it_is_parsed(server, monkeypatch, item, limit, path):
    content = '{"x": [' + ",".join([item] * limit) + "]}"

    def fail(*arguments, **options):
        raise AssertionError("the body was parsed")

    with monkeypatch.context() as patched:
        patched.setattr("starlette.requests.json.loads", fail)
        response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and str(limit) in response.json()["error"]["message"]


def test_the_members_of_objects_are_bounded_too(server):
    content = json.dumps({f"a{i}": 1 for i in range(MOST_MEMBERS + 1)})
    response = server.http.post("/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and f"{MOST_MEMBERS}" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32"])
def test_a_body_whose_values_cannot_be_counted_is_refused(server, encoding):
    """U+2200 is written with the byte of a quotation mark, after which a counter of bytes would count nothing."""
    content = '{"prompt": "\u2200", "x": [[], []]}'.encode(encoding)
    response = server.http.post("/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and "UTF-8" in response.json()["error"]["message"]


def test_brackets_in_texts_do_not_count(server):
    assert server.answer("/tokenize", {"prompt": "[" * (MOST_CONTAINERS + 1)})["count"]


@pytest.mark.parametrize(
    "value",
    [{}, [], [1, 2, {"a": []}], "[{,", 'a"[,', "\\", '\\"[', ["\\\\", {'"\\': ["[", 1]}], {"[": "\\\\\\", "b": [None]}],
)
def test_values_are_counted_alike_in_pieces_of_any_size(value):
    def inside(part):
        nested = list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else []
        below = [inside(each) for each in nested]
        containers = isinstance(part, dict | list) + sum(each[0] for each in below)
        return containers, isinstance(part, dict | list) + max(0, len(nested) - 1) + sum(each[1] for each in below)

    text = json.dumps(value).encode()
    for size in range(1, len(text) + 1):
        count = JsonCount()
        for start in range(0, len(text), size):
            count.add(text[start : start + size])
        assert (count.containers, count.values) == inside(value), size
