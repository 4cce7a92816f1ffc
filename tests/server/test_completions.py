"""`/v1/completions` gives what the engine gives, whole and streamed, in OpenAI's form."""

import pytest
from kinds_of_tokenizers import TOKENIZERS
from tokenizers import AddedToken

from jpaged import BeamSearchParams, SamplingParams
from jpaged.outputs import Logprob
from jpaged.server.openai.logprobs import CompletionLogprobs, chat_logprobs
from jpaged.text.detokenizer import IncrementalDecoder

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "the cab", "max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def texts(tiny_llm):
    """Return what the engine itself says to a prompt."""

    def of(prompt, **params):
        return [one.text for one in tiny_llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs]

    return of


def test_a_prompt_gets_the_text_and_the_counts_of_the_engine(texts, server_after):
    want = texts("the cab", max_tokens=12, seed=5, ignore_eos=True)
    server = server_after()
    answer = server.answer(PATH, BODY)
    assert [choice["text"] for choice in answer["choices"]] == want
    assert answer["choices"][0]["finish_reason"] == "length" and answer["object"] == "text_completion"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == 12 + usage["prompt_tokens"]


def test_a_stream_has_the_text_of_the_whole_answer_and_ends_with_the_usage(server):
    whole = server.answer(PATH, BODY)
    chunks = server.chunks(PATH, BODY | {"stream_options": {"include_usage": True}})
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == whole["choices"][0]["text"]
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert len({c["id"] for c in chunks}) == 1


def test_a_stream_without_the_option_never_speaks_of_usage(server):
    assert not any("usage" in chunk for chunk in server.chunks(PATH, BODY))


def test_several_prompts_of_several_outputs_are_numbered_in_their_order(server):
    body = BODY | {"prompt": ["the cab", [9, 10, 11]], "n": 2}
    whole = server.answer(PATH, body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    alone = server.answer(PATH, body | {"prompt": [9, 10, 11]})
    assert [c["text"] for c in whole["choices"][2:]] == [c["text"] for c in alone["choices"]]
    streamed = dict.fromkeys(range(4), "")
    for chunk in server.chunks(PATH, body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [choice["text"] for choice in whole["choices"]]
    assert whole["usage"]["completion_tokens"] == 48


def test_echo_scores_the_prompt_and_needs_no_new_token(server):
    answer = server.complete(prompt="ab cd", echo=True, logprobs=2, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "ab cd" and answer["usage"]["completion_tokens"] == 0
    found = choice["logprobs"]
    assert "".join(found["tokens"][1:]) in "ab cd" and len(found["tokens"]) == answer["usage"]["prompt_tokens"]
    assert found["token_logprobs"][0] is None and all(value <= 0 for value in found["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"][1:])


def test_an_echoed_prompt_has_the_text_of_its_first_token_and_every_offset_is_a_place_in_the_text(server):
    tokenizer = server.engine.tokenizer
    mark = tokenizer.bos_token
    for prompt in ("ab cd", mark + "ab", tokenizer.convert_tokens_to_ids([mark, *"ab"])):
        choice = server.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]
        found = choice["logprobs"]
        assert found["tokens"][0] and found["token_logprobs"][0] is None
        placed = zip(found["tokens"], found["text_offset"], strict=True)
        assert all(choice["text"][place:].startswith(token) for token, place in placed), choice
        assert "".join(found["tokens"]) == choice["text"]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_alone_takes_a_prompt_of_the_whole_context_and_no_longer_one(server, logprobs):
    most = server.engine.config.max_model_len
    scored = {} if logprobs is None else {"logprobs": logprobs}
    body = {"echo": True, "max_tokens": 0, **scored}
    for count in (most - 1, most):
        choice = server.complete(prompt=[9] * count, **body)["choices"][0]
        assert choice["finish_reason"] == "length" and len(choice["text"]) > 0
        assert logprobs is None or len(choice["logprobs"]["tokens"]) == count
    assert f"max_model_len={most}" in server.refusal(PATH, {"prompt": [9] * (most + 1), **body})["message"]
    assert "no room for output" in server.refusal(PATH, {"prompt": [9] * most, "max_tokens": 1})["message"]
    assert server.used_blocks() == 0


@pytest.mark.parametrize("drawn", ["second half", "letter", "first half"])
@pytest.mark.parametrize("echo", [False, True])
def test_a_prompt_that_ends_within_a_character_is_continued_alike_whole_and_streamed(server, monkeypatch, drawn, echo):
    tokenizer = TOKENIZERS["byte level"]()
    for holder in (server.engine, server.engine.output_processor):
        monkeypatch.setattr(holder, "tokenizer", tokenizer)
    letter, (first, second) = tokenizer.convert_tokens_to_ids("a"), tokenizer.encode("é", add_special_tokens=False)
    token = {"second half": second, "letter": letter, "first half": first}[drawn]
    body = {"prompt": [letter, first], "max_tokens": 3, "allowed_token_ids": [token], "temperature": 0, "echo": echo}
    whole = server.complete(**body)["choices"][0]["text"]
    chunks = [chunk["choices"][0]["text"] for chunk in server.chunks(PATH, body | {"model": "tiny"})]
    added = {"second half": "é\ufffd\ufffd", "letter": "aaa", "first half": "\ufffd\ufffd\ufffd"}[drawn]
    before = ("a" if drawn == "second half" else "a\ufffd") if echo else ""
    assert whole == before + added and "".join(chunks) == whole
    assert not echo or whole == tokenizer.decode([letter, first, token, token, token])


def test_a_special_token_without_a_role_moves_no_offset(server, monkeypatch):
    tokenizer = TOKENIZERS["byte level"]()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("q", special=True)])
    for holder in (server.engine, server.engine.output_processor):
        monkeypatch.setattr(holder, "tokenizer", tokenizer)
    drawn = tokenizer.convert_tokens_to_ids(["q", "a"])
    body = {"allowed_token_ids": drawn, "max_tokens": 12, "temperature": 2, "seed": 0, "logprobs": 0}
    for skips, shown in ((True, "a"), (False, "qa")):
        choice = server.complete(prompt="ab", skip_special_tokens=skips, **body)["choices"][0]
        found = choice["logprobs"]
        assert {*found["tokens"]} == {"q", "a"}
        placed = zip(found["tokens"], found["text_offset"], strict=True)
        assert [choice["text"][place] for token, place in placed if token in shown] == [*choice["text"]]


