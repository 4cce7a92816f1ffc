"""SmolVLM's videos, and pictures next to them, give the tokens of transformers, with the times of frames."""

import numpy as np
import pytest
import torch
from disturbed import assert_tokens_stay
from greedy_reference import one_torch_thread
from PIL import Image
from tile_checkpoints import IMAGE, SCALING, VIDEO, make
from tile_checkpoints import seen as pixels_of_pictures
from vision_checkpoints import check_empty, picture

from jpaged import LLM, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 704,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 8 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, logit_bias={IMAGE: -100, VIDEO: -100})


def frames_of(seed, number, size):
    return np.random.default_rng(seed).integers(0, 256, (number, *size, 3), dtype=np.uint8)


def seen(video):
    """Return the tiles of all frames: resized twice, as transformers' processor of videos does."""
    tiles = []
    for frame in video:
        height, width = frame.shape[:2]
        longer = (28, (even := int(28 / (width / height))) + even % 2)
        image = Image.fromarray(frame).resize(longer, resample=1).resize((14, 14), resample=1)
        tiles.append((np.asarray(image) / 250 - SCALING["image_mean"]) / SCALING["image_std"])
    return torch.tensor(np.stack(tiles), dtype=torch.float32).permute(0, 3, 1, 2)[None]


def assert_torchs(model, output, tiles):
    """Tokens are those that transformers finds likeliest after these tiles, in the order of the prompt."""
    tokens, first = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
    whole = torch.tensor([[*output.prompt_token_ids, *tokens]])
    with one_torch_thread(), torch.inference_mode():
        logits = model(whole, pixel_values=torch.cat(tiles, dim=1)).logits[0, first - 1 : -1].double()
    wanted = logits.log_softmax(-1).numpy()
    chosen = wanted[np.arange(len(tokens)), tokens]
    found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
    np.testing.assert_allclose(found, chosen, atol=1e-3)
    wanted[:, [IMAGE, VIDEO]] -= 100
    assert (wanted.max(-1) - chosen).max() < 1e-3


@pytest.mark.nightly
def test_tokens_are_those_of_transformers_with_the_times_of_frames(tmp_path):
    model = make("smolvlm", tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    videos = [(frames_of(0, 1, (20, 30)), {"fps": 2.0}), (frames_of(1, 5, (10, 40)), {"fps": 0.5})]
    prompts = [
        {"prompt_token_ids": [1, 70, VIDEO, 80 + n], "multi_modal_data": {"video": [video]}}
        for n, video in enumerate(videos)
    ]
    shown = [[seen(video)] for video, _ in videos]
    pictures = [picture(0, (20, 30)), picture(1, (9, 40))]
    of_pictures = [pixels_of_pictures(model, [each])["pixel_values"] for each in pictures]
    for ids, tiles in (
        ([1, IMAGE, 70, VIDEO, 80], [of_pictures[0], *shown[1]]),
        ([1, VIDEO, IMAGE, 80], [*shown[1], of_pictures[0]]),
        ([1, VIDEO, 70, IMAGE, VIDEO, IMAGE], [*shown[0], of_pictures[0], *shown[1], of_pictures[1]]),
    ):
        data = {"image": pictures[: ids.count(IMAGE)], "video": videos[-ids.count(VIDEO) :]}
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": data})
        shown.append(tiles)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for output, tiles in zip(outputs, shown, strict=True):
            assert_torchs(model, output, tiles)
    assert llm.stats().prefix_hits > 0
    check_empty(llm)
    assert_tokens_stay(str(tmp_path), SETTINGS, prompts, GREEDY, tmp_path / "state")
