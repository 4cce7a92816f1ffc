"""HOST: pictures and videos that callers give, from a file's bytes to the arrays that a vision encoder takes.

`sources` reads what a caller names, within the limits of an `ImageSources`; `pixels` decodes it; `processors` makes a
model's arrays and says how many tokens an image takes; `given` checks features that callers have encoded; `prompts`
puts those tokens in the prompt. `clips` reads videos, `frames` chooses what a model is shown of them, `videos` makes
the arrays of groups of frames. Nothing here imports jax, and Pillow only once there is an image: it comes with the
extra ``images``, and PyAV, which reads files of video, with ``video``.
"""

from jpaged.image_sources import ImageSources
from jpaged.images.clips import Clip, is_frames, read_clips
from jpaged.images.given import GIVEN_FEATURES, GivenImage, GivenLayout, is_given
from jpaged.images.pixels import Picture
from jpaged.images.processors import (
    ImageProcessor,
    PreparedImage,
    image_processor_class,
    open_image_processor,
    placeholder_of,
)
from jpaged.images.prompts import (
    Expansion,
    Item,
    Placeholder,
    Span,
    expansion,
    fill_ids,
    fill_text,
    find_spans,
    own_tokens,
)
from jpaged.images.sources import LowDetail, forget_url, kept_url, read_images
from jpaged.images.videos import FrameGroup, VideoProcessor, open_video_processor, settings_of_videos, takes_videos

__all__ = [
    "GIVEN_FEATURES",
    "Clip",
    "Expansion",
    "FrameGroup",
    "GivenImage",
    "GivenLayout",
    "ImageProcessor",
    "ImageSources",
    "Item",
    "LowDetail",
    "Picture",
    "Placeholder",
    "PreparedImage",
    "Span",
    "VideoProcessor",
    "expansion",
    "fill_ids",
    "fill_text",
    "find_spans",
    "forget_url",
    "image_processor_class",
    "is_frames",
    "is_given",
    "kept_url",
    "open_image_processor",
    "open_video_processor",
    "own_tokens",
    "placeholder_of",
    "read_clips",
    "read_images",
    "settings_of_videos",
    "takes_videos",
]
