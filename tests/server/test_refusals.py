"""What the server does not do it refuses, in OpenAI's shape and by the name of the field."""

import pytest

from jpaged.server.access import Key
from jpaged.server.bodies import unhonoured
from jpaged.server.errors import refused
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.openai.bodies.prompts import CompletionRequest, DetokenizeRequest, TokenizeRequest
from jpaged.server.openai.bodies.responses import ResponsesRequest
from jpaged.server.openai.bodies.vectors import EmbeddingRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
TEXT_PART = {"type": "text", "text": "a"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:,"}}
CALL = {"id": "c", "function": {"name": "f"}}


@pytest.fixture
def refuse(server):
    def refuse(path=COMPLETIONS, status=400, **body):
        base = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": MESSAGES}}.get(path, {"input": "a"})
        return server.refusal(path, base | body, status)

    return refuse


def test_fields_are_refused_by_name(refuse):
    for path, name, value in (
        (COMPLETIONS, "nonsense", 1),
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "max_tokens", "many"),
        (COMPLETIONS, "max_tokens", -1),
        (COMPLETIONS, "max_tokens", 0),
        (COMPLETIONS, "n", 0),
        (COMPLETIONS, "n", 129),
        (COMPLETIONS, "best_of", 0),
        (COMPLETIONS, "temperature", -0.1),
        (COMPLETIONS, "temperature", True),
        (COMPLETIONS, "top_p", 1.5),
        (COMPLETIONS, "min_p", 2.0),
        (COMPLETIONS, "presence_penalty", 3.0),
        (COMPLETIONS, "logit_bias", {"the": 1.0}),
        (COMPLETIONS, "logit_bias", {"9": 101.0}),
        (COMPLETIONS, "logit_bias", {"9999": 1.0}),
        (COMPLETIONS, "logprobs", 21),
        (COMPLETIONS, "stop", [""]),
        (COMPLETIONS, "stop_token_ids", [-1]),
        (COMPLETIONS, "stream_options", {"include_usage": True}),
        (COMPLETIONS, "priority", 1),
        (COMPLETIONS, "early_stopping", True),
        (COMPLETIONS, "length_penalty", 1.0),
        (COMPLETIONS, "cache_salt", ""),
        (COMPLETIONS, "prompt", []),
        (COMPLETIONS, "prompt", ""),
        (COMPLETIONS, "prompt", [[9], ["a"]]),
        (COMPLETIONS, "prompt", [9999]),
        (COMPLETIONS, "prompt", "\ud800"),
        (CHAT, "messages", []),
        (CHAT, "functions", []),
        (CHAT, "audio", {"voice": "low"}),
        (CHAT, "prediction", {"type": "content", "content": "a"}),
        (CHAT, "modalities", ["audio"]),
        (CHAT, "service_tier", "flex"),
        (CHAT, "top_logprobs", 2),
        (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (CHAT, "response_format", {"type": "yaml"}),
        (CHAT, "response_format", {"type": "json_schema"}),
        (CHAT, "continue_final_message", 1),
    ):
        error = refuse(path, **{name: value})
        assert (error["param"] or "").split(".")[0] == name or name in error["message"], (name, value, error)
        assert error["type"] == "invalid_request_error"


def test_a_value_of_the_wrong_form_is_named_with_what_it_may_be(refuse):
    for path, body, said in (
        (CHAT, {"n": 0}, "n=0: Input should be greater than or equal to 1"),
        (CHAT, {"n": 2**75}, f"n={2**75}: "),
        (CHAT, {"temperature": "hot"}, "temperature='hot': Input should be a valid number"),
        (
            CHAT,
            {"messages": [{"role": "wizard", "content": "a"}]},
            "messages.0.role='wizard': Input should be 'system', ",
        ),
        (CHAT, {"user": "x" * 257}, "user='xxxx"),
        (CHAT, {"user": "x" * 257}, "String should have at most 256 characters"),
        (CHAT, {"tool_choice": "many"}, "tool_choice='many': Input should be 'none', 'auto' or 'required'"),
        (
            CHAT,
            {"logit_bias": dict.fromkeys(map(str, range(2000)), 1.0)},
            "logit_bias: it has 2000 entries, the limit is",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0: a tool of the type 'function' needs the field function"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role: Field required"),
        (CHAT, {"seed": "\ud800"}, "seed='\\ud800': "),
        ("/v1/responses", {"tools": [{"type": "web_search"}], "temperature": "hot"}, "temperature='hot': "),
        ("/v1/responses", {"input": [{"type": "web_search_call"}, {"role": "wizard"}]}, "input.1.role='wizard': "),
        ("/v1/embeddings", {"encoding_format": "hex"}, "encoding_format='hex': Input should be 'float' or 'base64'"),
    ):
        assert said in refuse(path, **body)["message"], (body, said)


def test_a_message_is_refused_by_its_place(refuse):
    for message, param in (
        ({"role": "wizard", "content": "a"}, "messages.1.role"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages.1.content.0"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": None}]}, "messages.1.content.0"),
        ({"role": "user", "content": "a", "colour": 1}, "messages.1.colour"),
        ({"role": "user", "content": [TEXT_PART | {"image_url": {"url": "data:,"}}]}, "messages.1.content.0.image_url"),
        ({"role": "user", "content": [TEXT_PART | {"file": {}}]}, "messages.1.content.0.file"),
        ({"role": "user", "content": [IMAGE_PART | {"text": "a"}]}, "messages.1.content.0.text"),
        ({"role": "user", "content": "a", "tool_call_id": "c"}, "messages.1.tool_call_id"),
        ({"role": "system", "content": "a", "reasoning_content": "hm"}, "messages.1.reasoning_content"),
        ({"role": "tool", "content": "a", "tool_call_id": "c", "tool_calls": [CALL]}, "messages.1.tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}, "messages.1.function_call"),
    ):
        assert refuse(CHAT, messages=[*MESSAGES, message])["param"] == param


