"""The demo model generates what transformers generates from the same dequantised float32 weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from beam_reference import assert_same_beams, torch_beams
from greedy_reference import GREEDY, assert_same_tokens, torch_greedy
from transformers import LlamaForCausalLM

from jpaged import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.loading.model_config import as_transformers
from jpaged.loading.open_checkpoint import open_model

PROMPTS = [
    "The capital of France is",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "In 1969, three astronauts flew to the Moon. The first of them to walk on it was Neil Armstrong, who said",
    "Q: A farmer has 17 sheep and buys 25 more. How many sheep has the farmer?\nA:",
    "Once",
]
SETTINGS = {"dtype": "float32", "max_model_len": 128}


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", max_num_seqs=8, max_num_batched_tokens=64, **SETTINGS)


@pytest.fixture(scope="module")
def torch_model():
    """transformers' model, built of the loader's config and the reader's tensors."""
    opened = open_model("smollm2-135m")
    config = as_transformers(opened.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = {name: torch.tensor(np.asarray(opened.reader.read(name))) for name in opened.reader.names()}
    with torch.device("cpu"):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def expected(llm, torch_model):
    """transformers' tokens."""
    guesses = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return torch_greedy(torch_model, [llm.tokenizer.encode(prompt) for prompt in PROMPTS], guesses=guesses)


def test_real_prompts_in_one_batch_generate_what_transformers_generates(llm, expected):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_same_tokens(outputs, expected)
    scored = llm.generate(PROMPTS, replace(GREEDY, logprobs=0), use_tqdm=False)
    assert_same_tokens(scored, expected)
    for output, with_score, reference in zip(outputs, scored, expected, strict=True):
        assert output.outputs[0].text == llm.tokenizer.decode(reference.tokens, skip_special_tokens=True)
        assert output.outputs[0].cumulative_logprob is None
        assert with_score.outputs[0].cumulative_logprob == pytest.approx(reference.logprob, abs=2e-3)


def test_a_second_identical_call_reads_the_prefix_cache_and_says_the_same(llm, expected):
    llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)
    again = llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)
    assert again[0].num_cached_tokens == (len(again[0].prompt_token_ids) - 1) // 16 * 16 > 0
    assert_same_tokens(again, expected[3:4])


@pytest.mark.parametrize("width", [4, *(pytest.param(width, marks=pytest.mark.nightly) for width in (2, 6))])
def test_beam_search_finds_what_transformers_finds(llm, torch_model, width):
    params = BeamSearchParams(width, 12)
    prompts = PROMPTS[:2]
    eos = sorted(llm.input_processor.eos_ids)
    beams = torch_beams(torch_model, [llm.tokenizer.encode(prompt) for prompt in prompts], params, eos)
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    assert_same_beams(outputs, beams, params, eos)
    best = outputs[0].outputs[0]
    assert best.text == llm.tokenizer.decode(best.token_ids, skip_special_tokens=True)


def test_alone_a_prompt_generates_the_same(llm, expected):
    assert_same_tokens(llm.generate(PROMPTS[4], GREEDY, use_tqdm=False), expected[4:5])


@pytest.mark.nightly
def test_chunks_of_16_tokens_and_preemption_change_nothing(llm, expected):
    """Six blocks hold 96 tokens; two sequences of more than 48 tokens each do not fit."""
    pool = 6 * llm.memory_report().page_bytes
    tight = LLM("smollm2-135m", max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory_bytes=pool, **SETTINGS)
    outputs = tight.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert max(len(output.prompt_token_ids) for output in outputs) > 16
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_same_tokens(outputs, expected)
    tight.control.engine.memory.check_invariants()
    assert tight.control.engine.memory.num_used_blocks == 0


def test_logprobs_of_prompt_and_output_are_those_of_torch(llm, torch_model):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=3, prompt_logprobs=3)
    (output,) = llm.generate(PROMPTS[3], params, use_tqdm=False)
    (sequence,), prompt = output.outputs, output.prompt_token_ids
    tokens = prompt + sequence.token_ids
    with torch.inference_mode():
        want = torch.log_softmax(torch_model(torch.tensor([tokens])).logits[0], -1)
    told = output.prompt_logprobs[1:] + sequence.logprobs
    assert len(told) == len(tokens) - 1
    for token, found, row in zip(tokens[1:], told, want[:-1], strict=True):
        assert set(found) == {token, *row.topk(3).indices.tolist()}
        for other, entry in found.items():
            assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert entry.rank == 1 + (row > row[other]).sum()


def test_texts_have_the_shape_that_is_asked_for(llm):
    properties = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}
    params = [
        SamplingParams(n=4, seed=1, max_tokens=80, structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(n=4, seed=1, structured_outputs=StructuredOutputsParams(choice=["Paris", "Rome"])),
    ]
    people, cities = llm.generate(["A person as JSON: ", PROMPTS[0]], params, use_tqdm=False)
    parsed = [json.loads(output.text) for output in people.outputs if output.finish_reason == "stop"]
    assert len(parsed) >= 2
    assert all(set(person) == {"name", "age"} and 0 <= person["age"] <= 120 for person in parsed)
    assert all(output.text in ("Paris", "Rome") and output.finish_reason == "stop" for output in cities.outputs)
