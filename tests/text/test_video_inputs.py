"""Videos of prompts and messages: their tokens and items, what a request may set, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from vision_checkpoints import END, IMAGE, LLAVA_PROCESSOR, TOKENIZER, llava_config, picture

from jpaged import ImageSources, SamplingParams
from jpaged.images import Clip, GivenLayout, open_video_processor
from jpaged.text.chat_template import ChatOptions
from jpaged.text.images import ImageInputs
from jpaged.text.input_processor import InputProcessor
from jpaged.text.prompt import Conversation, chat_prompt

VIDEO = END
"""The id that stands for a video in the tiny checkpoint."""
FRAMES = np.random.default_rng(0).integers(0, 256, (19, 6, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    LLAVA_PROCESSOR.save_pretrained(folder)
    return folder


def inputs_of(folder, settings=None, limits=None, **sources):
    images = ImageInputs(
        None,
        folder=folder,
        config=llava_config(),
        tokenizer=TOKENIZER,
        sources=ImageSources(**sources),
        settings=settings,
        limits=limits,
        processor="jpaged.images.tiles:LlavaOnevisionImageProcessor",
    )
    return InputProcessor(TOKENIZER, images=images, vocab_size=211, max_model_len=512, max_num_seqs=4)


@pytest.fixture(scope="module")
def inputs(folder):
    return inputs_of(folder)


def items_of(inputs, video, text="a<end>b", **more):
    prompt = {"prompt": text, "multi_modal_data": {"video": video}, **more}
    return inputs.process(prompt, SamplingParams()).asks["images"]


def test_a_group_of_frames_is_an_item_and_prompts_share_the_first_ones(inputs):
    items = items_of(inputs, FRAMES)
    assert [(item.length, item.features, item.modality) for item in items] == [
        (32, 32, "video"),
        (32, 32, "video"),
        (13, 13, "video"),
    ], "four tokens a frame, eight frames a group, and the newline"
    assert [b.start for b in items[1:]] == [a.stop for a in items[:-1]]
    shorter = items_of(inputs, FRAMES[:12])
    assert shorter[0].digest == items[0].digest and shorter[1].digest != items[1].digest
    assert shorter[0].arrays["pixels"] is items[0].arrays["pixels"], "it is prepared once"
    ending = items_of(inputs, FRAMES[:8])
    assert ending[0].length == 33 and ending[0].digest != items[0].digest, "it has the newline"


def test_no_group_of_frames_is_larger_than_the_largest_picture(folder):
    """Rows are as long as that one, and no other length is compiled."""
    config = llava_config()
    config.image_grid_pinpoints = [[28, 28], [28, 56]]
    ours = open_video_processor(folder, config, TOKENIZER)
    groups = ours.groups(Clip(FRAMES[:7], tuple(range(7)), 2.0, 7))
    assert [group.last - group.first for group in groups] == [3, 3, 1]


def test_pictures_and_videos_come_in_the_order_of_their_tokens(inputs):
    prompt = {
        "prompt": "<end>a<image>b<end>",
        "multi_modal_data": {"image": picture(0), "video": [FRAMES[:1], FRAMES[:2]]},
    }
    request = inputs.process(prompt, SamplingParams())
    items = request.asks["images"]
    assert [item.modality for item in items] == ["video", "image", "video"]
    assert [items[0].length, items[2].length] == [5, 9]
    for item in items:
        token = {"video": VIDEO, "image": IMAGE}[item.modality]
        assert set(request.prompt_token_ids[item.start : item.stop]) == {token}
    ids = {**prompt, "prompt_token_ids": request.prompt_token_ids}
    del ids["prompt"]
    again = inputs.process(ids, SamplingParams())
    assert [item.digest for item in again.asks["images"]] == [item.digest for item in items]


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message.content }}{% endfor %}"])
def test_messages_have_videos_in_every_form(inputs, template):
    text = {"type": "text", "text": "c"}
    forms = [{"type": "video", "video": FRAMES}, {"type": "video", "video": (FRAMES, {"fps": 2})}]
    of_items = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'video' %}<end>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    for form in forms:
        messages = [{"role": "user", "content": [form, text]}]
        options = ChatOptions(chat_template=template or of_items)
        made = chat_prompt(Conversation(messages, options), TOKENIZER, inputs.images)
        assert made["prompt_token_ids"].count(VIDEO) == 77
        assert len(inputs.process(made, SamplingParams()).asks["images"]) == 3


def test_a_request_says_which_frames_are_taken_and_other_settings_leave_pictures_as_they_were(inputs, folder):
    known = (FRAMES, {"fps": 4.0})
    for settings, frames in (
        ({"num_frames": 3}, [0, 6, 12]),
        ({"fps": 1}, [0, 4, 9, 14]),
        ({"num_frames": 99}, range(19)),
    ):
        items = items_of(inputs, known, mm_processor_kwargs=settings)
        assert [item.digest for item in items] == [item.digest for item in items_of(inputs, FRAMES[list(frames)])]

    def shown(settings, text="<image>", **video):
        data = {"image": picture(0), **video}
        prompt = {"prompt": text, "multi_modal_data": data, "mm_processor_kwargs": settings}
        return inputs.process(prompt, SamplingParams()).asks["images"][0]

    with_video = shown({"num_frames": 3}, "<image><end>", video=known)
    pictures = [with_video, *(shown(settings) for settings in (None, {"image_mean": [0.1, 0.1, 0.1]}))]
    with pytest.raises(ValueError, match="has 'num_frames', which changes no image"):
        shown({"num_frames": 3})
    assert pictures[0].digest == pictures[1].digest != pictures[2].digest
    of_engine = inputs_of(folder, {"num_frames": 3})
    assert len(items_of(of_engine, known)) == 1 and len(items_of(of_engine, known, mm_processor_kwargs={"fps": 4})) == 3


@pytest.mark.parametrize(
    ("video", "more", "message"),
    [
        ([FRAMES[:1]] * 2, {}, "the prompt has 1 video placeholders, but 2 videos were given"),
        (FRAMES, {"mm_processor_kwargs": {"fps": 1}}, "fps=1 samples by time, and the video does not say"),
        (FRAMES, {"mm_processor_kwargs": {"fps": -1}}, "mm_processor_kwargs has fps=-1"),
        (FRAMES, {"mm_processor_kwargs": {"num_frames": True}}, "mm_processor_kwargs has num_frames=True"),
        (FRAMES.astype(float), {}, "video 1 of 1, frame 1 of 19 has the dtype float64"),
        (FRAMES[:0], {}, "video 1 of 1 has 0 frames"),
        ("data:video/mp4;base64,AAAA", {}, "video 1 of 1, .* is no video that is read, or is corrupt"),
        (np.zeros((257, 2, 2, 3), np.uint8), {}, "257 frames would be taken, the limit is max_frames=256"),
    ],
)
def test_videos_that_cannot_be_used_are_refused_by_their_place_and_the_limit(inputs, video, more, message):
    with pytest.raises(ValueError, match=message):
        items_of(inputs, video, **more)


def test_a_request_lowers_the_engines_most_frames_and_does_not_raise_them(folder):
    """Whether a rate, a number, the model's own number or nothing says how many frames there are."""
    inputs, known = inputs_of(folder, {"fps": 2, "max_frames": 4}), (FRAMES, {"fps": 4.0})

    def taken(video, settings=None, inputs=inputs):
        return sum(item.length // 4 for item in items_of(inputs, video, mm_processor_kwargs=settings))

    assert [taken(known, settings) for settings in (None, {"max_frames": 2}, {"num_frames": 3})] == [4, 2, 3]
    for name in ("max_frames", "num_frames"):
        with pytest.raises(ValueError, match=f"has {name}=5: a request may lower this bound, which is 4, not raise"):
            taken(known, {name: 5})
    assert taken(known, {"num_frames": 9, "max_frames": 3}, inputs_of(folder)) == 3
    ours = open_video_processor(folder, llava_config(), TOKENIZER, {"max_frames": 5})
    assert ours.of_files(ours.sampling).num_frames == 5, "a file's frames are 32 where nothing says it"


@pytest.mark.parametrize(
    ("of_engine", "settings", "message"),
    [
        ({}, {"max_frames": 4}, "19 frames would be taken, the limit is max_frames=4 of mm_processor_kwargs"),
        ({"max_frames": 4}, {}, "19 frames would be taken, the limit is max_frames=4 of mm_processor_kwargs"),
        ({}, {"min_frames": 4}, "min_frames=4, which bounds what fps makes"),
        ({}, {"num_frames": 2, "min_frames": 4}, "min_frames=4, which bounds what fps makes"),
        ({"min_frames": 4}, {}, "min_frames=4, which bounds what fps makes"),
        ({"fps": 0}, {}, "mm_processor_kwargs has fps=0"),
    ],
)
def test_bounds_of_frames_hold_or_are_refused(folder, of_engine, settings, message):
    with pytest.raises(ValueError, match=message):
        items_of(inputs_of(folder, of_engine), FRAMES, mm_processor_kwargs=settings)


def test_limits_by_modality_are_named_with_the_value_given(folder):
    inputs = inputs_of(folder, limits={"image": 1, "video": 0})
    with pytest.raises(ValueError, match=r"1 videos were given, the limit is limit_mm_per_prompt=\{'video': 0\}"):
        items_of(inputs, FRAMES)
    two = {"prompt": "<image><image>", "multi_modal_data": {"image": [picture(0)] * 2}}
    with pytest.raises(ValueError, match=r"2 images were given, the limit is limit_mm_per_prompt=\{'image': 1\}"):
        inputs.process(two, SamplingParams())
    raised = inputs_of(folder, limits={"image": 2}, max_images=1)
    assert len(raised.process(two, SamplingParams()).asks["images"]) == 2, "the limit takes the place of max_images"


def test_parts_with_features_of_images_are_the_images_of_one_mapping(folder):
    layout = GivenLayout(width=6, merge=2)
    images = ImageInputs(None, folder=folder, config=llava_config(), tokenizer=TOKENIZER, given=layout)
    inputs = InputProcessor(TOKENIZER, images=images, vocab_size=211, max_model_len=512, max_num_seqs=4)
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(6, 6)), rng.normal(size=(1, 6))
    apart = [{"image_embeds": one, "image_grid_thw": [1, 4, 6]}, {"image_embeds": two, "image_grid_thw": [[1, 2, 2]]}]
    whole = {"image_embeds": np.concatenate([one, two]), "image_grid_thw": [[1, 4, 6], [1, 2, 2]]}
    content = [{"type": "image_embeds", "image_embeds": each} for each in apart]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    said = Conversation([{"role": "user", "content": content}], ChatOptions(chat_template=template))
    found = inputs.process(said, SamplingParams()).asks["images"]
    prompt = {"prompt": "<image>\n<image>", "multi_modal_data": {"image": whole}}
    wanted = inputs.process(prompt, SamplingParams()).asks["images"]
    assert [(item.digest, item.length) for item in found] == [(item.digest, item.length) for item in wanted]
    assert [item.length for item in found] == [6, 1]
