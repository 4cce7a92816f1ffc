"""Arrays, token counts and expanded prompts are those of transformers' processors."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tile_checkpoints
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tile_pixels import pixels_of
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaImageProcessorPil,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    MllamaImageProcessorPil,
    MllamaProcessor,
    PreTrainedTokenizerFast,
)

from jpaged.images import (
    ImageSources,
    Placeholder,
    anyres,
    expansion,
    fill_ids,
    fill_text,
    find_spans,
    open_image_processor,
    read_images,
)

SIZE = {"height": 28, "width": 28}
GRIDS = [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 84]]
SPECIAL = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>", "video_token": "<video>"}
PROCESSORS = {
    "mllama": MllamaImageProcessorPil(size=SIZE, max_image_tiles=3),
    "gemma3": Gemma3ImageProcessorPil(size=SIZE),
    "llava_onevision": LlavaOnevisionImageProcessorPil(size=SIZE, image_grid_pinpoints=GRIDS),
}
NAMED = {
    "gemma3": "jpaged.images.tiles:Gemma3ImageProcessor",
    "llava_onevision": "jpaged.images.tiles:LlavaOnevisionImageProcessor",
}
"""The processors that a family names."""
SHAPES = [(28, 28), (50, 73), (7, 91), (120, 31), (200, 210), (1, 40)]


def tokenizer():
    """Characters are tokens, and two newlines are one."""
    characters = "abcdefgh \nĠ"
    vocab = {token: number for number, token in enumerate([*characters, "\n\n", "?", "<bos>"])}
    inner = Tokenizer(models.BPE(vocab, [("\n", "\n")], unk_token="?"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(text) for text in SPECIAL.values()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", extra_special_tokens=SPECIAL)


TOKENIZER = tokenizer()


def config_of(family, **changes):
    """Return what a model's config says of images."""
    ids = {name.replace("token", "token_id"): TOKENIZER.convert_tokens_to_ids(text) for name, text in SPECIAL.items()}
    vision = SimpleNamespace(image_size=28, patch_size=7, max_num_tiles=3)
    fields = {
        **ids,
        "mm_tokens_per_image": 4,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_2",
        "image_grid_pinpoints": GRIDS,
    }
    return SimpleNamespace(model_type=family, vision_config=vision, **{**fields, **changes})


def opened(family, tmp_path, **changes):
    PROCESSORS[family].save_pretrained(tmp_path)
    return open_image_processor(tmp_path, config_of(family, **changes), TOKENIZER, NAMED.get(family))


def images(shapes=SHAPES):
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in shapes]


class WithoutVideos(LlavaOnevisionProcessor):
    """Does without the video processor, which torchvision would be needed for."""

    def check_argument_for_proper_class(self, argument_name, argument):
        if argument is not None:
            return super().check_argument_for_proper_class(argument_name, argument)
        return None


def theirs(family):
    """Transformers' processor of images and text."""
    inner = PROCESSORS[family]
    if family == "mllama":
        return MllamaProcessor(inner, TOKENIZER)
    if family == "gemma3":
        return Gemma3Processor(inner, TOKENIZER, image_seq_length=4)
    options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"}
    return WithoutVideos(inner, TOKENIZER, **options)


@pytest.mark.parametrize("family", PROCESSORS)
def test_arrays_are_those_of_transformers_for_a_batch(family, tmp_path):
    ours, given_images = opened(family, tmp_path), images()
    pictures = read_images(given_images, ImageSources())
    batch = PROCESSORS[family]([[image] for image in given_images], return_tensors="np")
    for number, picture in enumerate(pictures):
        made = ours.prepare(picture, alone=True)
        expected = batch["pixel_values"][number]
        if family == "mllama":
            expected = expected[0]
            assert made.arrays["aspect_ratio_id"] == batch["aspect_ratio_ids"][number, 0]
            assert (made.arrays["aspect_ratio_mask"] == batch["aspect_ratio_mask"][number, 0]).all()
            assert made.features == batch["num_tiles"][number][0] * 17
        else:
            assert made.features == ours.tokens(picture.size, alone=True)
        if family == "mllama":
            np.testing.assert_array_equal(made.arrays["pixel_values"], expected)
            continue
        found = pixels_of(made.arrays, 7)
        expected = expected.reshape(-1, 3, 28, 28)
        assert not expected[len(found) :].any(), "only padding of the batch is left out"
        np.testing.assert_allclose(found, expected[: len(found)], atol=1e-5)


