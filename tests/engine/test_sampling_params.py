"""What each sampling parameter does to the tokens of a model, while the engine runs ahead of the host."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from greedy_reference import one_torch_thread, random_prompts
from tiny_chat_model import VOCAB_SIZE, make_chat_model

from jpaged import LLM, SamplingParams

PROMPTS = random_prompts(lengths=(3, 9, 17, 33))
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, end = make_chat_model(folder)
    llm = LLM(str(folder), dtype="float32", block_size=8, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=16)
    return SimpleNamespace(llm=llm, torch=model, end=end)


def generate(llm, prompts, params) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.control.engine.memory.num_used_blocks == 0
    return [output.outputs[0].token_ids for output in outputs]


def greedy(**params) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **params)


def torch_tokens(model, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy tokens of penalised logits, all in float64."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        with one_torch_thread(), torch.inference_mode():
            x = model(torch.tensor([tokens])).logits[0, -1].double().numpy()
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        seen, (output, counts) = np.unique(tokens), np.unique(tokens[len(prompt) :], return_counts=True)
        repetition = params.repetition_penalty
        x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
        x[output.astype(int)] -= params.frequency_penalty * counts + params.presence_penalty
        tokens.append(int(x.argmax()))
    return tokens[len(prompt) :]


PENALTIES = [
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.6},
    {"repetition_penalty": 1.5},
    {"presence_penalty": -0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {5: 1.0, 77: -2.0}},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalised_greedy_tokens_are_those_of_torch(tiny, penalties):
    params = greedy(**penalties)
    want = [torch_tokens(tiny.torch, prompt, params) for prompt in PROMPTS]
    assert generate(tiny.llm, PROMPTS, params) == want
    assert want != generate(tiny.llm, PROMPTS, greedy()), "the penalty is too weak to show"


def test_penalised_and_plain_requests_share_a_batch(tiny):
    alone = [generate(tiny.llm, [prompt], greedy())[0] for prompt in PROMPTS]
    mixed = [greedy(), greedy(frequency_penalty=2.0), greedy(), greedy(allowed_token_ids=[3, 4, 5])]
    together = generate(tiny.llm, PROMPTS, mixed)
    assert [together[i] for i in (0, 2)] == [alone[i] for i in (0, 2)]
    assert together[1] != alone[1] and set(together[3]) <= {3, 4, 5}


def test_a_bias_of_100_forces_a_token_and_of_minus_100_forbids_it(tiny):
    assert generate(tiny.llm, PROMPTS[:1], greedy(logit_bias={42: 100})) == [[42] * NUM_TOKENS]
    plain = generate(tiny.llm, PROMPTS[:1], greedy())[0]
    assert plain[0] not in generate(tiny.llm, PROMPTS[:1], greedy(logit_bias={plain[0]: -100}))[0]


def test_only_allowed_tokens_are_drawn(tiny):
    allowed = [0, 31, 32, 63, 64, VOCAB_SIZE - 1]
    params = SamplingParams(temperature=20.0, seed=1, max_tokens=64, ignore_eos=True, allowed_token_ids=allowed)
    assert set(generate(tiny.llm, PROMPTS[:1], params)[0]) == set(allowed)


def test_bad_words_are_never_said_with_or_without_a_space_before(tiny):
    """Among five letters at a high temperature every pair would come up."""
    tokenizer = tiny.llm.tokenizer
    letters = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "ABCD "]
    common = {"temperature": 20.0, "max_tokens": 90, "ignore_eos": True, "allowed_token_ids": letters}

    def texts(bad_words):
        params = [SamplingParams(seed=i, bad_words=bad_words, **common) for i in range(4)]
        return ["".join(tokenizer.decode(tokens)) for tokens in generate(tiny.llm, PROMPTS, params)]

    free = "|".join(texts([]))
    assert "AB" in free and "CDA" in free and " C " in free
    for text in texts(["AB", "CDA"]):
        assert "AB" not in text and "CDA" not in text and "CD" in text and "A" in text
    assert not any("D" in text for text in texts(["D"]))


def test_the_end_cannot_come_before_min_tokens(tiny):
    bias = {tiny.end: 100}
    for least in (1, 5):
        params = SamplingParams(temperature=0, max_tokens=12, min_tokens=least, logit_bias=bias)
        (tokens,) = generate(tiny.llm, PROMPTS[:1], params)
        assert tokens.index(tiny.end) == least and len(tokens) == least + 1


def test_a_nucleus_too_small_for_float32_holds_the_most_likely_token(tiny):
    params = SamplingParams(top_p=1e-300, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert generate(tiny.llm, PROMPTS, params) == generate(tiny.llm, PROMPTS, greedy())


def test_numpy_numbers_are_stored_as_python_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        max_tokens=np.int32(9),
        stop_token_ids=np.array([42, 7]),
        allowed_token_ids=np.arange(3),
        logit_bias={np.int64(5): np.float16(1.5)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=5,
        max_tokens=9,
        stop_token_ids=[42, 7],
        allowed_token_ids=[0, 1, 2],
        logit_bias={5: 1.5},
    )
    stored = [params.temperature, params.top_k, params.stop_token_ids[0], *params.logit_bias, params.logit_bias[5]]
    assert [type(value) for value in stored] == [float, int, int, int, float]


def test_all_tokens_may_end_the_sequence_where_min_tokens_is_0(tiny):
    params = SamplingParams(temperature=0, stop_token_ids=range(VOCAB_SIZE))
    assert [len(tokens) for tokens in generate(tiny.llm, PROMPTS[:1], params)] == [1]


REFUSED = [
    ({"presence_penalty": 2.5}, r"presence_penalty=2.5 is outside \[-2.0, 2.0\]"),
    ({"frequency_penalty": -3}, r"frequency_penalty=-3 is outside \[-2.0, 2.0\]"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0 is outside \[0.001, 1000.0\]"),
    ({"repetition_penalty": 1e-300}, r"repetition_penalty=1e-300 is outside \[0.001, 1000.0\]"),
    ({"bad_words": ["\ud800"]}, r"bad_words='\\ud800' is not Unicode text"),
    ({"repetition_penalty": "high"}, "repetition_penalty='high' must be a finite number"),
    ({"logit_bias": {3: 101}}, r"logit_bias\[3\]=101 is outside \[-100.0, 100.0\]"),
    ({"logit_bias": {"3": 1}}, "token id in logit_bias='3' must be an integer"),
    ({"logit_bias": [3]}, r"logit_bias=\[3\] must map token ids to numbers"),
    ({"logit_bias": {VOCAB_SIZE: 1}}, rf"logit_bias: token id {VOCAB_SIZE} is outside the vocabulary"),
    ({"stop_token_ids": [VOCAB_SIZE]}, rf"stop_token_ids: token id {VOCAB_SIZE} is outside the vocabulary"),
    ({"stop_token_ids": range(VOCAB_SIZE), "min_tokens": 4}, "min_tokens=4 with 211 stop_token_ids .* of 211 to draw"),
    ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
    ({"top_k": np.bool_(True)}, "top_k=.*True.* must be an integer"),
    ({"top_k": 5.5}, "top_k=5.5 must be an integer"),
    ({"max_tokens": math.inf}, "max_tokens=inf must be an integer"),
    ({"stop_token_ids": [math.nan]}, "stop_token_ids=nan must be an integer"),
    ({"top_k": 2**63}, rf"top_k={2**63} must be in \[-1, {2**63 - 1}\]"),
    ({"max_tokens": 10**30}, rf"max_tokens={10**30} must be in \[1, {2**63 - 1}\]"),
    ({"temperature": 10**400}, "temperature=1.* must be a finite number"),
    ({"min_p": True}, "min_p=True must be a finite number"),
    ({"allowed_token_ids": []}, r"allowed_token_ids=\(\) leaves no token to draw"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1 must be at least 0"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, rf"allowed_token_ids: token id {VOCAB_SIZE} is outside the vocabulary"),
    ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1}, "may leave no token to draw"),
    ({"bad_words": "AB"}, "bad_words='AB' must be a list of strings"),
    ({"bad_words": ["a"] * 1025}, "bad_words has 1025 strings, the limit is 1024"),
    ({"bad_words": ["a" * 65_537]}, "bad_words has 65537 characters in all, the limit is 65536"),
    ({"stop": ["a"] * 65}, "stop has 65 strings, the limit is 64"),
    ({"stop": ["a", "b" * 4_096]}, "stop has 4097 characters in all, the limit is 4096"),
    ({"bad_words": [""]}, "bad_words=.* must be non-empty strings"),
    ({"bad_words": ["  "]}, "bad_words has '  ', which has no tokens"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=[str(params) for params, _ in REFUSED])
def test_wrong_values_are_refused_by_name_and_value(tiny, params, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny.llm, PROMPTS[:1], SamplingParams(**params))
