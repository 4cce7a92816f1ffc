"""HOST: pictures that callers give, from a file's bytes to the arrays that a vision encoder takes.

`sources` reads what a caller names, within the limits of an `ImageSources`; `pixels` decodes it; `processors` makes a
model's arrays and says how many tokens an image takes; `given` checks features that callers have encoded; `prompts`
puts those tokens in the prompt. Nothing here imports jax, and Pillow only once there is an image: it comes with the
extra ``images``.
"""

from jpaged.image_sources import ImageSources
from jpaged.images.given import GIVEN_FEATURES, GivenImage, GivenLayout, is_given
from jpaged.images.pixels import Picture
from jpaged.images.processors import ImageProcessor, PreparedImage, open_image_processor, placeholder_of
from jpaged.images.prompts import Placeholder, Span, expand_ids, expand_text, find_spans
from jpaged.images.sources import LowDetail, read_images

__all__ = [
    "GIVEN_FEATURES",
    "GivenImage",
    "GivenLayout",
    "ImageProcessor",
    "ImageSources",
    "LowDetail",
    "Picture",
    "Placeholder",
    "PreparedImage",
    "Span",
    "expand_ids",
    "expand_text",
    "find_spans",
    "is_given",
    "open_image_processor",
    "placeholder_of",
    "read_images",
]