def test_a_mark_that_the_tokenizer_put_before_a_text_has_no_place_in_it():
    found = CompletionLogprobs(0).piece([1, 2], [None, {2: Logprob(-1.0, 1, "ab")}], first="<s>", echo="abc")
    assert (found["tokens"], found["text_offset"]) == (["<s>", "ab"], [0, 0])
    words = [None, {2: Logprob(-1.0, 1, " the")}, {3: Logprob(-1.0, 1, " cab")}]
    found = CompletionLogprobs(0).piece([1, 2, 3, 3], [*words, words[2]], first="<s>", echo="the cab")
    assert found["text_offset"] == [0, 0, 3, 7]


def test_half_a_character_that_is_left_counts_once_where_the_next_token_begins():
    tokenizer = TOKENIZERS["byte level"]()
    half, rest = tokenizer.encode("é", add_special_tokens=False)
    letter = tokenizer.convert_tokens_to_ids("s")
    for ids, want in (([half, letter], [0, 1]), ([half, half, letter], [0, 1, 2]), ([half, rest, letter], [0, 0, 1])):
        entries = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in ids]
        assert CompletionLogprobs(0, tokenizer).piece(ids, entries)["text_offset"] == want
        assert tokenizer.decode(ids)[want[-1] :] == "s"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_offsets_count_characters_whatever_tokens_they_are_made_of(kind):
    tokenizer = TOKENIZERS[kind]()
    if kind == "byte level":
        ids = [*tokenizer.encode("a😀é", add_special_tokens=False), tokenizer.convert_tokens_to_ids("s")]
        want = [0, 1, 1, 2, 2, 3]
    else:
        ids = tokenizer.convert_tokens_to_ids(["s", "<0xE6>", "<0x97>", "<0xA5>", "é", "s"])
        want = [0, 1, 1, 1, 2, 3]
    ids.insert(-1, tokenizer.convert_tokens_to_ids("</s>"))
    want.insert(-1, want[-1])
    entries = [{token: Logprob(-1.0, 1, tokenizer.decode([token]))} for token in ids]
    hidden = frozenset([tokenizer.convert_tokens_to_ids("</s>")])
    found = CompletionLogprobs(0, tokenizer, hidden).piece(ids, entries)
    text = tokenizer.decode([token for token in ids if token not in hidden])
    assert found["text_offset"] == want and want[-1] == len(text) - 1
    for cut in range(1, len(ids)):  # after a prompt that may end inside a character
        later = CompletionLogprobs(0, tokenizer, hidden, before=ids[:cut])
        decoder = IncrementalDecoder(tokenizer, prompt=ids[:cut])
        places = later.piece(ids[cut:], entries[cut:])["text_offset"]
        shown = "".join([*map(decoder.push, ids[cut:]), decoder.finish()])
        assert places[-1] == len(shown) - (ids[-1] not in hidden)
    halves = [entry["bytes"] for entry in chat_logprobs(ids, entries, 1, tokenizer)["content"]]
    assert b"".join(map(bytes, halves)).decode() == tokenizer.decode(ids)
    alternatives = chat_logprobs(ids, entries, 1, tokenizer)["content"][1]["top_logprobs"]
    assert alternatives[0]["bytes"] == halves[1]


