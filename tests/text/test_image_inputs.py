"""Images of prompts and messages: their tokens, and what is refused with which words."""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pixtral_checkpoints
import pytest
import qwen_vl_checkpoints
from PIL import Image
from tile_pixels import pixels_of
from transformers import Gemma3ImageProcessorPil
from vision_checkpoints import BEGIN, END, IMAGE, IMAGE_TOKENS, SIZE, TOKENIZER, gemma3_config, picture

import jpaged.text.images as images_module
from jpaged import ImageSources, SamplingParams
from jpaged.images import GivenLayout, open_video_processor
from jpaged.text.chat_template import ChatOptions
from jpaged.text.images import ImageInputs
from jpaged.text.input_processor import InputProcessor
from jpaged.text.marked_prefixes import MarkedPrefix
from jpaged.text.prompt import Conversation, chat_prompt
from jpaged.text.read_media import Media

LIMITS = {"vocab_size": 211, "max_model_len": 128, "max_num_seqs": 4}
OURS = [IMAGE] * IMAGE_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    Gemma3ImageProcessorPil(size=SIZE).save_pretrained(folder)
    return folder


def inputs_of(folder, **sources):
    images = ImageInputs(
        None,
        folder=folder,
        config=gemma3_config(),
        tokenizer=TOKENIZER,
        sources=ImageSources(**sources),
        whole=True,
        processor="jpaged.images.tiles:Gemma3ImageProcessor",
    )
    return InputProcessor(TOKENIZER, images=images, **LIMITS)


@pytest.fixture(scope="module")
def inputs(folder):
    return inputs_of(folder, max_images=3, max_pixels=5000)


def process(inputs, prompt, **params):
    return inputs.process(prompt, SamplingParams(**params))


def with_image(image, text="a<begin>b"):
    return {"prompt": text, "multi_modal_data": {"image": image}}


def test_each_placeholder_becomes_the_tokens_of_its_image(inputs):
    request = process(inputs, with_image([picture(0), picture(1)], "a<begin>b<begin>"))
    spans = [(image.start, image.length) for image in request.asks.get("images", ())]
    assert [request.prompt_token_ids[start : start + length] for start, length in spans] == [OURS, OURS]
    assert request.prompt_token_ids[spans[0][0] - 1] == BEGIN and request.prompt_token_ids[spans[0][0] + 16] == END
    assert request.asks["images"][0].digest != request.asks["images"][1].digest
    assert all(image.whole for image in request.asks.get("images", ()))


def test_the_images_of_a_marked_conversation_are_read_once_for_all_marks(inputs, monkeypatch):
    reads = []
    read = images_module.read_images
    monkeypatch.setattr(images_module, "read_images", lambda *args: reads.append(len(args[0])) or read(*args))

    def shown(*parts):
        content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
        return {"role": "user", "content": content}

    first, second = ({"type": "image", "image": picture(number)} for number in range(2))
    talk = [shown("a", first, "b"), {"role": "assistant", "content": "c"}, shown("d", second, "e", "f")]
    beginnings = [talk[:1], talk[:2], [*talk[:2], shown("d", second)], [*talk[:2], shown("d", second, "e")], talk]
    marks = [MarkedPrefix(one, 60.0) for one in beginnings]
    made = chat_prompt(Conversation(talk), TOKENIZER, inputs.images, marks=marks)
    assert reads == [2]
    ids = made["prompt_token_ids"]
    for messages, kept in zip(beginnings, made["cache_breakpoints"], strict=True):
        options = ChatOptions(add_generation_prompt=False)
        head = chat_prompt(Conversation(messages, options), TOKENIZER, inputs.images)["prompt_token_ids"]
        pairs = enumerate(zip(head, ids, strict=False))
        assert kept["position"] == next((i for i, (one, other) in pairs if one != other), len(head))
        assert ids[: kept["position"]].count(IMAGE) == IMAGE_TOKENS * (1 + (len(messages) > 2))


