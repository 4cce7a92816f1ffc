import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from greedy_reference import random_prompts, torch_greedy
from tiny_chat_model import END_PROMPT, VOCAB_SIZE, make_chat_model

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine_args import EngineArgs
from jpaged.execution.sampling import sampling_batch
from jpaged.execution.sampling.logit_edits import Bans, BiasAndPenalties
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.outputs import AnswerMessage
from jpaged.short_values import with_short_values

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128}
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=32, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "the cab is far"
PROMPTS = random_prompts(lengths=(3, 9, 17, 20, 33))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    torch_model, end = make_chat_model(folder)
    return SimpleNamespace(folder=str(folder), torch=torch_model, end=end)


@pytest.fixture(scope="module")
def warm(model):
    """An engine and how many shapes its warm-up compiled: decodes of 1, 2, 4, a mixed step of 64, block copies; two
    samplers (plain and full) for 1 and 4 rows, one with tables and two writers of tables for 4. Its weights are arrays,
    as tests ask for them. The sampler's lists are so short that some tests need tables."""
    with pytest.MonkeyPatch.context() as patch:
        sampling_batch._blank.cache_clear()
        for edit in (BiasAndPenalties, Bans):
            patch.setattr(edit, "room", 256)
        llm = LLM(model.folder, max_num_batched_tokens=64, **SETTINGS)
        assert llm.params is not None
        known = llm.control.engine.runner.num_warmup
        yield SimpleNamespace(llm=llm, known=known, compiled=llm.warmup(use_tqdm=False))
    sampling_batch._blank.cache_clear()  # as they are of other lengths


@pytest.fixture
def llm(warm):
    """The engine; after every test its memory is empty and sound, and nothing was compiled."""
    yield warm.llm
    assert_nothing_is_left(warm.llm)
    assert warm.llm.num_recompiles == 0


@pytest.fixture(scope="module")
def tight(model, warm):
    """Ten blocks of 8 tokens and chunks of at most 8 tokens."""
    size = 10 * warm.llm.memory_report().page_bytes
    return LLM(model.folder, max_num_batched_tokens=8, kv_cache_memory_bytes=size, **SETTINGS)


def assert_nothing_is_left(llm):
    assert all(group.used == 0 for group in llm.memory_report().groups)
    assert not llm.control.engine.has_work
    llm.control.engine.memory.check_invariants()


def ids(tokens):
    return {"prompt_token_ids": tokens}


def generate(llm, prompts, params, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def first(llm, prompt, params):
    return generate(llm, prompt, params)[0].outputs[0]


# ---------------------------------------------------------------------- shapes and order


def test_the_number_of_compiled_shapes_is_known_before_the_warmup(warm):
    assert warm.known == warm.compiled == 3 + 1 + 1 + 2 * 2 + 3


def test_after_the_warmup_nothing_is_compiled(llm, warm):
    generate(llm, [ids(p) for p in PROMPTS], [GREEDY, DRAWN, replace(GREEDY, max_tokens=3), GREEDY, DRAWN])
    assert llm.num_recompiles == 0
    assert llm.control.engine.runner.worker.num_compiled == warm.known


def test_outputs_come_in_the_order_of_the_prompts(llm):
    lengths = [20, 2, 9, 1, 14]
    params = [replace(GREEDY, max_tokens=n) for n in lengths]
    outputs = generate(llm, [ids(p) for p in PROMPTS], params)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.error is None for output in outputs)
    assert all(completion.finished() for output in outputs for completion in output.outputs)


