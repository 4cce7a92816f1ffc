"""A picture's pixels are upright RGB, as transformers makes them; what cannot be shown whole is refused."""

import base64
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, TiffImagePlugin
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from jpaged.images import ImageSources, read_images
from jpaged.images.pixels import FORMATS, decoded

RANDOM = np.random.default_rng(3)


def noise(*shape, dtype=np.uint8):
    return RANDOM.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def of_mode(mode):
    if mode == "I;16":
        return Image.fromarray(noise(6, 5, dtype=np.uint16))
    if mode == "palette with a clear colour":
        image = Image.fromarray(noise(6, 5, 3)).quantize(7)
        image.info["transparency"] = 2
        return image
    base = Image.fromarray(noise(6, 5, 4), "RGBA")
    way = {"RGBA": ("RGBA",), "LA": ("LA",), "PA": ("LA", "PA")}.get(mode, ("RGB", mode))
    for step in way:
        base = base.convert(step)
    return base


MODES = ("RGB", "RGBA", "L", "LA", "1", "P", "PA", "CMYK", "YCbCr", "I;16", "I", "F", "palette with a clear colour")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_what_transformers_makes_of_it(mode):
    image = of_mode(mode)
    (picture,) = read_images(image, ImageSources())
    np.testing.assert_array_equal(picture.pixels, convert_to_rgb(image, return_numpy=True))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_files_are_turned_upright_as_transformers_turns_them(orientation):
    image, exif, file = Image.fromarray(noise(6, 9, 3)), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(file, "JPEG", exif=exif)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    picture, opened = read_images([url, Image.open(file)], ImageSources())
    np.testing.assert_array_equal(picture.pixels, np.array(load_image(url)))
    assert picture.size == ((6, 9) if orientation < 5 else (9, 6))
    assert opened.digest == picture.digest


def encoded(kind, **options):
    file = io.BytesIO()
    Image.fromarray(noise(16, 16, 3)).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_every_format_is_read_and_its_truncation_noticed(kind):
    data = encoded(kind)
    assert decoded(data, "it", 10**6).size == (16, 16)
    for end in (len(data) // 2, len(data) // 4, 20):
        with pytest.raises(ValueError, match=r"it is (not an image|corrupt)"):
            decoded(data[:end], "it", 10**6)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_and_pages_are_refused(kind):
    frames, file = [Image.fromarray(noise(8, 8, 3)) for _ in range(3)], io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="it is animated or has pages: it has more than one frame, the limit is 1"):
        decoded(file.getvalue(), "it", 10**6)


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_frames_are_not_counted(kind, monkeypatch):
    frames, file = [Image.fromarray(noise(8, 8, 3)) for _ in range(50)], io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    module = {"GIF": GifImagePlugin.GifImageFile, "TIFF": TiffImagePlugin.TiffImageFile}[kind]
    seek, seeks = module._seek, []
    monkeypatch.setattr(module, "_seek", lambda self, frame, *rest: seeks.append(frame) or seek(self, frame, *rest))
    with pytest.raises(ValueError, match="it is animated or has pages: it has more than one frame, the limit is 1"):
        decoded(file.getvalue(), "it", 10**6)
    assert max(seeks) <= 1


def test_a_phones_two_pictures_in_one_jpeg_are_its_first():
    first, second = (Image.fromarray(noise(8, 8, 3)) for _ in range(2))
    file, alone = io.BytesIO(), io.BytesIO()
    first.save(file, "MPO", save_all=True, append_images=[second])
    first.save(alone, "JPEG")
    np.testing.assert_array_equal(decoded(file.getvalue(), "it", 99).pixels, np.array(Image.open(alone)))


def bomb(width, height):
    """A PNG that states a size and has next to no data."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [5_000, 60_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_by_its_header(side):
    with pytest.raises(ValueError, match=r"it .*the limit is max_pixels=20000000"):
        decoded(bomb(side, side), "it", 20_000_000)


def test_pil_images_have_the_same_limits():
    with pytest.raises(ValueError, match="image 1 of 1, a PIL image has 5 x 4 = 20 pixels, the limit is max_pixels=19"):
        read_images(Image.new("RGB", (5, 4)), ImageSources(max_pixels=19))
    with pytest.raises(ValueError, match="has no pixels: 0 x 4"):
        read_images(Image.new("RGB", (0, 4)), ImageSources())


def test_other_formats_are_not_even_tried():
    with pytest.raises(ValueError, match="is not an image of PNG"):
        decoded(encoded("PPM"), "it", 10**6)


def test_digests_tell_pixels_and_shapes_apart_and_are_equal_in_another_process():
    pixels = np.arange(72, dtype=np.uint8)
    images = [Image.fromarray(pixels.reshape(shape)) for shape in ((4, 6, 3), (6, 4, 3))]
    images.append(Image.fromarray((pixels + 1).reshape(4, 6, 3)))
    digests = [picture.digest.hex() for picture in read_images(images, ImageSources())]
    assert len(set(digests)) == 3
    script = (
        "import numpy as np; from PIL import Image; from jpaged.images import ImageSources, read_images\n"
        "image = Image.fromarray(np.arange(72, dtype=np.uint8).reshape(4, 6, 3))\n"
        "print(read_images(image, ImageSources())[0].digest.hex())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digests[0]
