"""JPEG data wherever it is: the pixels of Pillow for a sound file, and one error for what a decoder can notice."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from camscope.errors import ImageError
from camscope.images.files.strict_jpeg_decoding import (
    DamagedJPEGError,
    decode_jpeg,
    describe_jpeg_damage,
    read_jpeg_height_and_width,
)
from camscope.images.photo_reader import read_photo, read_reduced_photo
from camscope.images.scans.scan_reader import read_scan

RNG = np.random.default_rng(0)
COLORS = np.asarray(
    Image.fromarray(RNG.integers(0, 256, (12, 16, 3), np.uint8)).resize((160, 120), Image.Resampling.BICUBIC)
)
KINDS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "optimized": {"optimize": True, "subsampling": 0},
    "restarts": {"restart_marker_rows": 1},
}


def encoded_jpeg(mode: str = "RGB", **options) -> bytes:
    stream, image = io.BytesIO(), Image.fromarray(COLORS)
    if mode == "CMYK":  # none of whose colors is flat
        image = Image.merge("CMYK", (*image.split(), image.split()[0].rotate(180)))
    image.convert(mode).save(stream, "JPEG", **{"quality": 95, **options})
    return stream.getvalue()


def middle_of_scan(data: bytes, scan: int, end: int) -> int:
    """A place in the entropy-coded data that is not within a marker."""
    at = scan + 14 + (end - scan - 14) // 2
    while b"\xff" in data[at - 1 : at + 1]:
        at -= 1
    return at


def cut_scan(data: bytearray, scan: int, end: int) -> None:
    """Put an end marker into the middle of a scan."""
    at = middle_of_scan(data, scan, end)
    data[at : at + 2] = b"\xff\xd9"


def ended(data: bytes) -> bytes:
    """The second half is missing, and the end marker is there."""
    return data[: middle_of_scan(data, data.rindex(b"\xff\xda"), len(data) - 2)] + b"\xff\xd9"


def zeroed(data: bytes) -> bytes:
    """The second half is zeros, and the end marker is there."""
    half = ended(data)[:-2]
    return half + bytes(len(data) - len(half) - 2) + b"\xff\xd9"


def without_an_interval(data: bytes) -> bytes:
    """What is between two restart markers is missing, and the first of them."""
    first, second = [match.start() for match in re.finditer(rb"\xff[\xd0-\xd7]", data)][1:3]
    return data[:first] + data[second:]


def without_the_end_marker(data: bytes) -> bytes:
    return data[:-2]


def short_of_a_byte(data: bytes) -> bytes:
    return data[:-6] + b"\xff\xd9"


DAMAGES = [ended, zeroed, without_the_end_marker, short_of_a_byte]
CASES = [(kind, damage) for kind in KINDS for damage in DAMAGES] + [("restarts", without_an_interval)]


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(("kind", "damage"), CASES)
@pytest.mark.one_in(5)
def test_a_damaged_jpeg_file_is_named(tmp_path, kind, damage, mode):
    data = encoded_jpeg(mode, **KINDS[kind])
    assert read_photo(data).pixels.shape == COLORS.shape
    (tmp_path / "a.jpg").write_bytes(damage(data))
    with pytest.raises(ImageError, match=r"a\.jpg: it is damaged: "):
        read_photo(tmp_path / "a.jpg")
    with pytest.raises(ImageError, match="damaged: "):
        read_photo(damage(data))
    with pytest.raises(ImageError, match="damaged: "):
        read_reduced_photo(damage(data), lambda size: (size[0] // 4, size[1] // 4))
    with Image.open(tmp_path / "a.jpg") as lazy, pytest.raises(ImageError, match=r"a\.jpg: it is damaged"):
        read_photo(lazy)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("strip_size", [1 << 20, 160 * 16])
def test_a_damaged_jpeg_in_a_tiff_is_named(damage, mode, strip_size):
    stream = io.BytesIO()
    Image.fromarray(COLORS).convert(mode).save(stream, "TIFF", compression="jpeg", quality=95, strip_size=strip_size)
    data = bytearray(stream.getvalue())
    with Image.open(io.BytesIO(data)) as image:
        start, length = image.tag_v2[273][-1], image.tag_v2[279][-1]
    for read in (read_photo, read_scan):
        read(bytes(data))
    strip = damage(bytes(data[start : start + length]))
    data[start : start + length] = strip.ljust(length, b"\0")
    for read in (read_photo, read_scan):
        with pytest.raises(ImageError, match="damaged: a strip of the TIFF"):
            read(bytes(data))


SOUND = {
    "text behind the end": lambda data: data + b"signature " * 50,
    "another image behind the end": lambda data: data + data,
    "some padding before the end": lambda data: data[:-2] + bytes(16) + data[-2:],
    "fill bytes before the end": lambda data: data[:-2] + b"\xff" * 40 + data[-2:],
    "an unknown revision of JFIF": lambda data: data.replace(b"JFIF\0\1", b"JFIF\0\3", 1),
}


@pytest.mark.parametrize("change", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_odd_and_no_damage_is_read(kind, change):
    data = encoded_jpeg(**KINDS[kind])
    changed = change(data)
    assert changed != data
    assert np.array_equal(read_photo(changed).pixels, read_photo(data).pixels)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pixels_are_those_of_pillow(kind, mode):
    data = encoded_jpeg(mode, **KINDS[kind])
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(read_photo(data).pixels, image.convert("RGB"))
    for factor in (1, 2, 4, 8):
        pixels, size = read_reduced_photo(data, lambda size, factor=factor: (size[0] // factor, size[1] // factor))
        with Image.open(io.BytesIO(data)) as image:
            image.draft(None, (160 // factor, 120 // factor))
            assert np.array_equal(pixels, image.convert("RGB"))
        assert (pixels.shape[:2], size) == ((120 // factor, 160 // factor), (120, 160))


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 7), (9, 17)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_tiny_jpeg_has_its_full_size(size, mode):
    stream = io.BytesIO()
    noise = Image.fromarray(RNG.integers(0, 256, (*size[::-1], 3), np.uint8)).convert(mode)
    noise.save(stream, "JPEG", quality=95)
    with Image.open(stream) as image:
        assert np.array_equal(read_photo(stream.getvalue()).pixels, image.convert("RGB"))


@pytest.mark.parametrize("orientation", range(10))
def test_a_jpeg_is_turned_as_its_exif_says(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright, turned = encoded_jpeg(), encoded_jpeg(exif=exif)
    with Image.open(io.BytesIO(upright)) as image:
        image.getexif()[0x0112] = orientation
        from PIL import ImageOps

        assert np.array_equal(read_photo(turned).pixels, ImageOps.exif_transpose(image))


def test_an_image_that_a_caller_has_changed_is_read_as_it_is(tmp_path):
    (tmp_path / "a.jpg").write_bytes(encoded_jpeg())
    with Image.open(tmp_path / "a.jpg") as image:
        image.draft("L", None)  # gray, of a file in color
        gray = read_photo(image).pixels
        assert (gray == gray[..., :1]).all()
        assert np.array_equal(gray[..., 0], image)
    with Image.open(tmp_path / "a.jpg") as image:
        image.paste("white", (0, 0, 50, 50))  # which loads it
        assert (read_photo(image).pixels[:50, :50] == 255).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"restart_marker_blocks": 4}], ids=str)
def test_a_progressive_jpeg_without_a_scan_is_an_error(mode, options, tmp_path):
    data, file = encoded_jpeg(mode, progressive=True, **options), tmp_path / "image.jpg"
    assert describe_jpeg_damage(data) == ""
    starts = [match.start() for match in re.finditer(b"\xff\xda", data)]
    assert len(starts) > 5
    for start in starts[1:]:
        file.write_bytes(data[:start] + b"\xff\xd9")
        assert describe_jpeg_damage(file.read_bytes())
        with pytest.raises(ImageError, match="damaged: a scan of the progressive JPEG is missing"):
            read_photo(file)


def test_the_functions_by_themselves():
    data = encoded_jpeg()
    assert read_jpeg_height_and_width(data) == (120, 160)
    assert read_jpeg_height_and_width(b"text") is None
    assert (describe_jpeg_damage(data), describe_jpeg_damage(b"text")) == ("", "")
    assert describe_jpeg_damage(ended(data)) == "Corrupt JPEG data: premature end of data segment"
    assert decode_jpeg(data, is_gray=True).shape == (120, 160, 1)
    with pytest.raises(DamagedJPEGError, match="premature end"):
        decode_jpeg(ended(data))
    with pytest.raises(ValueError, match="JPEG") as raised:
        decode_jpeg(b"text")
    assert not isinstance(raised.value, DamagedJPEGError)


def test_a_run_lists_the_damaged_file(tmp_path):
    pytest.importorskip("pyarrow")
    from camscope import BatchRun, Preprocess, Saliency, run_batch

    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(encoded_jpeg())
    (tmp_path / "images" / "b.jpg").write_bytes(ended(encoded_jpeg()))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2)).eval()
    explainer = Saliency(model, preprocess=Preprocess(resize=(16, 16), mean=(0,) * 3, std=(1,) * 3))
    run_batch(explainer, tmp_path / "images", tmp_path / "run", (0,))
    rows = BatchRun(tmp_path / "run").table().to_pylist()
    assert [(row["status"], row["error"]) for row in rows] == [
        ("ok", None),
        ("failed", "it is damaged: Corrupt JPEG data: premature end of data segment"),
    ]
