"""The forms of a prompt, what may stand beside them, and how much of one is used."""

from __future__ import annotations

import pytest
import tiny_chat_model
from tokenizers.processors import TemplateProcessing

from jpaged import TextPrompt, TokensPrompt
from jpaged.sampling_params import SamplingParams
from jpaged.text.input_processor import InputProcessor
from jpaged.text.long_text import TokenBound
from jpaged.text.pairs import pair_prompts
from jpaged.text.prompt import DEFAULT, Tokenization

LIMITS = {"vocab_size": 256, "max_model_len": 64, "max_num_seqs": 4, "eos_token_ids": (2,)}


@pytest.fixture(scope="module")
def inputs():
    return InputProcessor(tiny_chat_model.tokenizer(), max_logprobs=-1, **LIMITS)


@pytest.mark.parametrize("nothing", [None, {}])
def test_vllms_prompt_types_and_empty_keys_are_taken(inputs, nothing):
    text = TextPrompt(prompt="abc", multi_modal_data=nothing)
    tokens = TokensPrompt(prompt_token_ids=inputs.tokenizer.encode("abc"), prompt="abc", cache_salt=None)
    made = [inputs.process(prompt, SamplingParams()) for prompt in (text, tokens, "abc")]
    assert len({(request.prompt, tuple(request.prompt_token_ids)) for request in made}) == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("multi_modal_data", {"image": 1}, "a prompt has 'multi_modal_data': prompts are text only"),
        ("prompt_embeds", [1.0], "a prompt has 'prompt_embeds': prompts are text or token ids"),
        (
            "promt",
            "x",
            r"a prompt may have 'prompt', 'prompt_token_ids', 'cache_salt', 'prefix_ends', 'retention_directives' and "
            r"'cache_breakpoints', not \['promt'\]",
        ),
    ],
)
def test_other_keys_are_refused_with_what_is_taken(inputs, key, value, message):
    with pytest.raises(ValueError, match=message):
        inputs.process({"prompt": "abc", key: value}, SamplingParams())


def test_the_last_tokens_of_a_longer_prompt_are_used(inputs):
    prompt = list(range(5, 105))

    def used(tokenization=None, **params):
        request = inputs.process(prompt, SamplingParams(**params), tokenization=Tokenization.of(tokenization))
        assert all(seq.token_ids == request.prompt_token_ids for seq in request.sequences)
        return request.prompt_token_ids

    assert used(truncate_prompt_tokens=10) == prompt[-10:]
    assert used(truncate_prompt_tokens=-1) == prompt[-(64 - 16) :]
    assert used(truncate_prompt_tokens=-1, max_tokens=None) == prompt[-63:]
    assert used(truncate_prompt_tokens=-1, max_tokens=999) == prompt[-1:]
    assert used({"truncation": True, "max_length": 7}) == prompt[-7:]
    assert used({"truncation": True, "max_length": 7}, truncate_prompt_tokens=3) == prompt[-3:]
    with pytest.raises(ValueError, match="the prompt has 100 tokens"):
        used()
    with pytest.raises(ValueError, match="truncate_prompt_tokens=65 is above max_model_len=64"):
        used(truncate_prompt_tokens=65)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"tokenization_kwargs=\[\] must be a mapping"),
        ({"padding": True}, r"may have 'add_special_tokens', 'truncation' and 'max_length', not \['padding'\]"),
        ({"add_special_tokens": 1}, "add_special_tokens=1 must be True or False"),
        ({"max_length": 5}, "truncation=False with max_length=5"),
        ({"truncation": True}, "truncation=True with max_length=None"),
        ({"truncation": True, "max_length": 0}, "max_length=0 must be at least 1"),
    ],
)
def test_wrong_tokenization_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        Tokenization.of(given)


