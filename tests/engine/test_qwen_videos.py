"""Videos of Qwen's and GLM's families give transformers' tokens, with the times of frames where prompts have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from disturbed import assert_tokens_stay
from greedy_reference import one_torch_thread
from PIL import Image
from qwen_vl_checkpoints import GLM, IMAGE, INSIDE, PROCESSOR, PROCESSORS, SQUARE, make, pictures
from vision_checkpoints import BEGIN, END, NUM_PLAIN, VOCAB, check_empty

from jpaged import LLM, SamplingParams
from jpaged.images.frames import Sampling, ends_included, of_each_second, size_within, sparser_when_long

VIDEO = INSIDE["video_token_id"]
VIDEO_BEGIN, VIDEO_END = GLM["video_start_token_id"], GLM["video_end_token_id"]
NEVER = [IMAGE, VIDEO, VIDEO_BEGIN, VIDEO_END]
SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 320,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, logit_bias=dict.fromkeys(NEVER, -100))


def frames_of(seed: int, number: int, size: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, *size, 3), dtype=np.uint8)


SHORT, ODD, OBLONG = frames_of(0, 4, (30, 20)), frames_of(1, 7, (16, 16)), frames_of(2, 20, (6, 40))
LONG = frames_of(3, 60, (12, 32))
(PICTURE,) = pictures((24, 16))
PARTS = [
    (3, (SHORT, {"fps": 2.0}), 5),
    ((ODD, {"fps": 2.0}), 4),
    (2, (OBLONG, {"fps": 8.0}), 3),
    (1, PICTURE, 2, (SHORT, {"fps": 0.7}), 1, (ODD, {"fps": 3.0}), 6),
]


def prompt_of(parts, seed, marks):
    rng, ids = np.random.default_rng(seed), [1]
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(NUM_PLAIN, VOCAB - 3, part).tolist()
        elif isinstance(part, tuple):
            ids += [marks[0], VIDEO, marks[1]]
        else:
            ids += [BEGIN, IMAGE, END]
    videos = [part for part in parts if isinstance(part, tuple)]
    images = [part for part in parts if isinstance(part, Image.Image)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images, "video": videos}}


def prompts_of(name):
    """Return the prompts of a family: frames of a long video have one size each in Qwen2-VL's only."""
    marks = (VIDEO_BEGIN, VIDEO_END) if name.startswith("glm") else (BEGIN, END)
    parts = [*PARTS, ((LONG, {"fps": 2.0}), 3)] if name.startswith("qwen2") else PARTS
    return [prompt_of(each, seed, marks) for seed, each in enumerate(parts)]


def patches_of(name: str, video: np.ndarray, fps: float) -> tuple[torch.Tensor, list[int]]:
    """Return the patches that transformers' formulas make of a video, and its grid."""
    processor = PROCESSORS.get(name, PROCESSOR)
    least, most = (processor.size[side] for side in ("shortest_edge", "longest_edge"))
    frames = video[FRAMES[name](len(video), fps)]
    counts_time = not name.startswith("qwen2")
    number = len(frames) if counts_time else 1
    bounds = {"factor": SQUARE, "least": least, "most": most, "counts_time": counts_time}
    height, width = size_within(frames.shape[1:3], number, **bounds)
    frames = np.stack(
        [np.asarray(Image.fromarray(f).resize((width, height), Image.Resampling.BICUBIC)) for f in frames]
    )
    frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % 2, 0)]).astype(np.float32)
    pixels = (frames * PROCESSOR.rescale_factor - PROCESSOR.image_mean) / PROCESSOR.image_std
    time, rows, columns = len(frames) // 2, height // 4, width // 4
    cut = torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2)
    cut = cut.reshape(time, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(time * rows * columns, -1), [time, rows, columns]


FRAMES = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        lambda total, fps: ends_included(total, fps, Sampling(fps=2)),
    ),
    "qwen2_vl": lambda total, fps: np.arange(total),
    "qwen2_5_vl": lambda total, fps: np.arange(total),
    "glm4v": lambda total, fps: of_each_second(total, fps, Sampling(fps=2), longest=300),
    "glm4v_moe": lambda total, fps: of_each_second(total, fps, Sampling(fps=2), longest=300),
    "glm46v": lambda total, fps: sparser_when_long(total, fps, Sampling()),
}
"""The frames that each family's processor takes, by the number of all and those in a second."""