def test_a_prompt_of_ids_may_have_placeholders_or_the_tokens_themselves(inputs):
    request = process(inputs, with_image(picture(0)))
    again = {"prompt_token_ids": request.prompt_token_ids, "multi_modal_data": {"image": [picture(0)]}}
    a, b = (TOKENIZER.convert_tokens_to_ids(text) for text in "ab")
    short = {"prompt_token_ids": [1, a, BEGIN, b], "multi_modal_data": {"image": picture(0)}}
    for prompt in (again, short):
        other = process(inputs, prompt)
        assert other.prompt_token_ids[-22:] == request.prompt_token_ids[-22:]
        assert other.asks["images"][0].digest == request.asks["images"][0].digest


def test_an_image_has_another_name_under_a_salt(inputs):
    salts = (None, "one", "one", "other")
    digests = [
        process(inputs, with_image(picture(3)) | {"cache_salt": salt}).asks["images"][0].digest for salt in salts
    ]
    assert digests[1] == digests[2] and len(set(digests)) == 3


def test_an_image_in_two_prompts_is_prepared_once(inputs):
    first, second = (process(inputs, with_image(picture(3))).asks["images"][0] for _ in range(2))
    assert first.arrays["pixels"] is second.arrays["pixels"]


def test_an_image_under_another_salt_is_prepared_again(inputs):
    """Else the time to the first token would tell a caller whether another one has sent the image."""
    mine = process(inputs, with_image(picture(3)) | {"cache_salt": "mine"}).asks["images"][0]
    again, other, none = (
        process(inputs, with_image(picture(3)) | {"cache_salt": salt}).asks["images"][0]
        for salt in ("mine", "other", None)
    )
    assert again.arrays["pixels"] is mine.arrays["pixels"]
    for each in (other, none):
        assert each.arrays["pixels"] is not mine.arrays["pixels"]
        assert np.array_equal(each.arrays["pixels"], mine.arrays["pixels"])


def test_a_chats_prompt_is_made_without_preparing_its_images(folder):
    inputs = inputs_of(folder)
    messages = [{"role": "user", "content": [{"type": "image", "image": picture(5)}, {"type": "text", "text": "c"}]}]
    made = chat_prompt(Conversation(messages), TOKENIZER, inputs.images)
    assert made["prompt_token_ids"].count(IMAGE) == IMAGE_TOKENS and not inputs.images._prepared
    assert process(inputs, made | {"cache_salt": "mine"}).asks.get("images", ()) and len(inputs.images._prepared) == 1


def test_a_picture_of_a_chat_is_decoded_once_for_its_tokens_and_its_pixels(folder, inputs, monkeypatch):
    reads = []
    read = images_module.read_images
    monkeypatch.setattr(images_module, "read_images", lambda *args: reads.append(len(args[0])) or read(*args))
    messages = [{"role": "user", "content": [{"type": "image", "image": picture(5)}, {"type": "text", "text": "c"}]}]

    def made():
        reads.clear()
        return chat_prompt(Conversation(messages), TOKENIZER, inputs.images)

    def name_of(prompt, inputs=inputs):
        return process(inputs, prompt).asks["images"][0].digest

    prompt = made()
    first = name_of({**prompt, "cache_salt": None})
    assert reads == [1]
    assert name_of(prompt) == first and reads == [1, 1], "nothing is kept once the pixels are read"
    changed, prompt = name_of(with_image(picture(6))), made()
    prompt["multi_modal_data"]["image"] = [picture(6)]
    assert name_of(prompt) == changed and reads == [1, 1]
    assert name_of(made(), inputs_of(folder)) == first and reads == [1, 1], "another model reads it itself"
    prompt = made()
    moved = pickle.loads(pickle.dumps(prompt))
    assert type(moved["multi_modal_data"]) is dict and moved.keys() == copy.deepcopy(prompt).keys()
    assert name_of(moved) == first and reads == [1, 1]
    del prompt
    monkeypatch.setattr("jpaged.text.read_media.MOST_KEPT_BYTES", 3 * 3 * 2)
    assert name_of(made()) == first and reads == [1, 1], "more is kept than the bound allows"


