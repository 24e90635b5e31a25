"""Photographs of every kind: known pixels in, the same pixels out, or one error that names the file."""

import io
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from camscope.errors import ImageError
from camscope.images.photo_reader import read_photo
from camscope.images.scans.scan_reader import read_scan

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
GREY = RGB[..., 0]


def saved(tmp_path, image, name="photo.png", **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


def test_the_same_pixels_from_path_image_array_and_tensor(tmp_path):
    path = saved(tmp_path, Image.fromarray(RGB))
    sources = [path, str(path), Image.open(path), Image.fromarray(RGB), RGB, torch.from_numpy(RGB).permute(2, 0, 1)]
    for source in sources:
        photo = read_photo(source)
        assert np.array_equal(photo.pixels, RGB)
        assert photo.pixels.flags.owndata
        assert photo.pixels.flags.c_contiguous
    assert read_photo(path).name == "photo.png"
    for source in [GREY, torch.from_numpy(GREY.copy())[None], Image.fromarray(GREY)]:
        assert np.array_equal(read_photo(source).pixels, np.stack([GREY] * 3, -1))


def test_what_is_odd_about_a_file_is_told(tmp_path):
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    moving = saved(tmp_path, frames[0], "moving.gif", save_all=True, append_images=frames[1:])
    named = saved(tmp_path, frames[0], "named.jpg", format="PNG")
    assert read_photo(moving).flags == ("an animation or a stack: of 2 frames the first was read",)
    assert read_photo(named).flags == ("the file is called .jpg and is a PNG",)
    assert read_photo(saved(tmp_path, frames[0], "pages.tiff")).flags == ()
    moving.write_bytes(moving.read_bytes()[:-20])
    assert np.array_equal(read_photo(moving).pixels[..., 0], GREY), "what is damaged is a frame that nobody asked for"


def test_what_is_returned_is_not_what_was_given():
    array, tensor = RGB.copy(), torch.from_numpy(RGB.copy()).permute(2, 0, 1)
    for source in (array, tensor):
        read_photo(source).pixels[:] = 0
    assert np.array_equal(array, RGB)
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), RGB)


# what turns an upright picture into the one that an orientation flag describes, from the EXIF standard's table
STORED = {1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
          5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a), 7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
          8: lambda a: np.rot90(a, -1)}  # fmt: skip


@pytest.mark.parametrize("orientation", STORED)
def test_every_exif_orientation_comes_out_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](RGB)))
    path = saved(tmp_path, stored, exif=exif)
    assert np.array_equal(read_photo(path).pixels, RGB)
    opened = Image.open(path)
    assert np.array_equal(read_photo(opened).pixels, RGB)
    assert opened.size == stored.size  # the caller's image still lies as it lay