def logits_of(model, asked, ids):
    more, data, name = {}, asked["multi_modal_data"], model.config.model_type
    if data["image"]:
        more = dict(PROCESSORS.get(name, PROCESSOR)(data["image"], return_tensors="pt"))
    made = [patches_of(name, video, known["fps"]) for video, known in data["video"]]
    more |= {
        "pixel_values_videos": torch.cat([pixels for pixels, _ in made]),
        "video_grid_thw": torch.tensor([grid for _, grid in made]),
    }
    if name == "qwen2_5_vl":
        more["second_per_grid_ts"] = torch.tensor([2 / known["fps"] for _, known in data["video"]])
    whole = torch.tensor([list(ids)])
    kinds = (whole == IMAGE).int() + 2 * (whole == VIDEO).int()
    if name.startswith("glm"):  # frames have the token of images, between marks of their own
        inside = (whole == VIDEO_BEGIN).cumsum(1) > (whole == VIDEO_END).cumsum(1)
        kinds = (whole == IMAGE).int() * (1 + inside.int())
        if data["image"]:
            return logits_of_features(model, whole, kinds, more)
    with one_torch_thread(), torch.inference_mode():
        return model(whole, mm_token_type_ids=kinds, **more).logits[0].double()


def logits_of_features(model, whole, kinds, more):
    """Transformers puts the features of images and of videos of one prompt in the same places; here each in its own."""
    with one_torch_thread(), torch.inference_mode():
        inner = model.model
        embeds = inner.get_input_embeddings()(whole)
        images = inner.get_image_features(more["pixel_values"], more["image_grid_thw"]).pooler_output
        videos = inner.get_video_features(more["pixel_values_videos"], more["video_grid_thw"]).pooler_output
        embeds[kinds == 1], embeds[kinds == 2] = torch.cat(list(images)), torch.cat(list(videos))
        grids = {name: more[name] for name in ("image_grid_thw", "video_grid_thw")}
        places = inner.get_rope_index(whole, kinds, **grids)[0]
        hidden = inner.language_model(inputs_embeds=embeds, position_ids=places).last_hidden_state
        return model.lm_head(hidden)[0].double()


NAMES = [name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.nightly) for name in FRAMES]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers_with_the_times_of_frames(name, tmp_path):
    """vLLM 18329: a video of more tokens than a step has stopped the engine."""
    model = make(name, tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    marks = (VIDEO_BEGIN, VIDEO_END) if name.startswith("glm") else (BEGIN, END)
    prompts = prompts_of(name)
    with pytest.raises(ValueError, match="max_model_len"):
        llm.generate([prompt_of(((np.zeros((200, 56, 80, 3), np.uint8), {"fps": 2.0}),), 9, marks)], GREEDY)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for asked, output in zip(prompts, outputs, strict=True):
            tokens, first = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
            wanted = (
                logits_of(model, asked, [*output.prompt_token_ids, *tokens])[first - 1 : -1].log_softmax(-1).numpy()
            )
            chosen = wanted[np.arange(len(tokens)), tokens]
            found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
            np.testing.assert_allclose(found, chosen, atol=2e-3)
            wanted[:, NEVER] -= 100
            assert (wanted.max(-1) - chosen).max() < 1e-3
    said = "<0.2 seconds>" if name.startswith("qwen3") else {"glm46v": "0.0 seconds"}.get(name)
    if said is not None:
        times = llm.input_processor.tokenizer.encode(said, add_special_tokens=False)
        ids = outputs[0].prompt_token_ids
        assert any(ids[i : i + len(times)] == times for i in range(len(ids))), "the time of a pair of frames"
    assert llm.stats().prefix_hits > 0
    check_empty(llm)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FRAMES)
def test_nothing_that_happens_to_a_request_changes_its_tokens(name, tmp_path):
    make(name, tmp_path)
    assert_tokens_stay(str(tmp_path), SETTINGS, prompts_of(name), GREEDY, tmp_path / "state")