def test_images_for_a_model_without_eyes_are_refused_with_its_name(refuse):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert "takes no images" in refuse(CHAT, messages=[{"role": "user", "content": [image]}])["message"]


def test_fields_that_have_no_meaning_together_are_refused_by_name(refuse):
    shape = {"json_schema": {"schema": {"type": "boolean"}}}
    for path, name, body in (
        (COMPLETIONS, "add_special_tokens", {"add_special_tokens": False, "use_beam_search": True}),
        (COMPLETIONS, "skip_special_tokens", {"skip_special_tokens": False, "use_beam_search": True}),
        (CHAT, "max_completion_tokens", {"max_completion_tokens": 0, "use_beam_search": True}),
        (CHAT, "response_format.json_schema", {"response_format": {"type": "text"} | shape}),
        (COMPLETIONS, "response_format.json_schema", {"response_format": {"type": "json_object"} | shape}),
    ):
        assert refuse(path, **body)["param"] == name, body


def test_an_error_quotes_little_of_what_was_sent(refuse):
    long = "secret " * 1000
    for body in (
        {"structured_outputs": {"json": long}},
        {"structured_outputs": {"regex": f"({long}"}},
        {"structured_outputs": {"grammar": f"start: {long}"}},
        {"structured_outputs": {"json": {"type": long}}},
        {"response_format": {"type": long}},
        {"tools": [{"type": "function", "function": {"name": long}}]},
        {"model": long, "status": 404},
        {"tool_choice": {"function": {"name": long}}, "tools": []},
        {long: 1},
    ):
        error = refuse(CHAT, **body)
        assert error["message"].count("secret") < 60 and len(error["message"]) <= 400, error["message"]


def test_null_counts_as_not_given(server):
    nulls = dict.fromkeys(("suffix", "stop", "logit_bias", "temperature", "stream_options", "seed", "user", "n"))
    assert server.complete(**nulls)["choices"]
    message = {"role": "user", "content": "a", "name": None, "audio": None, "tool_calls": None}
    assert server.chat(messages=[message], functions=None, metadata=None)["choices"]


def test_an_unknown_model_is_not_found(refuse, server):
    error = refuse(model="gpt-99", status=404)
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    assert server.http.get("/v1/models/gpt-99").status_code == 404


def test_a_prompt_that_is_too_long_is_refused_and_says_the_limit(refuse):
    assert "max_model_len=128" in refuse(prompt=[9] * 128)["message"]
    assert "max_model_len=128" in refuse(prompt=[9] * 128, stream=True)["message"]


def test_bodies_that_are_no_json_object_are_refused(server):
    json = {"Content-Type": "application/json"}
    for content in (b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}'):
        response = server.http.post(COMPLETIONS, content=content, headers=json)
        assert response.status_code == 400, (content[:20], response.text)
        assert response.json()["error"]["message"]
    plain = server.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 400 and "application/json" in plain.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there_have_the_same_shape(server):
    for method, path, status in (("GET", "/v2", 404), ("GET", COMPLETIONS, 405), ("POST", "/../etc/passwd", 404)):
        response = server.http.request(method, path)
        assert response.status_code == status and response.json()["error"]["message"]