def data_url(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def test_a_picture_of_a_chat_is_fetched_once_for_its_tokens_and_its_pixels(inputs, monkeypatch):
    fetched = []

    def fetch(url, *_):  # another picture each time
        fetched.append(url)
        return base64.b64decode(data_url(picture(len(fetched))).partition(",")[2])

    monkeypatch.setattr("jpaged.images.sources.fetch", fetch)
    url = "http://pictures.example/a"
    for item, number in (({"url": url}, 1), ({"url": url, "detail": "low"}, 2)):
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": item}]}]
        made = chat_prompt(Conversation(messages), TOKENIZER, inputs.images)
        (image,) = process(inputs, made).asks["images"]
        assert image.digest == process(inputs, with_image(picture(number))).asks["images"][0].digest
        assert fetched == [url] * number
    process(inputs, made)
    assert fetched == [url] * 3, "nothing is kept once the pixels are read"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(picture(0))}},
        {"type": "image_url", "image_url": data_url(picture(0))},
        {"type": "image_pil", "image_pil": picture(0)},
        {"type": "image", "image": picture(0)},
    ],
)
def test_messages_may_have_images_in_every_form(inputs, part):
    messages = [{"role": "user", "content": [{"type": "text", "text": "ab"}, part, {"type": "text", "text": "c"}]}]
    request = process(inputs, Conversation(messages))
    (image,) = request.asks.get("images", ())
    assert image.digest == process(inputs, with_image(picture(0))).asks["images"][0].digest
    assert request.prompt == "<bos>[user]ab<begin>c[model]"
    made = chat_prompt(Conversation(messages), TOKENIZER, inputs.images)
    assert process(inputs, made).prompt_token_ids == request.prompt_token_ids


def test_a_template_that_takes_text_only_gets_the_placeholder(inputs):
    messages = [{"role": "user", "content": [{"type": "image", "image": picture(0)}, {"type": "text", "text": "c"}]}]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    request = process(inputs, Conversation(messages, ChatOptions(chat_template=template)))
    assert request.prompt == "<begin>\nc" and len(request.asks.get("images", ())) == 1


def test_local_files_are_taken_from_named_folders_only(folder, tmp_path, inputs):
    picture(0).save(tmp_path / "a.png")
    assert process(inputs_of(folder, folders=[tmp_path]), with_image(str(tmp_path / "a.png"))).asks.get("images", ())
    with pytest.raises(ValueError, match=r"is a local file, and ImageSources\(folders=\(\)\) names no folder"):
        process(inputs, with_image(str(tmp_path / "a.png")))


def animated():
    file = io.BytesIO()
    picture(0).save(file, "GIF", save_all=True, append_images=[picture(1)])
    return Image.open(io.BytesIO(file.getvalue()))


MESSAGES = [
    (with_image([picture(n) for n in range(4)], "<begin>" * 4), "4 images were given, the limit is max_images=3"),
    (with_image(picture(0, (80, 80))), "80 x 80 = 6400 pixels, the limit is max_pixels=5000"),
    (with_image(animated()), "is animated or has pages: it has more than one frame"),
    (with_image(data_url(picture(0))[:200]), "is corrupt or truncated|not valid base64"),
    (with_image("http://localhost/a.png"), r"is not in hosts=\[\]"),
    (with_image(7), "image 1 of 1 is a int; it must be a PIL image, a URL or a path"),
    (with_image(picture(0), "no placeholder"), "the prompt has 0 image placeholders, but 1 images were given"),
    (with_image([picture(0)] * 2), "the prompt has 1 image placeholders, but 2 images were given"),
    ({"prompt": "a", "multi_modal_data": {"audio": [1]}}, "multi_modal_data has 'audio'"),
    ({"prompt": "a", "multi_modal_data": {"video": [1]}}, "a prompt has 1 video: model_type='gemma3' takes no videos"),
    ({"prompt": "a", "multi_modal_data": [1]}, r"multi_modal_data=\[1\] must be a mapping"),
    (
        {"prompt_token_ids": [1, BEGIN, *OURS[1:], END], "multi_modal_data": {"image": picture(0)}},
        "the prompt has 15 tokens '<image>', but its 1 images take 16",
    ),
]