def test_every_form_of_a_prompt_means_the_same(llm):
    tokens = llm.tokenizer.encode(TEXT)
    forms = [TEXT, {"prompt": TEXT}, ids(tokens), tokens, {"prompt": TEXT, "prompt_token_ids": tokens}]
    outputs = generate(llm, forms, GREEDY)
    assert [output.prompt for output in outputs] == [TEXT, TEXT, None, None, TEXT]
    assert all(output.prompt_token_ids == tokens for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    for form in forms:
        assert first(llm, form, GREEDY).token_ids == outputs[0].outputs[0].token_ids


def test_no_prompts_give_no_outputs(llm):
    assert generate(llm, [], GREEDY) == []


def test_sampling_params_are_one_for_all_or_one_each(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        generate(llm, [TEXT] * 3, [GREEDY] * 2)


# ---------------------------------------------------------------------- refusals

REFUSED = {
    "empty": (ids([]), "the prompt has 0 tokens; at least 1 is needed"),
    "too long": (ids([5] * 128), "the prompt has 128 tokens, .* max_model_len=128"),
    "outside the vocabulary": (ids([5, VOCAB_SIZE]), r"token id 211 is outside the vocabulary \[0, 211\)"),
    "negative": (ids([5, -1]), r"token id -1 is outside the vocabulary \[0, 211\)"),
    "a boolean": (ids([True]), r"prompt_token_ids=\[True\] must be integers"),
    "unknown key": (
        {"prompt": "a", "image": {}},
        r"may have 'prompt', .* and 'cache_breakpoints', not \['image'\]",
    ),
    "an image": (
        {"prompt": "a", "multi_modal_data": {"image": 1}},
        "a prompt has 'multi_modal_data': prompts are text",
    ),
    "no key": ({"cache_salt": "a"}, "needs 'prompt' or 'prompt_token_ids', and has neither"),
    "no text beside ids": ({"prompt": 5, "prompt_token_ids": [1]}, "prompt=5 must be text"),
    "no text": ({"prompt": 5}, "prompt=5 must be text"),
    "half a character": ("\ud800", r"prompt='\\ud800' is not Unicode text"),
    "a number": (1.5, "prompt_token_ids=1.5 must be integers"),
    "nothing": (None, "prompt=None must be text"),
}


@pytest.mark.parametrize(("bad", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_prompt_refuses_the_batch_before_anything_runs(llm, bad, message):
    steps = llm.control.engine.stats.num_steps
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        generate(llm, [TEXT, bad, TEXT], GREEDY)
    assert llm.control.engine.stats.num_steps == steps
    assert_nothing_is_left(llm)
    assert len(first(llm, TEXT, GREEDY).token_ids) == 12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(TEXT, GREEDY, "yes"), "use_tqdm='yes' must be True or False"),
        (
            lambda llm: llm.generate(TEXT, GREEDY, False, "adapter"),
            "prompt 0: lora_request='adapter' needs an engine with enable",
        ),
        (lambda llm: llm.generate(TEXT, GREEDY, tokenization_kwargs={"padding": True}), r"not \['padding'\]"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], continue_final_message=True), "give add_generation"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], tools=[{}]), "chat template has no place for them"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_by_name(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)


def test_returned_errors_leave_the_rest_unaffected(llm):
    alone = [first(llm, prompt, GREEDY).token_ids for prompt in (TEXT, "abc")]
    bad = [prompt for prompt, _ in REFUSED.values()]
    outputs = generate(llm, [bad[0], TEXT, *bad[1:], "abc"], GREEDY, on_error="return")
    assert [output.error is None for output in outputs] == [False, True, *[False] * (len(bad) - 1), True]
    assert [outputs[i].outputs[0].token_ids for i in (1, -1)] == alone
    assert "128 tokens" in outputs[2].error
    assert not any(output.outputs for output in outputs if output.error)


def test_a_prompt_that_could_never_fit_the_pool_is_refused(tight):
    with pytest.raises(ValueError, match="60 prompt tokens that may grow to 110 tokens can never fit"):
        generate(tight, [TEXT, ids([5] * 60)], replace(GREEDY, max_tokens=50))
    assert_nothing_is_left(tight)
    assert len(first(tight, TEXT, GREEDY).token_ids) == 12


@pytest.mark.parametrize("prompts", [5, None, b"ab"], ids=repr)
def test_what_is_no_prompt_is_named(llm, prompts):
    with pytest.raises(TypeError, match=re.escape(f"prompts={prompts!r} must be text")):
        generate(llm, prompts, GREEDY)


