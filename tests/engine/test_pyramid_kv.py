"""A prompt's KV is cut down to a budget a layer: the tokens of a plain torch reference, the memory, what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import make_checkpoint
from greedy_reference import GREEDY, NUM_TOKENS, Reference, assert_same_tokens, one_torch_thread, random_prompts
from on_devices import printed_on_devices
from pyramid_by_devices import KEEP, PYRAMID
from pyramid_by_devices import NUM_TOKENS as TOKENS_OF_TWO_DEVICES
from pyramid_reference import PyramidReference
from transformers import LlamaConfig, LlamaForCausalLM

from jpaged import LLM, BeamSearchParams, PyramidKV, SamplingParams

LENGTHS = (1, 2, 5, 9, 15, 16, 17, 24, 32, 33, 40, 41, 57, 79, 100, 117)
PROMPTS = random_prompts(lengths=LENGTHS)
BUDGETS = [32] * 4 + [24] * 4 + [16] * 3
"""Budgets of 11 layers: from 36 down to 12 tokens, meant over bands of two layers, to whole blocks of 8."""

WITH_LOGPROB = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": max(LENGTHS) + NUM_TOKENS,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A checkpoint's folder, what the reference generates, and an engine with room for all prompts at once.

    Weights are large, so that attention is far from even.
    """
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=72,
        intermediate_size=80,
        num_hidden_layers=len(BUDGETS),
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    reference = PyramidReference(model, BUDGETS, **KEEP)
    with one_torch_thread():
        generated = [reference.generate(prompt, NUM_TOKENS) for prompt in PROMPTS]
    roomy = LLM(str(folder), max_num_seqs=16, max_num_batched_tokens=512, kv_budget=PYRAMID, **SETTINGS)
    return SimpleNamespace(
        folder=str(folder), generated=generated, expected=[certain(*g) for g in generated], roomy=roomy
    )


def certain(tokens, logits):
    """See `Reference`."""
    best, second = logits.topk(2).values.T
    close = torch.nonzero(best - second < 1e-4)
    logprob = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].sum()
    return Reference(tokens, int(close[0]) if len(close) else len(tokens), float(logprob))


def tight(llama, **changes):
    """An engine whose pool is too small for 8 running sequences; prompts above 16 tokens need several steps."""
    size = 130 * llama.roomy.memory_report().page_bytes
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": size, "kv_budget": PYRAMID}
    return LLM(llama.folder, **SETTINGS | settings | changes)


