"""Tiles of Idefics 3 and SmolVLM, and what stands around them in a prompt, are those of transformers' processors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from thorough import examples
from tile_checkpoints import IMAGE, SCALING, TOKENIZER, idefics3, smolvlm, smolvlm_whole
from tile_pixels import pixels_of
from transformers import Idefics3ImageProcessorPil, Idefics3Processor
from transformers.image_utils import SizeDict
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from jpaged.images import ImageSources, open_image_processor, open_video_processor, read_clips, read_images
from jpaged.images.frames import Sampling
from jpaged.images.idefics3 import Idefics3ImageProcessor, SmolVLMVideoProcessor, fractions, in_words
from jpaged.images.processors import placeholder_of

NAMED = "jpaged.images.idefics3:Idefics3ImageProcessor"
LARGE = {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 26}}


def both(folder, make, **changes):
    _, config, theirs = make()
    theirs = type(theirs)(**{**theirs.to_dict(), **changes})
    theirs.save_pretrained(folder)
    return theirs, open_image_processor(folder, config, TOKENIZER, NAMED), config


def counted(arrays, table):
    """Return a tile's arrays with places that count its own patches; a small tile's are spread over the table."""
    rows, columns = (np.unique(axis, return_inverse=True)[1] for axis in divmod(arrays["places"], table))
    return arrays | {"places": rows * (columns.max() + 1) + columns}


@pytest.mark.parametrize("make", [idefics3, smolvlm, smolvlm_whole])
def test_tiles_and_prompts_are_those_of_transformers(make, tmp_path):
    theirs, ours, config = both(tmp_path, make)
    each = ours.tokens((9, 9), alone=True) // ours.parts((9, 9), alone=True)
    processor = Idefics3Processor(theirs, TOKENIZER, image_seq_len=each)

    @settings(max_examples=examples(10), deadline=None)
    @given(st.integers(1, 120), st.integers(1, 120), st.integers(0, 9))
    def check(height, width, seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        (picture,) = read_images([image], ImageSources())
        wanted = processor(images=[[image]], text=["a<image>b"], add_special_tokens=False)
        made = ours.prepare_parts(picture, alone=True)
        table, size = config.vision_config.image_size // 6, 6 * int(len(made[0].arrays["places"]) ** 0.5)
        assert len(made) == len(wanted["pixel_values"][0]) == ours.parts(picture.size, alone=False)
        for part, tile in zip(made, wanted["pixel_values"][0], strict=True):
            assert part.arrays["pixels"].dtype == np.uint8 and part.features == each
            np.testing.assert_allclose(pixels_of(counted(part.arrays, table), 6)[0], tile[:, :size, :size], atol=1e-5)
        ids = list(ours.expansion(picture.size, alone=True).ids)
        assert [*TOKENIZER.encode("a", add_special_tokens=False), *ids] == wanted["input_ids"][0][: len(ids) + 1]
        assert ids.count(IMAGE) == ours.tokens(picture.size, alone=True)

    check()


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 7000), st.integers(1, 7000), st.sampled_from([60, 900, 5000]), st.sampled_from([26, 364]))
def test_grids_are_those_of_transformers(height, width, longest, tile):
    theirs = Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": tile})
    config = SimpleNamespace(
        model_type="idefics3",
        image_token_id=IMAGE,
        scale_factor=1,
        vision_config=SimpleNamespace(image_size=364, patch_size=13),
    )
    ours = Idefics3ImageProcessor(theirs, config, placeholder_of(config, TOKENIZER), TOKENIZER)

    def shaped(image, size, resample=None):
        """Resize without pixels."""
        known = (size.height, size.width) if size.height else get_resize_output_image_size(image, size.longest_edge)
        return np.broadcast_to(image[:1, :1, :1], (3, *known))

    theirs.resize = shaped
    image = shaped(np.broadcast_to(np.uint8(0), (3, height, width)), SizeDict(longest_edge=longest))
    _, rows, columns = theirs.split_images(theirs.resize_for_vision_encoder(image, tile), {"longest_edge": tile})
    assert ours.grid((height, width)) == (rows, columns)
    assert ours.parts((height, width), alone=True) == rows * columns + 1


@pytest.mark.parametrize("table", [1, 2, 3, 9, 19, 26, 27, 32, 51])
def test_places_are_those_of_transformers(table):
    config = SimpleNamespace(hidden_size=4, image_size=table * 2, patch_size=2, num_channels=1)
    embeddings = Idefics3VisionEmbeddings(config)
    found = []
    embeddings.position_embedding.forward = lambda ids: found.append(ids) or torch.zeros(1, ids.shape[1], 4)
    for side in {1, table // 2 or 1, table - 1 or 1, table}:
        with torch.no_grad():
            embeddings(torch.zeros(1, 1, side * 2, side * 2), torch.ones(1, side, side, dtype=torch.bool))
        at = fractions(side, table)
        np.testing.assert_array_equal(found[-1][0].numpy(), (at[:, None] * table + at).reshape(-1))


def test_numbers_are_written_as_num2words_writes_them():
    words = {0: "zero", 14: "fourteen", 20: "twenty", 64: "sixty-four", 100: "one hundred", 105: "one hundred and five"}
    words |= {342: "three hundred and forty-two", 1000: "one thousand", 1007: "one thousand and seven"}
    words |= {2118: "two thousand, one hundred and eighteen"}
    assert {number: in_words(number) for number in words} == words


def test_a_request_turns_splitting_off_and_not_on(tmp_path):
    _, ours, _ = both(tmp_path, idefics3)
    assert ours.with_settings({"do_image_splitting": False}, of_request=True).parts((50, 60), alone=True) == 1
    _, whole, _ = both(tmp_path / "whole", smolvlm_whole)
    with pytest.raises(ValueError, match="a request may turn it off, not on"):
        whole.with_settings({"do_image_splitting": True}, of_request=True)
    assert whole.with_settings({"do_image_splitting": True}, of_request=False).parts((50, 60), alone=True) > 1
    with pytest.raises(ValueError, match="lower this bound"):
        ours.with_settings({"size": {"longest_edge": 500}}, of_request=True)


def test_tiles_that_do_not_fit_the_tower_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max_image_size=.* is above vision_config.image_size=26"):
        both(tmp_path, idefics3, max_image_size={"longest_edge": 30})
    with pytest.raises(ValueError, match="are no multiple of scale_factor=2"):
        both(tmp_path, idefics3, max_image_size={"longest_edge": 18})


def test_a_video_says_how_many_frames_it_has_and_when(tmp_path):
    sizes = {"size": {"longest_edge": 40}, "video_sampling": {"fps": 1, "max_frames": 3, "video_size": None}}
    both(tmp_path, smolvlm, **sizes)
    config = smolvlm()[1]
    ours = open_video_processor(tmp_path, config, TOKENIZER)
    video = np.random.default_rng(0).integers(0, 256, (7, 20, 30, 3), dtype=np.uint8)
    known = {"fps": 0.05, "frames_indices": [1, 3, 6, 30, 60, 90, 99], "total_num_frames": 100}
    (clip,) = read_clips([(video, known)], ImageSources(), ours, ours.sampling)
    text = ours.expansion(clip).text
    assert text.startswith("You are provided the following series of seven frames from a 0:33:00 [H:MM:SS] video.\n")
    one = "<fake_token_around_image><global-img><image><fake_token_around_image>"
    assert text.endswith(f"\nFrame from 30:00:{one}\nFrame from 33:00:{one}\n\n")
    assert list(ours.expansion(clip).ids) == TOKENIZER.encode(text, add_special_tokens=False)
    (again,) = read_clips([(video, known | {"duration": 3725.9})], ImageSources(), ours, ours.sampling)
    assert "from a 1:02:05 [H:MM:SS] video" in ours.expansion(again).text
    sampling = ours.sampling.given({"do_sample_frames": True}, "x")
    (few,) = read_clips([(video, {"fps": 2.0})], ImageSources(), ours, sampling)
    assert few.indices == (0, 3, 6), "3.5 seconds are four frames, of which the file allows three"
    groups = ours.groups(clip)
    assert [group.tokens for group in groups] == [1] * 7
    image = Image.fromarray(video[2])
    for size in ((40, 26), (14, 14)):
        image = image.resize(size, resample=1)
    wanted = np.asarray(image)[:12, :12].reshape(2, 6, 2, 6, 3).transpose(0, 2, 4, 1, 3).reshape(4, 3, 36)
    wanted = (wanted / 250 - np.array(SCALING["image_mean"])[:, None]) / np.array(SCALING["image_std"])[:, None]
    made = ours.prepare(clip, groups[2]).arrays
    scaled = made["pixels"].reshape(4, 3, 36) * made["scale"][:, None] + made["shift"][:, None]
    np.testing.assert_allclose(scaled, wanted, atol=1e-5)
    assert made["tiles"].tolist() == [4]


def test_a_request_with_smaller_tiles_which_are_more_is_refused(tmp_path):
    _, ours, config = both(tmp_path, idefics3)
    small = {"max_image_size": {"longest_edge": config.vision_config.patch_size * config.scale_factor}}
    with pytest.raises(ValueError, match="makes more tiles of a picture: a request leaves it at longest_edge="):
        ours.with_settings(small, of_request=True)
    whole = ours.with_settings({**small, "do_image_splitting": False}, of_request=True)
    assert whole.parts((60, 90), alone=True) == 1 and ours.with_settings(small, of_request=False)
    with pytest.raises(ValueError, match="make too large pixels"):
        ours.with_settings({"rescale_factor": 1e30}, of_request=True)


def test_a_requests_number_of_frames_of_smolvlm_is_taken_whatever_the_rate(tmp_path):
    _, config, processor = smolvlm()
    processor.save_pretrained(tmp_path)
    ours = open_video_processor(tmp_path, config, TOKENIZER, {"fps": 1})
    assert len(ours.sampler(40, 10.0, Sampling(num_frames=8))) == 8
    assert len(ours.sampler(40, 10.0, ours.sampling)) == 4


@pytest.mark.parametrize(
    ("given", "longest", "frames"),
    [
        ({}, 28, 3),
        ({"size": {"longest_edge": 30}}, 30, 3),
        ({"video_sampling": {"video_size": {"longest_edge": 30}, "fps": 0.5}}, 30, 2),
        ({"fps": 0.5}, 28, 2),
        ({"max_frames": 1}, 28, 1),
        ({"num_frames": 8}, 28, 4),
        ({"num_frames": 2, "video_sampling": {"max_frames": 2}}, 28, 2),
    ],
)
def test_an_engines_settings_of_smolvlms_videos_replace_the_files(tmp_path, given, longest, frames):
    _, config, processor = smolvlm()
    processor.video_sampling = {"fps": 1, "max_frames": 3, "video_size": {"longest_edge": 40}}
    processor.save_pretrained(tmp_path)
    ours = open_video_processor(tmp_path, config, TOKENIZER, given)
    assert ours.settings["size"] == {"longest_edge": longest}
    assert len(ours.sampler(40, 10.0, ours.sampling)) == frames


def test_a_files_size_wins_over_its_video_size_as_in_transformers():
    file = {"size": {"longest_edge": 30}, "video_sampling": {"video_size": {"longest_edge": 40}, "max_frames": 3}}
    plain = SmolVLMVideoProcessor.plain({**file, "num_frames": 9}, "the video processor's file")
    assert plain == {"size": {"longest_edge": 30}, "max_frames": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": {"longest_edge": 30}, "video_sampling": {"video_size": {"longest_edge": 31}}}, "give one of them"),
        ({"video_sampling": 3}, "video_sampling=3, which must be a mapping"),
        ({"video_sampling": {"fps": "often"}}, "mm_processor_kwargs has fps='often', which must be"),
        ({"num_frames": 8, "video_sampling": {"max_frames": 16}}, "max_frames=8 and, in another way, 16: give one"),
        ({"fps": 0}, "mm_processor_kwargs has fps=0, which must be"),
        ({"max_frames": False}, "mm_processor_kwargs has max_frames=False, which must be"),
        *[({"video_sampling": none}, "video_sampling=.*, which must be a mapping") for none in (0, "", [])],
        ({"video_sampling": {"frames": 3}}, "video_sampling has 'frames': it has fps"),
    ],
)
def test_settings_of_smolvlms_videos_that_mean_nothing_are_refused(tmp_path, given, message):
    _, config, processor = smolvlm()
    processor.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_video_processor(tmp_path, config, TOKENIZER, given)