def test_numpy_integers_are_token_ids(llm):
    want = first(llm, ids([5, 6]), GREEDY).token_ids
    for prompt in (np.array([5, 6]), list(np.array([5, 6])), [np.array([5, 6])]):
        assert first(llm, prompt, GREEDY).token_ids == want


@pytest.mark.parametrize("params", [{"n": 1}, 5, False], ids=repr)
def test_what_is_no_sampling_params_is_refused(llm, params):
    with pytest.raises(TypeError, match=f"parameters must be SamplingParams, not {type(params).__name__}"):
        generate(llm, TEXT, params)


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_prefix_caching", "no"), ("deterministic", 1), ("watermark", "a"), ("memory_utilization", "b")],
)
def test_a_setting_of_another_type_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        EngineConfig(model="m", **{name: value})


def test_on_error_is_checked(llm):
    with pytest.raises(ValueError, match="on_error='ignore'"):
        generate(llm, TEXT, GREEDY, on_error="ignore")


def test_edits_of_more_tokens_than_the_sampler_lists_compile_nothing_and_change_no_token(llm, monkeypatch):
    """The fixture sees that nothing was compiled after the warm-up."""
    tabled, write = list[int](), PairTables.of

    def noted(self, pieces, last_tokens):
        tabled.append(1)
        return write(self, pieces, last_tokens)

    monkeypatch.setattr(PairTables, "of", noted)
    asked = [
        replace(DRAWN, seed=seed, max_tokens=9, min_tokens=6, repetition_penalty=1.3, stop_token_ids=range(seed, 200))
        for seed in range(4)
    ]
    alone = [llm.generate(ids(PROMPTS[0]), params)[0].outputs[0].token_ids for params in asked]
    assert not tabled
    together = llm.generate([ids(PROMPTS[0])] * 4, asked)
    assert tabled
    assert [output.outputs[0].token_ids for output in together] == alone
    assert all(set(tokens[:6]).isdisjoint(range(3, 200)) for tokens in alone), "they end nothing before min_tokens"
    tabled.clear()
    monkeypatch.setattr(llm.control.engine.runner, "takes_larger", False)  # as after a warm-up alone
    llm.generate(ids(PROMPTS[0]), replace(asked[0], bad_words=[chr(number) for number in range(33, 127)]))
    assert tabled


def test_a_stop_token_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(ValueError, match="token id 211 is outside"):
        generate(llm, TEXT, replace(GREEDY, stop_token_ids=[211]))


