"""Qwen3-VL's videos give the tokens of transformers, with the times of their frames in the prompt."""

from __future__ import annotations

import numpy as np
import torch
from greedy_reference import one_torch_thread
from PIL import Image
from qwen_vl_checkpoints import IMAGE, INSIDE, MOST, PROCESSOR, SQUARE, TOKENIZER, make, pictures
from vision_checkpoints import BEGIN, END, NUM_PLAIN, VOCAB, check_empty

from jpaged import LLM, SamplingParams
from jpaged.images.frames import Sampling, ends_included, size_within

VIDEO = INSIDE["video_token_id"]
SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 320,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, logit_bias={IMAGE: -100, VIDEO: -100})


def frames_of(seed: int, number: int, size: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, *size, 3), dtype=np.uint8)


SHORT, ODD, OBLONG = frames_of(0, 4, (30, 20)), frames_of(1, 7, (16, 16)), frames_of(2, 20, (6, 40))
(PICTURE,) = pictures((24, 16))
PARTS = [
    (3, (SHORT, {"fps": 2.0}), 5),
    ((ODD, {"fps": 2.0}), 4),
    (2, (OBLONG, {"fps": 8.0}), 3),
    (1, PICTURE, 2, (SHORT, {"fps": 0.7}), 1, (ODD, {"fps": 3.0}), 6),
]


def prompt_of(parts, seed):
    rng, ids = np.random.default_rng(seed), [1]
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(NUM_PLAIN, VOCAB - 1, part).tolist()
        else:
            ids += [BEGIN, VIDEO if isinstance(part, tuple) else IMAGE, END]
    videos = [part for part in parts if isinstance(part, tuple)]
    images = [part for part in parts if isinstance(part, Image.Image)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images, "video": videos}}


def patches_of(video: np.ndarray, fps: float) -> tuple[torch.Tensor, list[int]]:
    """Return the patches that transformers' formulas make of a video, and its grid."""
    frames = video[ends_included(len(video), fps, Sampling(fps=2))]
    height, width = size_within(frames.shape[1:3], len(frames), factor=SQUARE, least=SQUARE**2, most=MOST * SQUARE**2)
    frames = np.stack(
        [np.asarray(Image.fromarray(f).resize((width, height), Image.Resampling.BICUBIC)) for f in frames]
    )
    frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % 2, 0)]).astype(np.float32)
    pixels = (frames * PROCESSOR.rescale_factor - PROCESSOR.image_mean) / PROCESSOR.image_std
    time, rows, columns = len(frames) // 2, height // 4, width // 4
    cut = torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2)
    cut = cut.reshape(time, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(time * rows * columns, -1), [time, rows, columns]


def logits_of(model, asked, ids):
    more, data = {}, asked["multi_modal_data"]
    if data["image"]:
        more = dict(PROCESSOR(data["image"], return_tensors="pt"))
    made = [patches_of(video, known["fps"]) for video, known in data["video"]]
    more |= {
        "pixel_values_videos": torch.cat([pixels for pixels, _ in made]),
        "video_grid_thw": torch.tensor([grid for _, grid in made]),
    }
    whole = torch.tensor([list(ids)])
    kinds = (whole == IMAGE).int() + 2 * (whole == VIDEO).int()
    with one_torch_thread(), torch.inference_mode():
        return model(whole, mm_token_type_ids=kinds, **more).logits[0].double()


def test_tokens_are_those_of_transformers_with_the_times_of_frames(tmp_path):
    model = make("qwen3_vl", tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    prompts = [prompt_of(parts, seed) for seed, parts in enumerate(PARTS)]
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
            wanted[:, [IMAGE, VIDEO]] -= 100
            assert (wanted.max(-1) - chosen).max() < 1e-3
    times = TOKENIZER.encode("<0.2 seconds>", add_special_tokens=False)
    ids = outputs[0].prompt_token_ids
    assert any(ids[i : i + len(times)] == times for i in range(len(ids))), "the mean of frames 0 and 1 at 2 a second"
    assert llm.stats().prefix_hits > 0
    check_empty(llm)