def test_llava_onevision_shows_an_image_in_company_as_one_square(tmp_path):
    ours, given_images = opened("llava_onevision", tmp_path), images()
    batch = PROCESSORS["llava_onevision"]([given_images], return_tensors="np")
    for number, picture in enumerate(read_images(given_images, ImageSources())):
        made = ours.prepare(picture, alone=False)
        np.testing.assert_allclose(pixels_of(made.arrays, 7), batch["pixel_values"][number], atol=1e-5)
        assert made.features == ours.tokens(picture.size, alone=False) == 17


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", PROCESSORS)
def test_prompts_are_expanded_as_transformers_expands_them(family, count, tmp_path):
    ours, given_images = opened(family, tmp_path), images()[1 : 1 + count]
    text = "<bos>" + "".join(f"ab\n{ours.placeholder.text}" for _ in range(count)) + "\nc"
    expected = theirs(family)(images=[given_images], text=[text], add_special_tokens=False)["input_ids"][0]
    pictures = read_images(given_images, ImageSources())
    counts = [ours.tokens(picture.size, alone=count == 1) for picture in pictures]
    ids = TOKENIZER.encode(
        fill_text(text, ours.placeholder, [expansion(ours.placeholder, count) for count in counts]),
        add_special_tokens=False,
    )
    assert ids == list(expected)
    spans = find_spans(ids, ours.placeholder, counts)
    assert [length for _, length in spans] == counts
    assert all(set(ids[start : start + length]) == {ours.placeholder.image_token} for start, length in spans)


def test_ids_are_expanded_with_the_same_tokens_but_for_joined_newlines(tmp_path):
    ours = opened("gemma3", tmp_path)
    text = f"ab{ours.placeholder.text}cd{ours.placeholder.text}"
    whole = [expansion(ours.placeholder, 4)] * 2
    ids = fill_ids(TOKENIZER.encode(text, add_special_tokens=False), ours.placeholder, whole)
    assert ids == TOKENIZER.encode(fill_text(text, ours.placeholder, whole), add_special_tokens=False)
    assert [length for _, length in find_spans(ids, ours.placeholder, [4, 4])] == [4, 4]


PLAIN = Placeholder(7, "<i>", 8, "<t>", before=(1,), after=(2, 3))
SAME = Placeholder(8, "<t>", 8, "<t>")


@given(st.lists(st.integers(0, 9)), st.data(), st.sampled_from([PLAIN, SAME]))
def test_expansion_keeps_all_other_tokens(ids, data, placeholder):
    ids = [token for token in ids if placeholder is SAME or token != placeholder.image_token]
    images = ids.count(placeholder.token)
    counts = data.draw(st.lists(st.integers(0, 5), min_size=images, max_size=images))
    expanded = fill_ids(ids, placeholder, [expansion(placeholder, count) for count in counts])
    edges = len(placeholder.before) + len(placeholder.after)
    assert len(expanded) == len(ids) + sum(counts) + images * (edges - 1)
    place, coming = 0, iter(counts)
    for token in ids:
        own = [token]
        if token == placeholder.token:
            own = [*placeholder.before, *[placeholder.image_token] * next(coming), *placeholder.after]
        assert expanded[place : place + len(own)] == own
        place += len(own)


@given(st.lists(st.integers(0, 9)), st.data())
def test_spans_are_found_again_in_an_expanded_prompt(ids, data):
    ids = [token for token in ids if token != PLAIN.image_token]
    counts = data.draw(st.lists(st.integers(1, 5), min_size=ids.count(7), max_size=ids.count(7)))
    expanded = fill_ids(ids, PLAIN, [expansion(PLAIN, count) for count in counts])
    spans = find_spans(expanded, PLAIN, counts)
    assert [length for _, length in spans] == counts
    for start, length in spans:
        assert set(expanded[start : start + length]) == {PLAIN.image_token}
        assert expanded[start - 1] == 1 and expanded[start + length : start + length + 2] == [2, 3]


def test_prompts_that_do_not_fit_their_images_are_refused():
    with pytest.raises(ValueError, match="has 1 image placeholders, but 2 images"):
        fill_ids([1, 7], PLAIN, [expansion(PLAIN, 3)] * 2)
    with pytest.raises(ValueError, match="has 2 image placeholders, but 1 images"):
        fill_text("<i><i>", PLAIN, [expansion(PLAIN, 3)])
    with pytest.raises(ValueError, match="has 2 tokens '<t>', but its 1 images take 3"):
        find_spans([8, 8], PLAIN, [3])
    with pytest.raises(ValueError, match="3 tokens of image 1 do not follow one another"):
        find_spans([8, 8, 1, 8], PLAIN, [3])


SMALL = theirs("llava_onevision")
PUBLISHED = WithoutVideos(
    LlavaOnevisionImageProcessorPil(), TOKENIZER, num_image_tokens=27**2, vision_feature_select_strategy="full"
)


@settings(deadline=None)
@given(st.tuples(st.integers(1, 400), st.integers(1, 400)), st.sampled_from([SMALL, PUBLISHED]))
def test_token_counts_are_those_of_transformers_and_of_the_packing(size, llava):
    grids = tuple(map(tuple, llava.image_processor.image_grid_pinpoints))
    tile, side, most = (28, 4, 2) if llava is SMALL else (384, 27, 9)
    shape = anyres.Anyres(grids, tile, side, most)
    assert anyres.token_count(size, shape, alone=True) == llava._get_number_of_features(*size, tile, tile)
    for alone in (True, False):
        rows, weights = anyres.packing(size, shape, alone=alone)
        assert len(rows) == len(weights) == anyres.token_count(size, shape, alone=alone)
        tiles = 1 + np.prod(anyres.best_resolution(size, grids)) // tile**2 if alone else 1
        assert rows.min() >= 0 and rows.max() <= tiles * side**2
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)