@pytest.mark.parametrize("name", ["best_of", "logits_processors", "tempreature"])
def test_a_sampling_parameter_that_does_not_work_is_not_accepted(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


WRONG = [
    ("n", 0),
    ("n", 2.5),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", -2),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", ["a", 3]),
    ("stop", 5),
    ("stop", ["\ud800"]),
    ("temperature", 10**400),
    ("stop_token_ids", 5),
    ("allowed_token_ids", 5),
    ("bad_words", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("detokenize", 0),
    ("include_stop_str_in_output", "yes"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_named(name, value):
    with pytest.raises(ValueError, match=name) as error:
        SamplingParams(**{name: value})
    shown = value[-1] if isinstance(value, list) else value
    quoted = {with_short_values(f"{name}={shown}"), repr(shown), str(shown)}
    assert any(text in str(error.value) for text in quoted)


# ---------------------------------------------------------------------- ends


def test_max_tokens_ends_with_length(llm):
    out = first(llm, TEXT, replace(DRAWN, max_tokens=5))
    assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (5, "length", None)
    assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)


def test_without_max_tokens_a_sequence_fills_max_model_len(llm):
    output = generate(llm, ids([9] * 100), replace(DRAWN, max_tokens=None))[0]
    assert len(output.outputs[0].token_ids) == 28
    assert output.outputs[0].finish_reason == "length"


def test_a_stop_string_ends_the_text_before_it_also_across_token_borders(llm):
    whole = first(llm, TEXT, DRAWN)
    pieces = [llm.tokenizer.decode([token], skip_special_tokens=True) for token in whole.token_ids]
    text = "".join(pieces)
    assert whole.text == text
    for begin, end in ((8, 9), (8, 10), (12, 15)):  # inside one token, over two, over three
        stop = "".join(pieces[begin:end]) if end - begin != 2 else pieces[begin][-1:] + pieces[begin + 1][:1]
        at = text.find(stop)
        count = next(n for n in range(len(pieces) + 1) if stop in "".join(pieces[:n]))
        out = first(llm, TEXT, replace(DRAWN, stop=["no such text", stop]))
        assert (out.text, out.finish_reason, out.stop_reason) == (text[:at], "stop", stop)
        assert out.token_ids == whole.token_ids[:count]


def test_a_stop_string_stays_in_the_text_when_asked(llm):
    whole = first(llm, TEXT, DRAWN)
    stop = whole.text[5:8]
    out = first(llm, TEXT, replace(DRAWN, stop=stop, include_stop_str_in_output=True))
    assert out.text == whole.text[: whole.text.find(stop) + 3]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_the_token_that_ended_it_is_text_when_asked(llm):
    whole = first(llm, TEXT, DRAWN)
    token = whole.token_ids[6]
    asked = replace(DRAWN, stop_token_ids=[token], include_stop_str_in_output=True)
    for params in (asked, replace(asked, stop="no such text")):
        out = first(llm, TEXT, params)
        assert out.token_ids[-1] == token
        assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)


def test_a_stop_token_is_no_text_beside_stop_strings_either(llm):
    token = first(llm, TEXT, DRAWN).token_ids[6]
    out = first(llm, TEXT, replace(DRAWN, stop_token_ids=[token], stop="no such text"))
    assert out.text == llm.tokenizer.decode(out.token_ids[:-1], skip_special_tokens=True)


def test_without_detokenize_the_text_is_empty_and_the_tokens_are_the_same(llm):
    whole, out = first(llm, TEXT, DRAWN), first(llm, TEXT, replace(DRAWN, detokenize=False))
    assert (out.text, out.token_ids) == ("", whole.token_ids)
    with pytest.raises(ValueError, match=r"stop=\('a',\) needs text, and detokenize=False makes none"):
        SamplingParams(stop="a", detokenize=False)


def test_special_tokens_are_text_only_when_asked(llm):
    special = [token for token, added in llm.tokenizer.added_tokens_decoder.items() if added.special]
    prompts = [ids([5 + i, 9]) for i in range(8)]
    for skip in (True, False):
        params = [replace(DRAWN, seed=i, max_tokens=64, skip_special_tokens=skip) for i in range(8)]
        outputs = [output.outputs[0] for output in generate(llm, prompts, params)]
        assert any(set(special) & set(out.token_ids) for out in outputs)
        for out in outputs:
            assert ("</s>" in out.text or "<s>" in out.text or "<pad>" in out.text) == (
                not skip and bool(set(special) & set(out.token_ids))
            )


def test_a_stop_string_waits_for_min_tokens(llm):
    whole = first(llm, TEXT, DRAWN)
    stop = llm.tokenizer.decode(whole.token_ids[:1])
    out = first(llm, TEXT, replace(DRAWN, stop=stop, min_tokens=8))
    assert len(out.token_ids) >= 8
    assert out.text.startswith(stop)


def test_a_stop_token_stays_in_the_ids_and_out_of_the_text(llm):
    whole = first(llm, TEXT, DRAWN)
    token = whole.token_ids[6]
    count = whole.token_ids.index(token) + 1
    out = first(llm, TEXT, replace(DRAWN, stop_token_ids=[token]))
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (whole.token_ids[:count], "stop", token)
    assert out.text == llm.tokenizer.decode(out.token_ids[:-1], skip_special_tokens=True)


def test_a_stop_token_cannot_be_drawn_before_min_tokens(llm):
    token = first(llm, TEXT, DRAWN).token_ids[0]
    out = first(llm, TEXT, replace(DRAWN, stop_token_ids=[token], min_tokens=10))
    assert len(out.token_ids) > 10
    assert token not in out.token_ids[:10]


def test_end_of_sequence_ends_unless_it_is_ignored(llm, model):
    whole = first(llm, ids(END_PROMPT), GREEDY)
    assert (len(whole.token_ids), whole.finish_reason) == (12, "length")
    ended = first(llm, ids(END_PROMPT), replace(GREEDY, ignore_eos=False))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(model.end) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    late = first(llm, ids(END_PROMPT), replace(GREEDY, ignore_eos=False, min_tokens=9))
    assert model.end not in late.token_ids[:9]


def test_special_tokens_are_text_only_when_asked_for(llm):
    params = [replace(DRAWN, temperature=3.0, seed=i, max_tokens=60) for i in range(6)]
    skipped = generate(llm, [TEXT] * 6, params)
    shown = generate(llm, [TEXT] * 6, [replace(p, skip_special_tokens=False) for p in params])
    specials = 0
    for one, other in zip(skipped, shown, strict=True):
        tokens = one.outputs[0].token_ids
        assert other.outputs[0].token_ids == tokens
        assert one.outputs[0].text == llm.tokenizer.decode([t for t in tokens if t > 2])
        assert other.outputs[0].text == llm.tokenizer.decode(tokens, skip_special_tokens=False)
        specials += sum(t <= 2 for t in tokens)
    assert specials > 0


# ---------------------------------------------------------------------- probabilities and seeds


@pytest.mark.parametrize("params", [GREEDY, DRAWN, replace(DRAWN, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)])
def test_cumulative_logprob_is_that_of_the_models_softmax(llm, model, params):
    for output in generate(llm, [ids(p) for p in PROMPTS], replace(params, logprobs=0)):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model.torch(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        expected = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].sum()
        assert output.outputs[0].cumulative_logprob == pytest.approx(float(expected), abs=1e-4)


def test_a_seed_draws_the_same_alone_in_a_batch_preempted_and_in_chunks(llm, tight):
    params = [replace(DRAWN, seed=100 + i, temperature=1.0 + 0.1 * i, top_p=0.95) for i in range(len(PROMPTS))]
    batch = generate(llm, [ids(p) for p in PROMPTS], params)
    tokens = [output.outputs[0].token_ids for output in batch]
    assert [first(llm, ids(p), s).token_ids for p, s in zip(PROMPTS, params, strict=True)] == tokens
    squeezed = generate(tight, [ids(p) for p in PROMPTS], params)
    assert sum(output.metrics.num_preemptions for output in squeezed) > 0
    assert [output.outputs[0].token_ids for output in squeezed] == tokens
    assert_nothing_is_left(tight)


def test_seeds_differ_and_requests_without_one_differ_too(llm):
    seeded = generate(llm, [TEXT] * 4, [replace(DRAWN, seed=i) for i in range(4)])
    unseeded = generate(llm, [TEXT] * 4, replace(DRAWN, seed=None))
    for outputs in (seeded, unseeded):
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


# ---------------------------------------------------------------------- chat, prefix cache, weights


def test_chat_goes_through_the_models_template(llm):
    one = [{"role": "user", "content": "hi"}]
    two = [*one, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "cd"}]
    texts = ["<s>user: hi<s>assistant:", "<s>user: hi<s>assistant: ab<s>user: cd<s>assistant:"]
    outputs = llm.chat([one, two], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == texts
    tokens = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [output.prompt_token_ids for output in outputs] == tokens
    assert outputs[0].outputs[0].token_ids == first(llm, ids(tokens[0]), GREEDY).token_ids
    assert all(one.outputs[0].message == AnswerMessage(one.outputs[0].text) for one in outputs)
    assert llm.chat(one, GREEDY, use_tqdm=False)[0].prompt == texts[0]
    assert llm.chat(one, GREEDY, use_tqdm=False, add_generation_prompt=False)[0].prompt == "<s>user: hi"


TURN = [{"role": "user", "content": "hi"}]
NO_CONVERSATION = [
    ([], "messages=\\[\\] has no message"),
    ("hi", r"messages='hi' must be a list of \{'role'"),
    ([{"x": "y"}], r"message \{'x': 'y'\} must be \{'role'"),
    ([*TURN, "hi"], "message 'hi' must be"),
    ([{"role": "user", "content": 5}], "content=5 must be text or a list of parts"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type 'image_url'.* only 'text' is taken"),
    ([{"role": "user", "content": [{"type": "text"}]}], "whose 'text' must be text"),
    ([{"role": "user", "content": ["hi"]}], "a part of type None, 'hi'"),
]


@pytest.mark.parametrize(("bad", "message"), NO_CONVERSATION, ids=[message for _, message in NO_CONVERSATION])
def test_a_bad_conversation_refuses_the_batch_by_its_place(llm, bad, message):
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        llm.chat([TURN, bad], GREEDY, use_tqdm=False)
    assert_nothing_is_left(llm)


def test_returned_errors_of_conversations_leave_the_rest_unaffected(llm):
    (alone,) = llm.chat(TURN, GREEDY, use_tqdm=False)
    bad = [conversation for conversation, _ in NO_CONVERSATION]
    good, *rest = llm.chat([TURN, *bad], GREEDY, use_tqdm=False, on_error="return")
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
    for output, (_, message) in zip(rest, NO_CONVERSATION, strict=True):
        assert re.search(message, output.error) and output.prompt is None and not output.outputs
    with pytest.raises(ValueError, match="prompt 0: messages='hi' must be a list"):
        llm.chat("hi", GREEDY, use_tqdm=False)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]}]