def test_minus_one_asks_for_the_log_probabilities_of_the_whole_vocabulary(inputs):
    request = inputs.process("abc", SamplingParams(logprobs=-1, prompt_logprobs=-1))
    assert request.params.logprobs == request.params.prompt_logprobs == 256 == request.num_top
    limited = InputProcessor(None, max_logprobs=255, **LIMITS)
    with pytest.raises(
        ValueError, match=r"^logprobs=-1, all 256 tokens, is above the engine's max_logprobs=255; max_log"
    ):
        limited.process([5], SamplingParams(logprobs=-1))
    with pytest.raises(ValueError, match=r"^prompt_logprobs=-1, all 256 tokens, is above"):
        limited.process([5], SamplingParams(prompt_logprobs=-1))
    whole = InputProcessor(None, max_logprobs=256, **LIMITS)
    assert whole.process([5], SamplingParams(logprobs=-1)).params.logprobs == 256


def test_outputs_beyond_the_places_are_requests_of_their_own_that_go_on_with_the_numbers(inputs):
    request = inputs.process("abc", SamplingParams(n=10, seed=3, prompt_logprobs=1, stop="x"))
    sequences = [seq for part in request.all_requests for seq in part.sequences]
    assert [len(part.sequences) for part in request.all_requests] == [4, 4, 2]
    assert [seq.index for seq in sequences] == list(range(10))
    assert len({seq.seq_id for seq in sequences}) == 10 and len({part.request_id for part in request.all_requests}) == 3
    seeds = [part.seed_of(seq) for part in request.all_requests for seq in part.sequences]
    wide = InputProcessor(inputs.tokenizer, **LIMITS | {"max_num_seqs": 16})
    alone = wide.process("abc", SamplingParams(n=10, seed=3))
    assert not alone.overflow_requests and seeds == [alone.seed_of(seq) for seq in alone.sequences]
    assert [part.params.prompt_logprobs for part in request.all_requests] == [1, None, None]
    assert len({id(seq.stop_search) for seq in sequences}) == 10


def test_a_request_keeps_its_parameters_when_the_caller_changes_them(inputs):
    params = SamplingParams(max_tokens=5)
    request = inputs.process("abc", params)
    params.max_tokens = 9
    assert request.params.max_tokens == 5


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_chat_model.tokenizer()
    ids = [("<s>", made.bos_token_id), ("</s>", made.eos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    return made


def test_texts_are_joined_by_the_tokenizer(tokenizer):
    (one, other) = pair_prompts(
        ["the cab", {"prompt": "far"}], ["is far", "off"], tokenizer, DEFAULT, bound=TokenBound(64), names=["a", "b"]
    )
    assert tokenizer.decode(one["prompt_token_ids"]) == "<s>the cab</s>is far</s>"
    assert tokenizer.decode(other["prompt_token_ids"]) == "<s>far</s>off</s>"
    (plain,) = pair_prompts(
        ["the cab"], ["is far"], tokenizer, Tokenization(add_special_tokens=False), bound=TokenBound(64), names=["a"]
    )
    assert tokenizer.decode(plain["prompt_token_ids"]) == "the cabis far"


@pytest.mark.parametrize("prompt", [[5, 6], {"prompt_token_ids": [5]}, {"prompt": "a", "cache_salt": "b"}, None])
def test_what_is_no_text_is_refused_by_its_place(tokenizer, prompt):
    with pytest.raises(ValueError, match=r"data_2\[1\]=.* must be text: this model reads both texts of a pair as one"):
        pair_prompts(["a", "b"], ["c", prompt], tokenizer, DEFAULT, bound=TokenBound(64), names=["a", "b"])
    with pytest.raises(ValueError, match=r"data_1\[0\]=.* is not Unicode text"):
        pair_prompts(["\ud800"], ["c"], tokenizer, DEFAULT, bound=TokenBound(64), names=["a", "b"])
    with pytest.raises(ValueError, match="the model has no tokenizer, which joins the texts of a pair"):
        pair_prompts(["a"], ["b"], None, DEFAULT, bound=TokenBound(64), names=["a", "b"])