def test_a_body_above_the_limit_is_refused_before_it_is_read(serve):
    server = serve(max_body_bytes=1000)
    response = server.post(COMPLETIONS, {"prompt": "a" * 1000})
    assert response.status_code == 413 and response.json()["error"]["message"]

    def pieces():
        yield from [b"a" * 300] * 10

    unsized = server.http.post(COMPLETIONS, content=pieces(), headers={"Content-Type": "application/json"})
    assert unsized.status_code == 413


def test_what_the_engine_refuses_harms_no_other_request(server):
    before = server.complete(temperature=0)["choices"][0]["text"]
    server.refusal(COMPLETIONS, {"prompt": ["a", [9999]], "n": 3})
    assert server.complete(temperature=0)["choices"][0]["text"] == before
    assert server.used_blocks() == 0


def test_an_error_after_items_that_are_left_out_names_the_place_in_the_request(server):
    """Tools and items of OpenAI's servers are left out before the rest is looked at."""
    search = {"type": "web_search"}
    call = {"type": "web_search_call", "id": "w"}
    named = {"type": "function", "name": "a b"}
    for body, param in (
        ({"input": "a", "tools": [search, named]}, "tools.1.name"),
        (
            {"input": "a", "tools": [search, {"type": "namespace", "name": "n", "tools": [named]}]},
            "tools.1.tools.0.name",
        ),
        ({"input": [call, {"role": "user", "content": 1}]}, "input.1.content"),
        ({"input": [call, {"type": "function_call", "call_id": "c"}]}, "input.1.name"),
        ({"input": "a", "include": ["reasoning.encrypted_content", "x"]}, "include.1"),
        ({"input": 1, "tools": [search]}, "input"),
    ):
        assert server.refusal("/v1/responses", body)["param"] == param


def test_what_is_not_honoured_after_items_that_are_left_out_is_named_by_its_place():
    tools = [{"type": "web_search"}, {"type": "function", "defer_loading": True, "function": {"name": "f"}}]
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": tools})
    assert sorted(unhonoured(body)) == ["tools.0", "tools.1.defer_loading"]


def test_no_field_is_quoted_whole(server):
    long = "the cab " * 1300
    needed = {
        COMPLETIONS: (CompletionRequest, {"prompt": "a", "max_tokens": 1}),
        CHAT: (ChatRequest, {"messages": MESSAGES, "max_tokens": 1}),
        "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 1, "store": False}),
        "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
        "/tokenize": (TokenizeRequest, {"prompt": "a"}),
        "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
    }
    for path, (kind, body) in needed.items():
        for name in kind.model_fields:
            for value in (long, [long], {long: long}):
                answer = server.http.post(path, json=body | {name: value})
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert len(error["message"]) <= 400 and len(error["param"] or "") <= 200, (name, error)


def test_an_error_about_the_limit_on_tokens_names_the_field_that_was_sent(server):
    for path, name, body in (
        (CHAT, "max_tokens", {"messages": MESSAGES}),
        (CHAT, "max_completion_tokens", {"messages": MESSAGES}),
        ("/v1/responses", "max_output_tokens", {"input": "a"}),
    ):
        error = server.refusal(path, body | {name: -1})
        assert error["param"] == name and error["message"].startswith(f"{name}=-1 must be at least 1"), error


BAD = {"type": "objekt"}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {"logprobs": 100}, "logprobs", "logprobs=100 is above"),
        (COMPLETIONS, {"logprobs": 100, "echo": True}, "logprobs", "logprobs=100 is above"),
        (COMPLETIONS, {"prompt": [99999]}, "prompt", "prompt: token id 99999"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "the prompt has 0 tokens"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "prompt='\\ud800' is not Unicode text"),
        (COMPLETIONS, {"structured_outputs": {"json": BAD}}, "structured_outputs.json", "structured_outputs.json={"),
        (
            COMPLETIONS,
            {"response_format": {"type": "json_object", "schema": BAD}},
            "response_format.schema",
            "'objekt'",
        ),
        (COMPLETIONS, {"stop_token_ids": [99999]}, "stop_token_ids", "token id 99999"),
        (COMPLETIONS, {"bad_words": ["json= x"], "structured_outputs": {"json": BAD}}, "structured_outputs.json", ""),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21 is above"),
        (CHAT, {"response_format": BAD_FORMAT}, "response_format.json_schema.schema", "schema={'type': 'objekt'}"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "is not Unicode text"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [TEXT_PART, IMAGE_PART]}]},
            "messages.0.content.1.image_url",
            "messages have 1 image: ",
        ),
        (RESPONSES, {"input": "\ud800"}, "input", "is not Unicode text"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": BAD}}}, "text.format.schema", "'objekt'"),
    ],
)
def test_what_the_engine_refuses_names_the_path_and_the_name_that_were_sent(refuse, path, body, param, said):
    error = refuse(path, **body)
    assert error["param"] == param and said in error["message"], error
    assert error["code"] == "invalid_value"