LOOPED = (
    "{% for message in messages %}{% if message.content is string %}<s>{{ message.content }}"
    "{% else %}<s>{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def test_text_parts_are_joined_by_newlines_unless_the_template_takes_parts(llm, monkeypatch):
    assert llm.chat_prompt([*PARTS, *TURN])["prompt"] == "<s>user: ab\ncd<s>user: hi<s>assistant:"
    monkeypatch.setattr(llm.tokenizer, "chat_template", LOOPED)
    assert llm.chat_prompt([*PARTS, *TURN])["prompt"] == "<s>abcd<s>hi"


def test_a_repeated_prompt_comes_from_the_cache_only_when_caching_is_on(llm, model):
    before, again = (generate(llm, ids(PROMPTS[0] + [77] * 20), GREEDY)[0] for _ in range(2))
    assert again.num_cached_tokens == (len(PROMPTS[0]) + 19) // 8 * 8
    assert again.outputs[0].token_ids == before.outputs[0].token_ids
    off = LLM(model.folder, max_num_batched_tokens=64, enable_prefix_caching=False, **SETTINGS)
    assert [generate(off, ids(PROMPTS[0]), GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_new_weights_take_the_place_of_the_old(llm, model, tmp_path):
    other_torch, _ = make_chat_model(tmp_path, seed=1)
    other = LLM(str(tmp_path), max_num_batched_tokens=64, **SETTINGS).params
    expected = {
        name: [reference.tokens for reference in torch_greedy(torch_model, PROMPTS, 12)]
        for name, torch_model in (("old", model.torch), ("new", other_torch))
    }
    assert expected["old"] != expected["new"]

    def tokens():
        outputs = generate(llm, [ids(p) for p in PROMPTS], GREEDY)
        return [output.outputs[0].token_ids for output in outputs], sum(output.num_cached_tokens for output in outputs)

    old = llm.params
    llm.update_params(old)  # also empties the prefix cache
    assert tokens() == (expected["old"], 0)
    llm.update_params(other)
    assert tokens() == (expected["new"], 0), "KV of the old weights must not be found"
    llm.update_params(old)
    assert tokens() == (expected["old"], 0)


@pytest.mark.parametrize("change", [lambda x: x[..., :-1], lambda x: x.astype("bfloat16")], ids=["shape", "dtype"])
def test_weights_of_another_shape_or_dtype_are_refused_and_the_old_stay(llm, change):
    before, old = first(llm, TEXT, GREEDY).token_ids, llm.params
    leaves, tree = jax.tree.flatten(old)
    wrong = jax.tree.unflatten(tree, [*leaves[:-1], change(leaves[-1])])
    with pytest.raises(ValueError, match=r"new.* is (float32|bfloat16)\[.*the engine's is float32\["):
        llm.update_params(wrong)
    assert llm.params is old
    assert first(llm, TEXT, GREEDY).token_ids == before


def test_weights_of_another_structure_are_refused(llm):
    with pytest.raises(ValueError, match="new weights are of type list: give a tree like `params`"):
        llm.update_params(jax.tree.leaves(llm.params))
    tree = jax.tree.map(lambda leaf: leaf, llm.params)
    del tree["embed_tokens"]
    with pytest.raises(ValueError, match=r"new\['embed_tokens'\]\['weight'\]\.value is missing, which the engine's"):
        llm.update_params(tree)


# ---------------------------------------------------------------- vLLM's forms of the same


@pytest.mark.parametrize("prompts", [None, [None, None], ["one", "two"]])
def test_prompts_may_be_token_ids_alone(llm, prompts):
    ids = [PROMPTS[0], PROMPTS[1]]
    want = [output.outputs[0].token_ids for output in llm.generate(ids, GREEDY)]
    found = llm.generate(prompts, GREEDY, prompt_token_ids=ids)
    assert [output.outputs[0].token_ids for output in found] == want
    assert [output.prompt for output in found] == (prompts or [None, None])
    (one,) = llm.generate(prompt_token_ids=ids[0], sampling_params=GREEDY)
    assert one.outputs[0].token_ids == want[0] and one.prompt_token_ids == list(ids[0])


@pytest.mark.parametrize(
    ("prompts", "ids", "words"),
    [
        (["a"], [[1], [2]], "1 prompts for 2 prompt_token_ids"),
        ("a", [[1], [2]], "1 prompts for 2 prompt_token_ids"),
        ([{"prompt": "a"}], [[1]], "must be texts where prompt_token_ids are given"),
        ({"prompt": "a"}, [[1]], "must be texts where prompt_token_ids are given"),
        (None, [[]], "the prompt has 0 tokens"),
    ],
)
def test_token_ids_that_do_not_fit_the_prompts_are_refused(llm, prompts, ids, words):
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, GREEDY, prompt_token_ids=ids)
    with pytest.raises(TypeError, match="prompts=None must be text"):
        llm.generate(sampling_params=GREEDY)


def test_arguments_of_vllm_that_ask_for_nothing_are_taken(llm):
    plain = llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids
    assert llm.generate(TEXT, GREEDY, mm_processor_kwargs=None)[0].outputs[0].token_ids == plain
    assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)
    with pytest.raises(TypeError, match=r"mode='wait' is an argument of vLLM that LLM\.sleep has not: requests wait"):
        llm.sleep(1, mode="wait")


def test_a_request_knows_when_its_first_token_came(llm):
    times = llm.generate(TEXT, GREEDY)[0].metrics
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.first_token_latency == times.first_token_ts - times.arrival_time


def test_conversations_have_priorities(model):
    chats = [[{"role": "user", "content": TEXT}]] * 2
    with LLM(model.folder, scheduling_policy="priority", **SETTINGS) as llm:
        assert len(llm.chat(chats, GREEDY, priority=[1, 0])) == 2
        with pytest.raises(ValueError, match="1 priorities for 2 prompts"):
            llm.chat(chats, GREEDY, priority=[1])


def test_an_llm_is_made_of_engine_args(model):
    args = EngineArgs(model.folder, gpu_memory_utilization=0.5, enforce_eager=True, **SETTINGS)
    with LLM.from_engine_args(args) as llm:
        assert (llm.config.memory_utilization, llm.config.max_model_len) == (0.5, 128)
        assert llm.config == LLM(**asdict(args)).config
