"""Features of images that a caller has encoded: tokens are transformers', on three axes and with several levels."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from given_families import IMAGE, installed, prompt_of, torch_logits
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from vision_checkpoints import check_empty
from wrapped_families import BY_THEIR_TEXT, text_of

from jpaged import LLM, BeamSearchParams, NGram, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 160,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 4 << 20,
}
WIDTH = 96
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0, logit_bias={IMAGE: -100})
PARTS = [
    [3, (1, 4, 6), 5],
    [(1, 2, 20), 2, (1, 6, 2), 1, (1, 8, 8), 3],
    [30],
    [1, (1, 2, 2), 20, (1, 12, 10), 1],
]
"""Images of one token, wide, tall, several, and longer than a chunk; transformers takes two that touch for one."""


def models():
    found = {name: BY_THEIR_TEXT[name] for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 96}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    text = {**text_of("qwen3_5"), "rope_parameters": rope}
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False)
    return found | {"qwen3_5": (Qwen3_5ForConditionalGeneration, config)}


ON_A_COMMIT = ("qwen3_vl", "qwen3_5")
NAMES = [
    name if name in ON_A_COMMIT else pytest.param(name, marks=pytest.mark.nightly)
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "qwen3_5")
]


@pytest.fixture
def judged(tmp_path, monkeypatch, request):
    """(folder, transformers' model, width of a feature)."""
    name = request.param
    kind, config = models()[name]
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "visual" not in key:
                flat = weight.ndim < 2
                weight.normal_(0.1 if flat else 0.0, 0.3 if flat else weight[0].numel() ** -0.5)
        model.model.language_model.embed_tokens.weight.normal_(0.0, 0.3)
        model.lm_head.weight.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path)
    installed(monkeypatch, name)
    levels = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    return tmp_path, model, levels * config.text_config.hidden_size


def tokens_of(output):
    return [each.token_ids for each in output.outputs]


def assert_torchs(llm, model, prompts, outputs):
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logits = torch_logits(model, prompt, ids)[len(output.prompt_token_ids) - 1 : -1]
        wanted = torch.tensor(logits).log_softmax(-1).numpy()
        found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
        tokens = output.outputs[0].token_ids
        chosen = wanted[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(found, chosen, atol=2e-4)
        wanted[:, IMAGE] -= 100
        assert (wanted.max(-1) - chosen).max() < 1e-3
    check_empty(llm)


@pytest.mark.parametrize("judged", NAMES, indirect=True)
def test_tokens_are_transformers(judged):
    folder, model, width = judged
    prompts = [prompt_of(parts, width, seed) for seed, parts in enumerate(PARTS)]
    llm = LLM(str(folder), **SETTINGS)
    assert_torchs(llm, model, prompts, llm.generate(prompts, PARAMS, use_tqdm=False))
    cut = {**prompts[3], "prompt_token_ids": [*prompts[3]["prompt_token_ids"][:-1], 77, 78]}
    again = llm.generate(cut, PARAMS, use_tqdm=False)
    has_states = model.config.model_type == "qwen3_5"
    assert has_states or 24 < again[0].num_cached_tokens < 54, "a hit that ends inside the last image"
    assert_torchs(llm, model, [cut], again)


TIGHT = {"enable_prefix_caching": False}
CHANGES = {
    "swap": {**TIGHT, "preemption_mode": "swap"},
    "recompute": {**TIGHT, "preemption_mode": "recompute"},
    "deterministic": {"deterministic": True},
    "drafts": {"speculative": NGram(2)},
    "small chunks": {"max_num_batched_tokens": 17},
}


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=() if name == "swap" else pytest.mark.nightly) for name in CHANGES]
)
@pytest.mark.parametrize("judged", ["qwen3_vl"], indirect=True)
def test_nothing_that_happens_to_a_request_changes_its_places(judged, change):
    folder, _, width = judged
    prompts = [prompt_of(parts, width, seed) for seed, parts in enumerate(PARTS)]
    greedy = replace(PARAMS, max_tokens=24)
    sampled = replace(greedy, temperature=0.7, seed=5, n=2)
    params = [greedy, sampled, greedy, sampled]
    plain = LLM(str(folder), **SETTINGS)
    wanted = [tokens_of(output) for output in plain.generate(prompts, params, use_tqdm=False)]
    changed = CHANGES[change]
    if is_tight := "preemption_mode" in changed:
        changed = {**changed, "kv_cache_memory_bytes": 18 * plain.memory_report().page_bytes}
    llm = LLM(str(folder), **(SETTINGS | changed))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == wanted
    assert any(output.metrics.num_preemptions for output in outputs) == is_tight
    check_empty(llm)
    if change == "deterministic":
        search = BeamSearchParams(beam_width=2, max_tokens=6)
        beams = [
            [[s.tokens for s in o.sequences] for o in one.beam_search(prompts[:2], search)] for one in (plain, llm)
        ]
        assert beams[0] == beams[1]


@pytest.mark.parametrize("judged", ["qwen3_vl"], indirect=True)
def test_a_restored_request_goes_on_at_its_places(judged, tmp_path):
    folder, _, width = judged
    prompts = [prompt_of(parts, width, seed) for seed, parts in enumerate(PARTS)]
    llm = LLM(str(folder), **SETTINGS)
    wanted = [tokens_of(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    llm = LLM(str(folder), **SETTINGS)
    for prompt in prompts:
        llm.control.engine.add(llm.input_processor.process(prompt, PARAMS))
    for _ in range(3):  # some images are read, one in part, and one not at all
        llm.control.engine.step()
    llm.save_state(tmp_path / "state")
    other = LLM(str(folder), **SETTINGS)
    other.load_state(tmp_path / "state")
    assert [tokens_of(output) for output in other.resume(use_tqdm=False)] == wanted


BAD = {
    "lack 'image_grid_thw'": lambda given: given.pop("image_grid_thw"),
    "must be [features, 192]": lambda given: given.update(image_embeds=given["image_embeds"][:, :96]),
    "has 5 features": lambda given: given.update(image_embeds=given["image_embeds"][:5]),
    "multiples of 2": lambda given: given.update(image_grid_thw=[[1, 3, 8]]),
    "not finite": lambda given: given["image_embeds"].__setitem__((0, 0), np.nan),
    "no array of numbers": lambda given: given.update(image_embeds="x"),
    "not pixels": lambda given: given.update(pixels=1),
}


@pytest.mark.parametrize("judged", ["qwen3_vl"], indirect=True)
def test_features_that_do_not_fit_are_refused_and_leave_nothing(judged):
    folder, _, width = judged
    llm = LLM(str(folder), **SETTINGS)
    for message, spoil in BAD.items():
        prompt = prompt_of([3, (1, 4, 6), 5], width)
        spoil(prompt["multi_modal_data"]["image"])
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.generate(prompt, PARAMS, use_tqdm=False)
    prompt = prompt_of([3, (1, 4, 6), 5], width)
    prompt["multi_modal_data"]["image"] = [prompt["multi_modal_data"]["image"], "a.png"]
    with pytest.raises(ValueError, match=r"2 images are listed, .* all images of a prompt as features, or all as pic"):
        llm.generate(prompt, PARAMS, use_tqdm=False)
    check_empty(llm)
