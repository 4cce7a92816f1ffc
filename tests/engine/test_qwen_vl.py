"""Families with eyes, in packed rows: tokens are those of transformers, whatever happens to requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pixtral_checkpoints as pixtral
import pytest
import tile_checkpoints as tiles
from disturbed import assert_tokens_stay, overtaken, tokens_of
from PIL import Image
from qwen_vl_checkpoints import FAMILIES, IMAGE, NEVER, SIZES, add_head, assert_torchs, make, pictures, prompt
from vision_checkpoints import BEGIN, END, check_empty

from jpaged import LLM, MTP, NGram, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 8 << 20,
}
UNSAID = dict.fromkeys(NEVER, -100)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, logit_bias=UNSAID)
ONE, WIDE, TALL, LARGE, TINY, *OTHERS = pictures(*SIZES)
PARTS = [
    (9,),
    (3, ONE, 5),
    (WIDE,),
    (2, TALL, 1),
    (4, LARGE, 2, OTHERS[0], 3),
    (1, ONE, 1, WIDE, 2, TINY, 1, OTHERS[1], 1, OTHERS[2], 4),
]
"""Without a picture, with one of each size, with two, and with five."""
PROMPTS = [prompt(parts, seed) for seed, parts in enumerate(PARTS)]

OF_ANY_SHAPE = {*tiles.FAMILIES, *pixtral.FAMILIES}
"""Families that take pictures of any shape, as their processors in transformers do."""
ON_A_COMMIT = ("qwen3_vl", "smolvlm", "mistral3")
NAMES = [name if name in ON_A_COMMIT else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return str(folder), make(request.param, folder), request.param


@pytest.fixture(scope="module")
def engine(checkpoint):
    return LLM(checkpoint[0], **SETTINGS)


def test_tokens_are_transformers(engine, checkpoint):
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_torchs(checkpoint[1], PROMPTS, outputs)
    check_empty(engine)


def test_a_prefix_that_ends_inside_a_picture_is_found(engine, checkpoint):
    asked = prompt((5, LARGE, 4), seed=7)
    engine.generate([asked], GREEDY, use_tqdm=False)
    encoded = engine.stats().num_encoded_images
    other = {**asked, "prompt_token_ids": [*asked["prompt_token_ids"][:-1], 99, 98]}
    outputs = engine.generate([other, prompt((5, WIDE, 4), seed=7)], GREEDY, use_tqdm=False)
    assert_torchs(checkpoint[1], [other, prompt((5, WIDE, 4), seed=7)], outputs)
    has_states = checkpoint[1].config.model_type.startswith("qwen3_5")
    assert has_states or outputs[0].num_cached_tokens >= min(32, (len(outputs[0].prompt_token_ids) - 2) // 8 * 8)
    assert outputs[1].num_cached_tokens <= 8, "another picture of as many tokens"
    assert engine.stats().num_encoded_images <= encoded + 1, "features of the first are kept"
    check_empty(engine)


def test_pictures_of_odd_shapes_in_one_batch_give_what_each_gives_alone(engine, checkpoint):
    """One pixel, one row or column of 200, and others, before and after prompts that are refused."""
    sizes = [(1, 1), (1, 200), (200, 1), (2, 399), (56, 40), (1, 2)]
    if checkpoint[2] == "lfm2_vl_plain":  # uncut, a narrow picture may have more tokens than its file allows
        with pytest.raises(ValueError, match="399 x 2 pixels are too oblong: they make 89 tokens, the limit is 80"):
            engine.generate([prompt((2, *pictures((2, 399), seed=53), 3), seed=3)], GREEDY, use_tqdm=False)
        sizes[3] = (2, 299)
    asked = [prompt((2, *pictures(size, seed=50 + n), 3), seed=n) for n, size in enumerate(sizes)]
    between = [part for picture in pictures(*sizes[:3], seed=60) for part in (1, picture)]
    asked.append(prompt((*between, 2), seed=9))
    outputs = engine.generate(asked, GREEDY, use_tqdm=False)
    assert_torchs(checkpoint[1], asked, outputs)
    ids, image = asked[0]["prompt_token_ids"], asked[0]["multi_modal_data"]["image"]
    (place,) = (at for at, token in enumerate(ids) if token == IMAGE)
    refused = [
        ([*ids, IMAGE], image),
        (ids, image * 2),
        ([*ids[:place], IMAGE, 99, *ids[place:]], image),
        ([each for each in ids if each != IMAGE], image),
    ]
    refused += [] if checkpoint[2] in OF_ANY_SHAPE else [(ids, pictures((1, 201)))]
    for given, images in refused:
        bad = {"prompt_token_ids": given, "multi_modal_data": {"image": images}}
        with pytest.raises(ValueError, match=r"placeholder|images? takes?|200 times"):
            engine.generate([asked[1], bad], GREEDY, use_tqdm=False)
    for each, output in zip(asked, outputs, strict=True):
        (again,) = engine.generate([each], GREEDY, use_tqdm=False)
        assert tokens_of(again) == tokens_of(output)
    check_empty(engine)


def test_chunks_and_cached_prefixes_cut_a_picture_anywhere(engine, checkpoint):
    """vLLM 41485, mlx-vlm 1332: a chunk that began inside a picture took other vectors of its levels, or none."""
    short, long = ([prompt((lead, LARGE, tail), lead) for lead in range(1, 9)] for tail in (1, 20))
    engine.generate(short, GREEDY, use_tqdm=False)
    encoded = engine.stats().num_encoded_images
    outputs = engine.generate(long, GREEDY, use_tqdm=False)
    assert_torchs(checkpoint[1], long, outputs)
    assert engine.stats().num_encoded_images == encoded
    check_empty(engine)


@pytest.mark.nightly
def test_turns_with_one_picture_more_find_what_was_read(engine, checkpoint):
    """vLLM 43587, llama.cpp 26994: no later turn, and no other question, found the pictures that a model with recurrent
    layers had read."""
    shown = pictures(*[(24, 16)] * 4, seed=80)
    parts = [9, shown[0], 2, shown[1], 12]
    shared = 0
    for more in ([shown[2], 11], [shown[3], 11], []):
        asked = prompt(parts, 5)
        other = {**asked, "prompt_token_ids": [*asked["prompt_token_ids"][:-9], *range(70, 79)]}
        for each in (asked, other):
            encoded = engine.stats().num_encoded_images
            (output,) = engine.generate([each], GREEDY, use_tqdm=False)
            assert_torchs(checkpoint[1], [each], [output])
            assert output.num_cached_tokens >= shared - 16, "two blocks: states lie so far apart"
            shared = len(output.prompt_token_ids) - 9
        assert engine.stats().num_encoded_images == encoded, "another question encodes none again"
        parts += more
        shared += 9
    check_empty(engine)


@pytest.mark.nightly
def test_marks_of_pictures_that_stand_in_text_are_text(engine, checkpoint):
    """vLLM 32897, 18329: a mark without a picture, and text among a picture's tokens, were counted as a picture's."""
    (shown,) = pictures((40, 24), seed=90)
    texts = [[1, BEGIN, 70, END, 71], [1, END, BEGIN, 70, *[BEGIN] * 3, 71, END]]
    mixed = [[1, BEGIN, 70, IMAGE, 71, END, 72], [1, 70, END, 71, IMAGE, 72, BEGIN, BEGIN, 73]]
    asked = [{"prompt_token_ids": ids} for ids in texts]
    asked += [{"prompt_token_ids": ids, "multi_modal_data": {"image": [shown]}} for ids in mixed]
    assert_torchs(checkpoint[1], asked, engine.generate(asked, GREEDY, use_tqdm=False))
    check_empty(engine)


PAGES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), 10),
    **dict.fromkeys(("lfm2_vl", "lfm2_vl_plain"), 14),
    **dict.fromkeys(("llava", "llava_siglip", "llava_next"), 18),
    **dict.fromkeys(("internvl", "internvl_plain"), 50),
    **dict.fromkeys(("mistral3", "mistral3_of_mistral4"), 32),
    "idefics3": 23,
    "smolvlm": 17,
    "llava_padded": 15,
    "smolvlm_whole": 12,
}
"""Pages of a pool in which each request fits alone and one gives way to another; 20 for the others."""
OF_WINDOWS = ("llava_pixtral", "mistral3_of_mistral", "llama4")
"""Families whose layers give pages back as they go: their requests give way to more urgent ones only."""
TIGHT = {"enable_prefix_caching": False}
CHANGES = {
    "swap": TIGHT | {"preemption_mode": "swap"},
    "recompute": TIGHT | {"preemption_mode": "recompute"},
    "deterministic": {"deterministic": True},
    "drafts": {"speculative": NGram(2)},
    "small chunks": {"max_num_batched_tokens": 17},
    "large steps": {"max_num_batched_tokens": 256},
}


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=() if name == "swap" else pytest.mark.nightly) for name in CHANGES]
)
def test_nothing_that_happens_to_a_request_changes_its_tokens(engine, checkpoint, change):
    greedy = replace(GREEDY, max_tokens=24)
    sampled = replace(greedy, temperature=0.7, seed=5, n=2)
    params = [greedy, sampled, greedy, greedy, sampled, greedy]
    wanted = engine.generate(PROMPTS, params, use_tqdm=False)
    changed = CHANGES[change]
    if is_tight := "preemption_mode" in changed:
        pages = PAGES.get(checkpoint[2], 20)
        tight = {"kv_cache_memory_bytes": pages * engine.memory_report().page_bytes}
        changed = changed | ({"scheduling_policy": "priority"} if checkpoint[2] in OF_WINDOWS else tight)
    llm = LLM(checkpoint[0], **(SETTINGS | changed))
    if is_tight and checkpoint[2] in OF_WINDOWS:
        outputs, wanted = overtaken(llm, PROMPTS, params), wanted * 2
    else:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in wanted]
    assert any(output.metrics.num_preemptions for output in outputs) == is_tight
    check_empty(llm)


def test_a_restored_request_goes_on(engine, checkpoint, tmp_path):
    wanted = [tokens_of(output) for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]
    llm = LLM(checkpoint[0], **SETTINGS)
    for asked in PROMPTS:
        llm.control.engine.add(llm.input_processor.process(asked, GREEDY))
    for _ in range(3):  # some pictures are read, one in part, and one not at all
        llm.control.engine.step()
    llm.save_state(tmp_path / "state")
    other = LLM(checkpoint[0], **SETTINGS)
    other.load_state(tmp_path / "state")
    assert [tokens_of(output) for output in other.resume(use_tqdm=False)] == wanted


def test_messages_have_pictures(engine, checkpoint):
    """ollama 17321: two pictures of one size, one after the other, were taken for two frames of a video."""

    def ask(*parts):
        return [{"role": "user", "content": list(parts)}]

    text = {"type": "text", "text": "what is it"}
    first, second = ({"type": "image_pil", "image_pil": each} for each in pictures((24, 16), (24, 16), seed=30))
    asked = [
        ask({"type": "image_pil", "image_pil": LARGE}, text),
        ask({"type": "image", "image": ONE}, text),
        ask(text),
        ask(first, second, text),
        ask(first, first, text),
    ]
    outputs = engine.chat(asked, GREEDY, use_tqdm=False)
    one, other = first["image_pil"], second["image_pil"]
    seen = [{"multi_modal_data": {"image": images}} for images in ([LARGE], [ONE], [], [one, other], [one, one])]
    assert_torchs(checkpoint[1], seen, outputs)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"max_num_batched_tokens": 200}])
def test_after_the_warm_up_no_size_of_a_picture_compiles(checkpoint, settings):
    largest = 64 if checkpoint[2].startswith("mistral3") else 400  # which are not shrunk
    sizes = np.random.default_rng(3).integers(1, largest, (20, 2)).tolist()
    one = [prompt((2, *pictures(size, seed=n), 3), n) for n, size in enumerate([*sizes, *SIZES])]
    some = [prompt((2, *pictures(*sizes[n : n + 3], seed=n), 3), n) for n in range(0, 18, 3)]
    with LLM(checkpoint[0], **(SETTINGS | settings)) as llm:
        llm.warmup(use_tqdm=False)
        llm.generate([*one, *some], GREEDY, use_tqdm=False)
        assert llm.stats().num_recompiles == 0


@pytest.mark.nightly
def test_a_head_drafts_after_pictures(tmp_path):
    """vLLM 47738: of two pictures that no step encodes together, the second waited for ever."""
    model = make("qwen3_5", tmp_path)
    add_head(tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS, speculative=MTP(2))
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_torchs(model, PROMPTS, outputs)
    check_empty(llm)


@pytest.mark.nightly
def test_frames_are_pictures_beside_pictures(tmp_path):
    model = make("internvl", tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    video = llm.input_processor.tokenizer.convert_tokens_to_ids("<video>")
    frames = np.random.default_rng(3).integers(0, 256, (4, 30, 50, 3), dtype=np.uint8)
    asked = {
        "prompt_token_ids": [1, 70, video, 71, IMAGE, 72],
        "multi_modal_data": {"image": [TINY], "video": (frames, None)},
        "mm_processor_kwargs": {"num_frames": 2},
    }
    (output,) = llm.generate([asked], GREEDY, use_tqdm=False)
    shown = [Image.fromarray(frames[number]) for number in (1, 3)]
    assert_torchs(model, [{"multi_modal_data": {"image": [TINY], "video": shown}}], [output])
    check_empty(llm)
    lone = {"prompt_token_ids": [1, video, 70], "multi_modal_data": {"video": (frames, None)}}
    assert_tokens_stay(str(tmp_path), SETTINGS, [asked, PROMPTS[4], lone, PROMPTS[1]], GREEDY, tmp_path / "state")


@pytest.mark.parametrize("name", ["mistral3"])
def test_features_that_callers_encoded_are_those_of_pictures(name, tmp_path):
    model = make(name, tmp_path)
    prompts = [PROMPTS[4], PROMPTS[5]]
    given = []
    for each in prompts:
        images = each["multi_modal_data"]["image"]
        made = pixtral.resized(images)
        features = pixtral.seen(model, images)["mm_encoder_outputs"]["image"].pooler_output[0].numpy()
        grids = [[1, *(int(side) // 4 for side in size)] for size in made["image_sizes"]]
        data = {"image_embeds": features, "image_grid_thw": grids}
        given.append({**each, "multi_modal_data": {"image": data}})
    llm = LLM(str(tmp_path), **SETTINGS)
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    assert_torchs(model, prompts, outputs)
    with pytest.raises(ValueError, match="has 3 features, and image_grid_thw"):
        data = {"image_embeds": np.zeros((3, 96)), "image_grid_thw": [[1, 4, 4]]}
        llm.generate({"prompt_token_ids": [1, IMAGE], "multi_modal_data": {"image": data}}, GREEDY, use_tqdm=False)
    check_empty(llm)