@pytest.mark.parametrize(("prompt", "message"), MESSAGES, ids=[message[:30] for _, message in MESSAGES])
def test_images_that_cannot_be_used_are_refused_by_their_place_and_the_limit(inputs, prompt, message):
    with pytest.raises(ValueError, match=message):
        process(inputs, prompt)


def test_prompts_with_images_are_not_cut(inputs):
    with pytest.raises(ValueError, match="truncate_prompt_tokens=5 would cut it: prompts with images are not cut"):
        process(inputs, with_image(picture(0)), truncate_prompt_tokens=5)
    assert process(inputs, with_image(picture(0)), truncate_prompt_tokens=60).asks.get("images", ())


def test_nothing_in_multi_modal_data_is_no_image(inputs):
    for nothing in (None, {}, {"image": None}, {"image": []}, {"image": [], "video": None}):
        assert not process(inputs, {"prompt": "a", "multi_modal_data": nothing}).asks.get("images", ())


def test_a_model_without_eyes_refuses_images_by_name():
    inputs = InputProcessor(
        TOKENIZER, images=ImageInputs("prompts are text only, as model='x' takes no images"), **LIMITS
    )
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": data_url(picture(0))}]}]
    with pytest.raises(ValueError, match=r"a prompt has 'multi_modal_data': .*model='x' takes no images"):
        process(inputs, with_image(picture(0)))
    with pytest.raises(ValueError, match="messages have 1 image: prompts are text only, as model='x'"):
        process(inputs, Conversation(messages))


def test_a_folder_that_does_not_say_how_images_are_prepared_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} does not say how images are prepared"):
        process(inputs_of(tmp_path), with_image(picture(0)))