def test_digests_tell_pixels_settings_and_company_apart(tmp_path):
    first, second = read_images(images(SHAPES[:2]), ImageSources())
    llava = opened("llava_onevision", tmp_path / "a")
    again = opened("llava_onevision", tmp_path / "b")
    smaller = opened("llava_onevision", tmp_path / "c", vision_aspect_ratio="anyres_max_3")
    gemma = opened("gemma3", tmp_path / "d")
    assert llava.digest(first, alone=True) == again.digest(first, alone=True)
    assert gemma.digest(first, alone=True) == gemma.digest(first, alone=False)
    others = [llava.digest(first, alone=False), llava.digest(second, alone=True), smaller.digest(first, alone=True)]
    assert len({llava.digest(first, alone=True), gemma.digest(first, alone=True), *others}) == 5


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {}, "model_type='llama' takes no images"),
        ("llava_onevision", {"vision_feature_select_strategy": "default"}, "strategy='default' is not supported"),
        ("llava_onevision", {"vision_aspect_ratio": "square"}, "vision_aspect_ratio='square' is not of the form"),
        ("llava_onevision", {"image_grid_pinpoints": [[28, 28]]}, "image_grid_pinpoints are not those"),
        (
            "gemma3",
            {"vision_config": SimpleNamespace(image_size=30, patch_size=7)},
            "is not vision_config.image_size=30",
        ),
        (
            "mllama",
            {"vision_config": SimpleNamespace(image_size=28, patch_size=7, max_num_tiles=4)},
            "max_image_tiles=3 is not vision_config.max_num_tiles=4",
        ),
    ],
)
def test_files_that_contradict_each_other_are_refused(family, changes, message, tmp_path):
    PROCESSORS.get(family, PROCESSORS["gemma3"]).save_pretrained(tmp_path)
    config = config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        open_image_processor(tmp_path, config, TOKENIZER, NAMED.get(family))


def test_pan_and_scan_is_refused(tmp_path):
    Gemma3ImageProcessorPil(size=SIZE, do_pan_and_scan=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do_pan_and_scan=True is not supported"):
        open_image_processor(tmp_path, config_of("gemma3"), TOKENIZER, NAMED["gemma3"])


def test_nulls_of_published_files_leave_pictures_in_colour(tmp_path):
    """Gemma 3's file has them."""
    PROCESSORS["gemma3"].save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    nulls = dict.fromkeys(("do_convert_rgb", "do_pan_and_scan", "pan_and_scan_max_num_crops"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **nulls}))
    picture = read_images(images()[:1], ImageSources())[0]
    made = [
        open_image_processor(tmp_path, config_of("gemma3"), TOKENIZER, NAMED["gemma3"]).prepare(picture, alone=True),
        opened("gemma3", tmp_path / "full").prepare(picture, alone=True),
    ]
    assert all((made[0].arrays[name] == array).all() for name, array in made[1].arrays.items())


def test_images_are_prepared_without_torch_and_jax(tmp_path):
    PROCESSORS["gemma3"].save_pretrained(tmp_path)
    script = (
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None\n"
        "from types import SimpleNamespace as Names\n"
        "from PIL import Image\n"
        "from jpaged.images import ImageSources, open_image_processor, read_images\n"
        "config = Names(model_type='gemma3', image_token_id=1, boi_token_id=2, eoi_token_id=3, mm_tokens_per_image=4,\n"
        "               vision_config=Names(image_size=28, patch_size=7))\n"
        "tokenizer = Names(convert_ids_to_tokens=str, encode=lambda text, add_special_tokens: [4])\n"
        "(picture,) = read_images(Image.new('RGB', (40, 30)), ImageSources())\n"
        f"name = 'jpaged.images.tiles:Gemma3ImageProcessor'\n"
        f"made = open_image_processor({str(tmp_path)!r}, config, tokenizer, name).prepare(picture, alone=True)\n"
        "print(made.arrays['pixels'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(16, 147)"


def test_llava_refuses_shapes_that_are_enlarged_beyond_bounds(tmp_path):
    _, config, _ = tile_checkpoints.FAMILIES["llava"]()
    side = config.vision_config.image_size
    square = {"height": side, "width": side}
    for padded in (False, True):
        kind = LlavaImageProcessorPil(size={"shortest_edge": side}, crop_size=square, do_pad=padded)
        kind.save_pretrained(tmp_path)
        ours = open_image_processor(
            tmp_path, config, tile_checkpoints.TOKENIZER, "jpaged.images.tiles:LlavaImageProcessor"
        )
        assert ours.pixels_between((1, 1000)) == (10**6 if padded else 1000)
        if not padded:
            assert ours.tokens((1, 200), alone=True)
            with pytest.raises(ValueError, match="1000 x 1 pixels: the longer side may be at most 200 times"):
                ours.tokens((1, 1000), alone=True)