def test_what_prompt_logprobs_may_not_be_is_refused_beside_echo_as_it_is_alone(server):
    for value, said in ((-1, "max_logprobs"), (-5, "prompt_logprobs=-5")):
        alone = server.refusal(PATH, BODY | {"prompt_logprobs": value})
        assert server.refusal(PATH, BODY | {"prompt_logprobs": value, "echo": True, "logprobs": 1}) == alone
        assert alone["param"] == "prompt_logprobs" and said in alone["message"]


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(server):
    body = BODY | {"logprobs": 3, "echo": True}
    whole = server.answer(PATH, body)["choices"][0]["logprobs"]
    pieces = [c["choices"][0]["logprobs"] for c in server.chunks(PATH, body)]
    for name in ("tokens", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == whole[name]
    assert [value for piece in pieces for value in piece["token_logprobs"]][1:] == pytest.approx(
        whole["token_logprobs"][1:], abs=1e-3
    )


def test_the_best_of_several_outputs_are_returned(server):
    every = server.answer(PATH, BODY | {"n": 4, "logprobs": 0})["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / 12 for c in every}
    best = server.answer(PATH, BODY | {"best_of": 4, "n": 2})["choices"]
    assert [c["text"] for c in best] == sorted(means, key=means.get)[:1:-1] and [c["index"] for c in best] == [0, 1]


def test_a_stop_string_ends_the_text_before_it(server):
    text = server.answer(PATH, BODY)["choices"][0]["text"]
    stop = text[3:5]
    choice = server.answer(PATH, BODY | {"stop": [stop]})["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


def test_parameters_reach_the_engine(texts, server_after):
    """Each changes the text, or the test could not tell that it came through."""
    base = {"max_tokens": 12, "seed": 5, "ignore_eos": True, "temperature": 1.5}
    changed = {
        "temperature": 0.0,
        "top_k": 2,
        "top_p": 0.2,
        "min_p": 0.5,
        "seed": 6,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 0.001,
        "logit_bias": {20: 100.0},
        "allowed_token_ids": [20, 21],
        "bad_words": [texts("the cab", **base)[0][2]],
    }
    want = {name: texts("the cab", **base | {name: value}) for name, value in changed.items()}
    plain = texts("the cab", **base)
    server = server_after()
    for name, value in changed.items():
        sent = {str(key): bias for key, bias in value.items()} if name == "logit_bias" else value
        got = server.complete(**base | {name: sent})
        assert [c["text"] for c in got["choices"]] == want[name] != plain, name


def test_a_shape_is_followed(server):
    assert server.complete(structured_outputs={"choice": ["yes", "no"]})["choices"][0]["text"] in ("yes", "no")
    digits = server.complete(structured_outputs={"regex": "[0-9]{3}"})["choices"][0]["text"]
    assert len(digits) == 3 and digits.isdecimal()


def test_a_negative_seed_is_a_seed(server):
    one, same = (server.answer(PATH, BODY | {"seed": -7}) for _ in range(2))
    assert one["choices"][0]["text"] == same["choices"][0]["text"] != server.answer(PATH, BODY)["choices"][0]["text"]


def test_a_beam_search_returns_its_beams(tiny_llm, server_after):
    want = [one.text for one in tiny_llm.beam_search("the cab", BeamSearchParams(3, 6), use_tqdm=False)[0].outputs]
    server = server_after()
    got = server.complete(use_beam_search=True, n=3, max_tokens=6)["choices"]
    assert [choice["text"] for choice in got] == want


def test_a_stream_tells_every_token_and_the_prompts_even_where_no_text_comes_yet(server):
    mark = server.engine.tokenizer.bos_token_id  # a special token, which the text leaves out
    body = BODY | {"prompt": [9, 10, 11], "allowed_token_ids": [mark], "max_tokens": 4, "return_token_ids": True}
    choices = [chunk["choices"][0] for chunk in server.chunks(PATH, body)]
    assert [token for choice in choices for token in choice["token_ids"]] == [mark] * 4
    assert choices[0]["text"] == "" and choices[0]["prompt_token_ids"] == [9, 10, 11]


def test_prompt_logprobs_and_token_ids_come_where_they_are_asked_for(server):
    choice = server.complete(prompt=[9, 10, 11], prompt_logprobs=1, return_token_ids=True)["choices"][0]
    assert choice["prompt_logprobs"][0] is None and "10" in choice["prompt_logprobs"][1]
    assert choice["prompt_token_ids"] == [9, 10, 11] and choice["token_ids"]
