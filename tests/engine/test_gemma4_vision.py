"""Gemma 4 with eyes: tokens are transformers', whatever the pictures and whatever happens to requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from assistant_checkpoint import make_assistant
from disturbed import assert_tokens_stay, tokens_of
from gemma4_checkpoints import (
    AUDIO,
    FAMILIES,
    IMAGE,
    SIZES,
    VIDEO,
    assert_torchs,
    make,
    of_videos,
    pictures,
    prompt,
)
from lora_checkpoints import save_random_adapter
from peft import LoraConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from vision_checkpoints import BEGIN, END, check_empty

from jpaged import LLM, Assistant, NGram, SamplingParams
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.quantised_folder import quantise_folder

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 448,
    "max_num_batched_tokens": 96,
    "kv_cache_memory_bytes": 8 << 20,
}
NEVER = dict.fromkeys((IMAGE, VIDEO, AUDIO), -100)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0, logit_bias=NEVER)
WIDE, TALL, ONE, FULL, *OTHERS = pictures(*SIZES)
PARTS = [
    (9,),
    (3, ONE, 5),
    (WIDE,),
    (2, TALL, 1, FULL, 3),
    (1, ONE, 1, WIDE, 2, OTHERS[0], 1, OTHERS[1], 1, OTHERS[2], 4),
]
"""Without a picture, with one, with two, and with five."""
PROMPTS = [prompt(parts, seed) for seed, parts in enumerate(PARTS)]
ON_A_COMMIT = ("gemma4_ahead",)
NAMES = [name if name in ON_A_COMMIT else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return str(folder), make(request.param, folder)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


def test_tokens_are_transformers(engine, checkpoint):
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_torchs(checkpoint[1], PROMPTS, outputs)
    check_empty(engine)


def test_a_prefix_that_ends_inside_a_picture_is_found_where_its_tokens_are_causal(engine, checkpoint):
    asked = prompt((5, WIDE, 4), seed=7)
    engine.generate([asked], GREEDY, use_tqdm=False)
    encoded = engine.stats().num_encoded_images
    other = {**asked, "prompt_token_ids": [*asked["prompt_token_ids"][:-3], 99, 98, 97]}
    asked = [other, prompt((5, FULL, 4), seed=7)]
    outputs = engine.generate(asked, GREEDY, use_tqdm=False)
    assert_torchs(checkpoint[1], asked, outputs)
    is_whole = checkpoint[1].config.get_text_config().use_bidirectional_attention == "vision"
    assert (outputs[0].num_cached_tokens >= 64) != is_whole and outputs[1].num_cached_tokens <= 7
    assert engine.stats().num_encoded_images <= encoded + 1, "features of the first are kept"
    check_empty(engine)


TIGHT = {"enable_prefix_caching": False}
CHANGES = {
    "deterministic": {"deterministic": True},
    "drafts": {"speculative": NGram(2)},
    "large steps": {"max_num_batched_tokens": 400},
}


@pytest.mark.nightly
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_that_happens_to_a_request_changes_its_tokens(engine, checkpoint, change):
    greedy = replace(GREEDY, max_tokens=24)
    sampled = replace(greedy, temperature=0.7, seed=5, n=2)
    params = [greedy, sampled, greedy, sampled, greedy]
    wanted = engine.generate(PROMPTS, params, use_tqdm=False)
    llm = LLM(checkpoint[0], **(SETTINGS | CHANGES[change]))
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in wanted]
    check_empty(llm)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_go_on_after_their_pictures(mode, tmp_path):
    make("gemma4_ahead", tmp_path)
    asked, greedy = [prompt(PARTS[1], seed) for seed in range(6)], replace(GREEDY, max_tokens=90)
    engine = LLM(str(tmp_path), **SETTINGS)
    wanted = engine.generate(asked, greedy, use_tqdm=False)
    tight = TIGHT | {"preemption_mode": mode, "kv_cache_memory_bytes": 25 * engine.memory_report().page_bytes}
    llm = LLM(str(tmp_path), **(SETTINGS | tight))
    outputs = llm.generate(asked, greedy, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in wanted]
    assert any(output.metrics.num_preemptions for output in outputs)
    check_empty(llm)


@pytest.mark.nightly
def test_a_restored_request_goes_on(engine, checkpoint, tmp_path):
    wanted = [tokens_of(output) for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]
    llm = LLM(checkpoint[0], **SETTINGS)
    for asked in PROMPTS:
        llm.control.engine.add(llm.input_processor.process(asked, GREEDY))
    for _ in range(3):  # some pictures are read, and some not at all
        llm.control.engine.step()
    llm.save_state(tmp_path / "state")
    other = LLM(checkpoint[0], **SETTINGS)
    other.load_state(tmp_path / "state")
    assert [tokens_of(output) for output in other.resume(use_tqdm=False)] == wanted


@pytest.mark.nightly
def test_after_the_warm_up_no_size_of_a_picture_or_video_compiles(checkpoint):
    sizes = np.random.default_rng(3).integers(1, 400, (12, 2)).tolist()
    asked = [prompt((2, *pictures(size, seed=n), 3), n) for n, size in enumerate([*sizes, *SIZES])]
    asked += [prompt((2, *pictures(*sizes[n : n + 3], seed=n), 3), n) for n in range(0, 12, 3)]
    for n, size in enumerate(sizes[:4]):
        video = {"video": [(frames_of(n, 3 + n, size), {"fps": 1.0})]}
        asked.append({"prompt_token_ids": [1, 70, VIDEO, 71], "multi_modal_data": video})
    with LLM(checkpoint[0], **SETTINGS) as llm:
        llm.warmup(use_tqdm=False)
        llm.generate(asked, GREEDY, use_tqdm=False)
        assert llm.stats().num_recompiles == 0


def frames_of(seed, number, size):
    return np.random.default_rng(seed).integers(0, 256, (number, *size, 3), dtype=np.uint8)


SHORT, LONG = frames_of(0, 2, (8, 200)), frames_of(1, 130, (16, 9))
SHOWN = [0, 32, 65, 97]
VIDEOS = [
    {"prompt_token_ids": [1, 70, VIDEO, 71], "multi_modal_data": {"video": [(SHORT, {"fps": 0.01})]}},
    {
        "prompt_token_ids": [1, VIDEO, 70, IMAGE, 71, VIDEO, 72],
        "multi_modal_data": {"image": [ONE], "video": [(SHORT, {"fps": 1.0}), (LONG, {"fps": 2.0})]},
    },
]


def test_videos_are_frames_after_their_times(engine, checkpoint):
    seen = [of_videos(checkpoint[1], shown) for shown in ([SHORT], [SHORT, LONG[SHOWN]])]
    few = replace(GREEDY, max_tokens=6)
    llm = LLM(checkpoint[0], **(SETTINGS | {"max_model_len": 512}))
    outputs = llm.generate(VIDEOS, few, use_tqdm=False)
    assert_torchs(checkpoint[1], VIDEOS, outputs, seen)
    check_empty(llm)


@pytest.mark.nightly
def test_nothing_that_happens_to_a_request_changes_what_it_says_of_a_video(checkpoint, tmp_path):
    """A step holds a frame whole, so that none is smaller."""
    longer = SETTINGS | {"max_model_len": 512}
    assert_tokens_stay(checkpoint[0], longer, [*VIDEOS, *PROMPTS[:2], *VIDEOS], GREEDY, tmp_path, chunk=76)


@pytest.mark.nightly
def test_messages_have_pictures_and_videos(engine, checkpoint):
    text = {"type": "text", "text": "what is it"}
    parts = [{"type": "image_pil", "image_pil": ONE}, text, {"type": "video", "video": SHORT}, text]
    outputs = engine.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    ids = outputs[0].prompt_token_ids
    assert ids.count(BEGIN) == ids.count(END) == 3 and ids[ids.index(IMAGE) - 1] == BEGIN
    assert_torchs(checkpoint[1], [{"multi_modal_data": {"image": [ONE]}}], outputs, [of_videos(checkpoint[1], [SHORT])])


@pytest.mark.nightly
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_text_sees_with_the_tower_as_it_was(bits, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "hidden_size_per_layer_input": 32}
    model = make("gemma4_ahead", tmp_path / "plain", **sizes)
    quantise_folder(tmp_path / "plain", tmp_path / "out", bits=bits, group_size=32)
    reader = open_model(tmp_path / "out").reader
    names = {reader.stored_name(name): name for name in reader.names()}
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key in names:
                weight.copy_(torch.tensor(np.asarray(reader.read(names[key]), np.float32)))
    llm = LLM(str(tmp_path / "out"), **SETTINGS)
    assert_torchs(model, PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.mark.nightly
def test_an_adapter_of_the_text_model_goes_with_pictures(tmp_path):
    model = make("gemma4_ahead", tmp_path / "plain")
    settings = LoraConfig(r=4, lora_alpha=2, target_modules=r".*language_model.*\.(q_proj|o_proj|gate_proj|down_proj)")
    adapter = save_random_adapter(model, settings, tmp_path / "adapter")
    llm = LLM(str(tmp_path / "plain"), **SETTINGS, enable_lora=True, max_lora_rank=4, lora_modules={"mine": adapter})
    assert_torchs(model, PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request="mine"))


@pytest.mark.nightly
def test_features_that_the_caller_encoded_take_the_place_of_pictures(engine, checkpoint):
    model = checkpoint[1]
    rng = np.random.default_rng(3)
    width = model.config.get_text_config().hidden_size
    given = [rng.normal(0, 0.4, (count, width)).astype(np.float32) for count in (1, 40, 70)]
    asked = {"prompt_token_ids": [1, 70, IMAGE, 71, IMAGE, 72, IMAGE, 73, 74]}
    prompts = [
        {**asked, "multi_modal_data": {"image": {"image_embeds": given}}},
        {**asked, "multi_modal_data": {"image": [{"image_embeds": each} for each in given]}},
    ]
    outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
    seen = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=tuple(map(torch.tensor, given)))}}
    assert_torchs(model, [asked, asked], outputs, [seen, seen])
    check_empty(engine)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma4_ahead", "gemma4_unified"])
def test_an_assistant_drafts_after_pictures(name, tmp_path):
    model = make(name, tmp_path / "plain")
    own = model.config.get_text_config()
    heads = {"attention_k_eq_v": own.attention_k_eq_v, "num_global_key_value_heads": 1}
    make_assistant(own, tmp_path / "head", ordered=False, text=heads if own.attention_k_eq_v else None)
    llm = LLM(str(tmp_path / "plain"), **SETTINGS, speculative=Assistant(str(tmp_path / "head"), tokens=3))
    assert_torchs(model, PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    check_empty(llm)


def test_sound_is_refused_and_pictures_of_a_checkpoint_with_ears_are_seen(engine, checkpoint):
    with pytest.raises(ValueError, match="multi_modal_data has 'audio'"):
        engine.generate({"prompt_token_ids": [1, AUDIO], "multi_modal_data": {"audio": np.zeros(16)}}, GREEDY)
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    with pytest.raises(ValueError, match="part of type 'input_audio'"):
        engine.chat([{"role": "user", "content": [sound]}], GREEDY)


@pytest.mark.nightly
def test_a_picture_that_is_larger_than_a_window_that_sees_it_whole_is_refused(tmp_path):
    make("gemma4_unified", tmp_path, sliding_window=69)
    llm = LLM(str(tmp_path), **SETTINGS)
    with pytest.raises(ValueError, match="takes 70 tokens, and layers whose window is 69"):
        llm.generate([prompt((2, WIDE))], GREEDY, use_tqdm=False)
    assert llm.generate([prompt((2, OTHERS[1]))], GREEDY, use_tqdm=False)
