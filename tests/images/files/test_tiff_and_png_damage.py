"""TIFF files with fax codes: sound ones are read, and codes that libtiff only prints an error about are one error."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from camscope.errors import ImageError
from camscope.images.files import tiff_and_png_damage
from camscope.images.photo_reader import read_photo
from camscope.images.scans.scan_reader import read_scan

RNG = np.random.default_rng(0)
PAGE = np.kron(RNG.random((16, 16)) > 0.5, np.ones((16, 16), bool))
GRAYS = np.asarray(Image.fromarray(RNG.integers(0, 256, (256, 256), np.uint8)).convert("1"))
CODECS = ["group3", "group4", "tiff_ccitt"]


def encoded(codec: str, page: np.ndarray = PAGE) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(page).save(stream, "TIFF", compression=codec)
    return stream.getvalue()


def strip_of(data: bytes) -> tuple[int, int]:
    """Where the first strip is, and how long it is."""
    with Image.open(io.BytesIO(data)) as image:
        return image.tag_v2[273][0], image.tag_v2[279][0]


READERS = {
    "photo": lambda path: read_photo(path).pixels[..., 0] > 0,
    "scan": lambda path: read_scan(path).values > 0,
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("reader", READERS)
def test_a_sound_fax_is_read(codec, reader, tmp_path, capfd):
    path = tmp_path / "page.tif"
    path.write_bytes(encoded(codec))
    np.testing.assert_array_equal(READERS[reader](path), PAGE)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("reader", READERS)
def test_zeros_in_a_fax_are_one_error(codec, reader, tmp_path, capfd):
    data, path = bytearray(encoded(codec)), tmp_path / "page.tif"
    start, length = strip_of(bytes(data))
    data[start + length // 2 : start + length // 2 + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(ImageError, match="it is damaged: a strip of the TIFF"):
        READERS[reader](path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("codec", "page", "share"),
    [("group4", GRAYS, 0.9), ("tiff_ccitt", GRAYS, 0.8), ("group4", PAGE, 0.6), ("tiff_ccitt", PAGE, 0.2)],
    ids=["group 4, dithered", "Huffman, dithered", "group 4, areas", "Huffman, areas"],
)
def test_changed_bytes_of_a_fax_are_an_error_where_a_code_does_not_exist(codec, page, share, tmp_path):
    sound, path, n_errors = encoded(codec, page), tmp_path / "page.tif", 0
    start, length = strip_of(sound)
    places = np.random.default_rng(1).integers(start, start + length - 4, 40)
    for place in places:
        data = bytearray(sound)
        data[place] ^= 0x5A
        path.write_bytes(data)
        try:
            read_photo(path)
        except ImageError:
            n_errors += 1
    assert n_errors >= share * len(places)


def test_other_text_on_the_standard_error_stream_is_printed_again(capfd):
    def action():
        os.write(2, b"one\nFax4Decode: Bad code word at line 1 of strip 0 (x 3).\ntwo\n")

    assert b"Bad code word" in tiff_and_png_damage._capture_standard_error(action)
    assert capfd.readouterr().err == "one\ntwo\n"


def test_a_process_without_a_standard_error_stream_reads_a_fax(tmp_path, monkeypatch):
    path = tmp_path / "page.tif"
    path.write_bytes(encoded("group4"))

    def fail(descriptor):
        raise OSError

    monkeypatch.setattr(tiff_and_png_damage.os, "dup", fail)
    np.testing.assert_array_equal(READERS["photo"](path), PAGE)