def test_damaged_exif_leaves_the_picture(tmp_path):
    path = saved(tmp_path, Image.fromarray(RGB), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff nonsense")
    assert np.array_equal(read_photo(path).pixels, RGB)


def test_sixteen_bits_become_eight(tmp_path):
    deep = np.array([[0, 257, 65535], [128, 129, 32896]], np.uint16)  # 257 steps are one level; a half rounds up
    expected = np.array([[0, 1, 255], [0, 1, 128]], np.uint8)
    for source in (
        Image.fromarray(deep),
        saved(tmp_path, Image.fromarray(deep)),
        saved(tmp_path, Image.fromarray(deep), "x.tif"),
    ):
        assert np.array_equal(read_photo(source).pixels[..., 1], expected)


def test_transparency_lies_on_white():
    rgba = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 51]]], np.uint8)  # 51 of 255 is one fifth
    expected = [[[10, 20, 30], [255, 255, 255], [204, 204, 204]]]
    assert read_photo(Image.fromarray(rgba)).pixels.tolist() == expected
    shade = Image.fromarray(np.array([[[10, 255], [10, 0]]], np.uint8), "LA")
    assert read_photo(shade).pixels[..., 0].tolist() == [[10, 255]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([9, 8, 7, 6, 5, 4])
    assert read_photo(palette).pixels.tolist() == [[[9, 8, 7], [6, 5, 4]]]
    palette.info["transparency"] = 1
    assert read_photo(palette).pixels.tolist() == [[[9, 8, 7], [255, 255, 255]]]


def test_other_modes():
    assert read_photo(Image.new("CMYK", (1, 1), (0, 255, 255, 0))).pixels.tolist() == [[[255, 0, 0]]]
    assert read_photo(Image.new("1", (1, 1), 1)).pixels.tolist() == [[[255, 255, 255]]]
    for mode in ("F", "I"):
        with pytest.raises(ImageError, match=f"mode '{mode}' have no known range; scale them"):
            read_photo(Image.new(mode, (2, 2)))


def test_each_bad_file_is_one_error_that_names_it(tmp_path):
    big = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    whole = {name: saved(tmp_path, big, name).read_bytes() for name in ("a.png", "a.jpg", "a.gif", "a.tif", "a.webp")}
    bad = {"text.jpg": b"hello, not a picture\n", "empty.png": b"", "zeros.png": bytes(64)}
    bad |= {f"cut_{name}": data[: len(data) // 2] for name, data in whole.items()}
    bad["corrupt.png"] = whole["a.png"][:60] + b"\xff" * 40 + whole["a.png"][100:]
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ImageError, match=name):
            read_photo(tmp_path / name)
    for name, says in {"missing.png": "no such file", ".": "folder", "nul\0.png": "cannot|damaged"}.items():
        with pytest.raises(ImageError, match=says):
            read_photo(tmp_path / name)
    # its header is whole, its pixels are not
    with Image.open(tmp_path / "cut_a.jpg") as lazy, pytest.raises(ImageError, match=r"cut_a\.jpg"):
        read_photo(lazy)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path = saved(tmp_path, Image.new("1", (2000, 1500)))
    limit = Image.MAX_IMAGE_PIXELS
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="2000 x 1500 pixels are more than the limit of 2999999"):
        read_photo(path, max_pixels=2_999_999)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="Pillow refuses"):
        read_photo(path)
    monkeypatch.undo()
    assert limit == Image.MAX_IMAGE_PIXELS
    for source in (np.zeros((20, 20), np.uint8), torch.zeros(1, 20, 20, dtype=torch.uint8), Image.new("L", (20, 20))):
        with pytest.raises(ImageError, match="limit of 399"):
            read_photo(source, max_pixels=399)
        assert read_photo(source, max_pixels=400).pixels.shape == (20, 20, 3)