def generate(llm, prompts=PROMPTS, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    memory = llm.control.engine.memory
    memory.check_invariants()
    assert memory.num_used_blocks == 0
    return outputs


def tokens_of(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_bands_of_layers_have_budgets_that_fall_with_depth(llama):
    bands = [group.spec for group in llama.roomy.control.engine.runner.spec.layout.groups]
    assert [band.policy.budget for band in bands for _ in range(band.num_layers)] == BUDGETS
    assert [band.num_layers for band in bands] == [2, 2, 2, 2, 2, 1]


def test_one_batch_generates_what_the_reference_generates(llama):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    outputs = generate(llama.roomy, params=params)
    assert_same_tokens(outputs, llama.expected)
    for output, (tokens, logits) in zip(outputs, llama.generated, strict=True):
        want = logits.log_softmax(-1)
        (got,) = output.outputs
        for step, row in enumerate(got.logprobs):
            if got.token_ids[:step] == tokens[:step]:
                assert all(abs(entry.logprob - float(want[step, token])) < 1e-4 for token, entry in row.items())


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_chunks_and_preemption_change_no_token(llama, mode):
    llm = tight(llama, preemption_mode=mode)
    outputs = generate(llm)
    assert_same_tokens(outputs, llama.expected)
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    swaps = sum(output.metrics.num_swaps for output in outputs)
    assert preemptions > 0 and swaps == (preemptions if mode == "swap" else 0)


@pytest.fixture(scope="module")
def plain(llama):
    """Return the tokens that the model generates when all is kept."""
    return generate(tight(llama, kv_budget=None), params=WITH_LOGPROB)


def test_a_budget_as_long_as_the_prompt_gives_the_plain_models_tokens_exactly(llama, plain):
    kept = PyramidKV(budget=120, beta=1.0, **KEEP)
    whole = generate(tight(llama, kv_budget=kept), params=WITH_LOGPROB)
    assert tokens_of(whole) == tokens_of(plain)
    for kept_all, output in zip(whole, plain, strict=True):
        assert kept_all.outputs[0].cumulative_logprob == pytest.approx(output.outputs[0].cumulative_logprob, abs=1e-4)


def test_a_budget_changes_what_long_prompts_generate(llama, plain):
    same = [a.outputs[0].token_ids == e.tokens for a, e in zip(plain, llama.expected, strict=True)]
    assert all(same[i] for i, prompt in enumerate(PROMPTS) if len(prompt) <= 16)
    assert not any(same[i] for i, prompt in enumerate(PROMPTS) if len(prompt) > 57)


def test_after_the_prompt_each_band_holds_its_budget_and_the_tokens_that_follow(llama):
    engine = llama.roomy.control.engine
    prompt = PROMPTS[[len(p) for p in PROMPTS].index(100)]
    request = llama.roomy.input_processor.process(prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.add(request)
    engine.step()
    budgets = [32, 32, 24, 24, 16, 16]
    assert [group.used for group in engine.memory.report().groups] == [budget // 8 for budget in budgets]
    engine.step()
    assert [group.used for group in engine.memory.report().groups] == [budget // 8 + 1 for budget in budgets]
    while request.sequences[0].num_computed < 108:
        engine.step()
    report = engine.memory.report({request.sequences[0].seq_id: 108})
    assert [group.used for group in report.groups] == [budget // 8 + 1 for budget in budgets]
    a_token = [group.block_bytes // 8 * (2 if g < 5 else 1) // 2 for g, group in enumerate(report.groups)]
    assert [group.token_bytes for group in report.groups] == [
        (budget + 8) * size for budget, size in zip(budgets, a_token, strict=True)
    ]
    while engine.has_work:
        engine.step()
    assert engine.memory.num_used_blocks == 0


def test_several_outputs_share_what_is_kept_of_their_prompt(llama):
    params = [SamplingParams(temperature=1.0, seed=3, n=n, max_tokens=24, ignore_eos=True) for n in (1, 4)]
    prompts = [prompt for prompt in PROMPTS if len(prompt) in (33, 40, 41, 57)]
    alone, several = (tokens_of(generate(llama.roomy, prompts, p)) for p in params)
    assert [outputs[:1] for outputs in several] == alone
    assert len({tuple(tokens) for outputs in several for tokens in outputs}) == 4 * len(prompts)
    again = generate(tight(llama), prompts, params[1])
    assert tokens_of(again) == several and sum(output.metrics.num_preemptions for output in again) > 0


def test_a_beam_search_of_one_beam_is_greedy(llama):
    llm = tight(llama)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    (found,) = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert found.outputs[0].token_ids == llama.expected[0].tokens[:12]


@pytest.mark.nightly
def test_two_devices_generate_what_the_reference_generates(llama):
    program = Path(__file__).with_name("pyramid_by_devices.py")
    found = printed_on_devices(2, program, llama.folder, json.dumps(PROMPTS[:4]))
    for tokens, reference in zip(found, llama.expected, strict=False):
        certain = min(TOKENS_OF_TWO_DEVICES, reference.certain)
        assert tokens[:certain] == reference.tokens[:certain]


def test_after_the_warm_up_nothing_is_compiled(llama):
    llm = tight(llama, max_num_seqs=2)
    llm.warmup(use_tqdm=False)
    generate(llm, PROMPTS[:4])
    assert llm.num_recompiles == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": True}, r"kv_budget=.* needs enable_prefix_caching=False: blocks"),
        ({"data_parallel_size": 2}, r"kv_budget=.* needs data_parallel_size=1, not 2"),
        ({"deterministic": True}, r"kv_budget=.* needs deterministic=False: it computes"),
        ({"kv_cache_dtype": "int8"}, r"kv_budget=.* needs kv_cache_dtype='auto' or 'bfloat16' or 'fp8', not 'int8'"),
        ({"kv_budget": 512}, "kv_budget=512 must be a PyramidKV or None"),
        ({"max_num_batched_tokens": 18}, r"kv_budget.window=4 is above 3, the tokens a prompt may get in a step"),
        ({"long_prefill_token_threshold": 3}, r"kv_budget.window=4 is above 3, the tokens a prompt may get"),
    ],
)
def test_what_a_budget_cannot_do_is_refused(llama, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(llama.folder, **SETTINGS | {"kv_budget": PYRAMID, "max_num_seqs": 16} | settings)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("gemma2", "kv_budget needs full attention: layer group 'window' has sliding_window=7"),
        ("llama-shared-kv", "kv_budget needs layers that keep their own KV: 3 layers read that of others"),
    ],
)
def test_models_without_full_attention_in_every_layer_are_refused(tmp_path, checkpoint, message):
    make_checkpoint(checkpoint, tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), kv_budget=PYRAMID, **SETTINGS | {"max_model_len": 64})