def test_features_of_images_are_named_where_one_part_has_them():
    error = ValueError("image 2 of 2: image_embeds of shape [5, 7] must be [features, 6], with one feature or more")
    paths = [f"messages.0.content.{k}.image_embeds" for k in (1, 2)]
    assert refused(error, images=paths[:1]).param == paths[0], "one part has both images"
    assert refused(error, images=paths).param not in paths, "each part counts its own"


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(refuse):
    long = "the cab " * 300
    for path, body, param in (
        (COMPLETIONS, {"prompt": [9] * 128}, "prompt"),
        (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": long * 100}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": long * 100}]}, "messages"),
        (RESPONSES, {"input": long}, "input"),
    ):
        error = refuse(path, **body)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded"), error
        assert "max_model_len=128" in error["message"]


def test_more_prompts_than_may_wait_are_refused_with_the_flag(serve):
    error = serve(max_waiting=2).refusal(COMPLETIONS, {"prompt": ["a"] * 3})
    assert "3 prompts; the server takes 1 to 2 (--max-waiting-requests)" in error["message"]


def test_a_quoted_text_that_looks_like_a_parameter_is_left_as_it_is():
    error = refused(ValueError("messages=['json=1', \"json=2\"] have min_tokens=3 and json=4"), (), {"json": "a.b"})
    assert error.message == "messages=['json=1', \"json=2\"] have min_tokens=3 and a.b=4"


def test_a_pair_that_is_too_long_is_named_by_the_field_of_its_longer_text():
    names = {"data_1": "query", "data_2": "documents"}
    for limit in ("above the limit of 24 for a pair", "above max_model_len=24"):
        error = refused(ValueError(f"data_2[1]: the prompt has 99 tokens, {limit}"), ("query", "documents"), names)
        assert error.message == f"documents[1]: the prompt has 99 tokens, {limit}"
        assert (error.param, error.code) == ("documents", "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_a_limit_above_what_the_context_leaves_is_cut_to_it(server, tiny_llm, path, field):
    asked = {COMPLETIONS: {"prompt": "hello"}, CHAT: {"messages": MESSAGES}}.get(path, {"input": "hello"})
    wanted = {"temperature": 0, field: 10**6, "ignore_eos": True}
    answer = server.answer(path, asked | wanted)
    assert answer["usage"]["total_tokens"] == tiny_llm.config.max_model_len
    assert answer["status"] == "incomplete" if "status" in answer else answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_fills_the_context_is_refused(refuse, tiny_llm):
    most = tiny_llm.config.max_model_len
    assert refuse(prompt=[9] * most, max_tokens=1)["code"] == "context_length_exceeded"


def test_paths_of_vllms_server_say_what_to_use(server):
    for path, words in (
        ("/sleep", "the methods of AsyncLLM"),
        ("/pooling", "/v1/embeddings"),
        ("/invocations", "/v1/chat"),
    ):
        message = server.refusal(path, {}, 404)["message"]
        assert message.startswith(f"Not Found: {path} is a path of vLLM's server") and words in message
    assert server.refusal("/nonsense", {}, 404)["message"] == "Not Found"


def test_the_prefix_cache_is_reset_for_admins_only(serve):
    server = serve(keys=(Key.of("one", "alice"), Key.of("root", "admin", admin=True)))
    path, root = "/reset_prefix_cache", {"Authorization": "Bearer root"}
    assert server.http.post(path).status_code == 401
    assert server.http.post(path, headers={"Authorization": "Bearer one"}).status_code == 403
    body = {"prompt": list(range(9, 60)), "max_tokens": 1}

    def cached():
        answer = server.http.post(COMPLETIONS, json=body, headers=root).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached() > 0) == (0, True)
    assert server.http.post(path, headers=root).json() == {"success": True}
    assert cached() == 0
    assert server.http.post(path + "?reset_running_requests=true", headers=root).status_code == 400