def test_pillows_warning_stays_inside_also_with_threads(tmp_path, monkeypatch):
    path = saved(tmp_path, Image.new("L", (60, 50)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # 3000 pixels: Pillow warns, and would refuse from 4000 on
    assert read_photo(path).pixels.shape == (50, 60, 3)
    filters, shapes = list(warnings.filters), []
    threads = [threading.Thread(target=lambda: shapes.append(read_photo(path).pixels.shape)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shapes == [(50, 60, 3)] * 8
    assert warnings.filters == filters
    with pytest.warns(Image.DecompressionBombWarning):  # outside, it still warns
        Image.open(path).close()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (RGB / 255, r"float64 with shape \(6, 8, 3\).*\* 255"),
        (RGB.transpose(2, 0, 1), r"transpose\(1, 2, 0\)"),
        (np.zeros((4, 4, 4), np.uint8), r"uint8 array \(H,W,3\)"),
        (np.zeros((0, 4, 3), np.uint8), r"shape \(0, 4, 3\)"),
        (np.zeros(4, np.uint8), r"shape \(4,\)"),
        (np.zeros((4, 4), np.uint16), "uint16"),
        (torch.zeros(3, 4, 4), "float32.*model's own input"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), r"\(C,H,W\) with 3 or 1 channels"),
        (42, "the image is a int; expected a path"),
    ],
)
def test_what_is_no_picture_is_told_what_to_be(source, says):
    with pytest.raises(ImageError, match=says):
        read_photo(source)


# --- damage inside of a TIFF


def striped(mode, compression, **options):
    """A TIFF of some strips with its bytes, the offsets of its strips, and their lengths."""
    smooth = np.add.outer(np.arange(96), 2 * np.arange(64))
    image = Image.fromarray((smooth % 256).astype(np.uint8)).convert(mode)
    stream = io.BytesIO()
    image.save(stream, "TIFF", compression=compression, strip_size=64 * 16, **options)
    with Image.open(io.BytesIO(stream.getvalue())) as opened:
        return bytearray(stream.getvalue()), opened.tag_v2[273], opened.tag_v2[279], image


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_jpeg_in_a_tiff_that_is_cut_off_is_damaged(mode, which):
    data, starts, lengths, image = striped(mode, "jpeg", quality=95)
    assert len(starts) > 1
    assert abs(read_photo(bytes(data)).pixels.astype(int) - np.asarray(image.convert("RGB"))).mean() < 4
    half, end = starts[which] + lengths[which] // 2, starts[which] + lengths[which]
    data[half:end] = bytes(end - half)
    with pytest.raises(ImageError, match="damaged: a strip of the TIFF is truncated"):
        read_photo(bytes(data))


@pytest.mark.parametrize("marker", [b"\xff\xd9", b"\xff\xfe\x00\x10", b"\xff\xe1\x00\x02", b"\xff\xdb\x00\x02"])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_jpeg_in_a_tiff_whose_scan_ends_early_is_damaged(marker, share):
    data, starts, lengths, _ = striped("RGB", "jpeg", quality=95)
    strip = bytes(data[starts[1] : starts[1] + lengths[1]])
    scan = strip.index(b"\xff\xda") + 20
    at = starts[1] + scan + int(share * (lengths[1] - scan))
    while b"\xff" in data[at - 1 : at + len(marker) + 1]:
        at -= 1
    data[at : at + len(marker)] = marker
    for read in (read_photo, read_scan):
        with pytest.raises(ImageError, match="damaged: a strip of the TIFF"):
            read(bytes(data))


def test_padding_after_a_jpeg_in_a_tiff_is_no_damage():
    stream = io.BytesIO()
    Image.fromarray(RGB).save(stream, "TIFF", compression="jpeg")
    data = bytearray(stream.getvalue())
    with Image.open(io.BytesIO(data)) as image:
        start, length = image.tag_v2[273][0], image.tag_v2[279][0]
    strip = bytes(data[start : start + length]) + bytes(6)
    assert strip.endswith(b"\xff\xd9" + bytes(6))
    directory = int.from_bytes(data[4:8], "little")
    for tag, value in ((273, len(data)), (279, len(strip))):
        entry = data.index(struct.pack("<H", tag), directory)
        data[entry + 2 : entry + 12] = struct.pack("<HII", 4, 1, value)
    assert np.array_equal(read_photo(bytes(data) + strip).pixels, read_photo(stream.getvalue()).pixels)


@pytest.mark.parametrize("mode", ["L", "RGB", "I;16"])
def test_a_deflated_strip_of_a_tiff_has_its_checksum_compared(mode):
    data, starts, lengths, _ = striped(mode, "tiff_adobe_deflate")
    read_photo(bytes(data))
    data[starts[0] + lengths[0] - 1] ^= 1  # of the checksum itself: the pixels are whole
    for read in (read_photo, read_scan):
        with pytest.raises(ImageError, match="damaged: a strip of the TIFF"):
            read(bytes(data))


@pytest.mark.parametrize("flip", [0.3, 0.6, 0.9])
def test_a_png_has_the_checksums_of_its_pixels_compared(flip):
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (256, 320, 3), np.uint8)
    Image.fromarray(noise).save(stream, "PNG")
    data = bytearray(stream.getvalue())
    for read in (read_photo, read_scan):
        read(bytes(data))
    data[int(flip * len(data))] ^= 1
    for read in (read_photo, read_scan):
        with pytest.raises(ImageError):
            read(bytes(data))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("GIF", {}),
     ("BMP", {}), ("PPM", {}), ("TGA", {}), ("JPEG2000", {}), ("MPO", {}), ("TIFF", {}), ("TIFF", {"compression": "jpeg"}),
     ("TIFF", {"compression": "tiff_lzw"}), ("TIFF", {"compression": "tiff_deflate"}), ("TIFF", {"compression": "packbits"})],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_a_file_of_any_format_that_is_cut_off_is_damaged(kind, options, share):
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(noise).save(stream, kind, **options)
    with pytest.raises(ImageError):
        read_photo(stream.getvalue()[: int(share * len(stream.getvalue()))])


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_text_in_a_png_that_unpacks_to_gigabytes_is_not_unpacked(kind):
    stream = io.BytesIO()
    Image.fromarray(RGB).save(stream, "PNG")
    whole, packed = stream.getvalue(), zlib.compress(bytes(2_000_000))
    head = {b"zTXt": b"key\0\0", b"iTXt": b"key\0\1\0\0\0", b"iCCP": b"key\0\0"}[kind] + packed
    chunk = len(head).to_bytes(4, "big") + kind + head + zlib.crc32(kind + head).to_bytes(4, "big")
    with pytest.raises(ImageError, match=r"too large|Too much memory"):
        read_photo(whole[:33] + chunk * 1000 + whole[33:])