def test_pixels_are_those_that_transformers_makes(inputs):
    (image,) = process(inputs, with_image(picture(0))).asks.get("images", ())
    theirs = Gemma3ImageProcessorPil(size=SIZE)([[picture(0)]], return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(pixels_of(image.arrays, 7)[0], theirs, atol=1e-6)


def inputs_of_marks(name, folder):
    _, config = qwen_vl_checkpoints.FAMILIES[name]()
    if name in pixtral_checkpoints.FAMILIES:
        processor, words = pixtral_checkpoints.files(name, folder)
    else:
        processor, words = qwen_vl_checkpoints.PROCESSORS.get(name, qwen_vl_checkpoints.PROCESSOR), TOKENIZER
    processor.save_pretrained(folder)
    words.save_pretrained(folder)
    named = {"mistral3": "pixtral:PixtralImageProcessor", "glm4v": "glm:GlmImageProcessor"}[name]
    return ImageInputs(None, folder=folder, config=config, tokenizer=words, processor=f"jpaged.images.{named}"), config


def test_ids_with_the_marks_of_small_pictures_do_not_get_them_again(tmp_path):
    inputs, config = inputs_of_marks("mistral3", tmp_path)
    token, small = config.image_token_id, Media(images=[picture(0, (4, 4)), picture(1, (4, 4))])
    filled, items = inputs.of_ids([3, token, 4, token], small)
    assert len(filled) == 6 and [item.length for item in items] == [1, 1], "a token and a row's end each"
    again, found = inputs.of_ids(filled, small)
    assert again == filled and [item.start for item in found] == [item.start for item in items]


def test_ids_that_have_tokens_of_pictures_and_a_video_already_are_refused_with_their_numbers(tmp_path):
    inputs, config = inputs_of_marks("glm4v", tmp_path)
    both = Media(images=[picture(0)], videos=[(np.zeros((4, 16, 24, 3), np.uint8), {"fps": 2.0})])
    with pytest.raises(ValueError, match=r"its \[1, 1\] images and videos .* and it has \[2, 0\]"):
        inputs.of_ids([3, config.image_token_id, 4, config.image_token_id], both)


def test_which_frames_glm_shows_is_said_by_an_engine_as_by_a_request(tmp_path):
    _, config = inputs_of_marks("glm4v", tmp_path)

    def opened(family, **settings):
        made = SimpleNamespace(**{**config.__dict__, "model_type": family, "vision_config": config.vision_config})
        made.get_text_config = config.get_text_config
        return open_video_processor(tmp_path, made, TOKENIZER, settings)

    for family in ("glm4v", "glm46v"):
        ours = opened(family, num_frames=4)
        assert len(ours.sampler(100, 10.0, ours.sampling)) == 4
        usual = opened(family)
        assert len(usual.sampler(3000, 10.0, replace(usual.sampling, max_frames=7))) == 6
    with pytest.raises(ValueError, match="give one of them"):
        opened("glm4v", num_frames=4, fps=1)
    with pytest.raises(ValueError, match="fps=1: how many frames of a second"):
        opened("glm46v", fps=1)
    usual = opened("glm46v")
    with pytest.raises(ValueError, match="fps=3: how many frames of a second"):
        usual.sampler(100, 10.0, usual.sampling.given({"fps": 3}, "mm_processor_kwargs"))


def test_settings_of_an_engine_are_checked_for_videos_as_for_pictures(tmp_path):
    _, config = inputs_of_marks("glm4v", tmp_path)
    shown = Media(images=[picture(0, (40, 40))])
    clip = Media(videos=[(np.zeros((2, 40, 40, 3), np.uint8), {"fps": 2.0})])
    token = {"image": config.image_token_id, "video": config.video_token_id}

    def count(media, **settings):
        made = ImageInputs(
            None,
            folder=tmp_path,
            config=config,
            tokenizer=TOKENIZER,
            processor="jpaged.images.glm:GlmImageProcessor",
            settings=settings,
        )
        _, (item,) = made.of_ids([3, token["video" if media.videos else "image"]], media)
        return item.length

    assert (count(shown), count(clip), count(clip, max_duration=3), count(shown, max_duration=3)) == (25,) * 4
    for few in ({"max_pixels": 16 * 64}, {"size": {"longest_edge": 16 * 64}}):
        assert count(shown, **few) == count(clip, **few) == 4
    file = tmp_path / "preprocessor_config.json"
    older = json.loads(file.read_text())
    file.write_text(json.dumps(older | {"max_pixels": 2 * 9 * 64}))
    assert count(clip) == 9 and count(clip, size={"longest_edge": 16 * 64}) == 4, "an engine's before an older file's"
    for wrong, said in (
        ({"sides": 4}, "has 'sides'"),
        ({"size": {"height": 9}}, "with 'height'"),
        ({"image_std": [1, 0, 1]}, "pixels are divided by it"),
        ({"merge_size": 2.5}, "must be an integer"),
        ({"max_duration": "long"}, "must be a number"),
    ):
        with pytest.raises(ValueError, match=said):
            count(clip, **wrong)


def test_features_that_callers_encoded_are_placed_by_their_grids_in_a_prompt_of_glm(tmp_path):
    _, config = inputs_of_marks("glm4v", tmp_path)
    inputs = ImageInputs(None, folder=tmp_path, config=config, tokenizer=TOKENIZER, given=GivenLayout(width=6, merge=2))
    media = Media(images=[{"image_embeds": np.ones((6, 6)), "image_grid_thw": [1, 4, 6]}])
    ids, (item,) = inputs.of_ids([3, config.image_token_id, 4], media)
    assert len(ids) == 8 and (item.start, item.length, item.features) == (1, 6, 6)
    assert item.offsets.tolist() == [[0, row, column] for row in range(2) for column in range(3)]
