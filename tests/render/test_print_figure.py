"""Figures for print: text as text, sizes in millimeters, two images for a map, a caption in the file, the same bytes."""

import base64
import io
import re
import shutil
import subprocess
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from camscope import render
from camscope.errors import InputError, OutputError
from camscope.explanation import Explanation, PrintFigure
from camscope.geometry import Placement

pytest.importorskip("matplotlib")
POINTS_PER_MM = 72 / 25.4


def explanation(attribution=None, **settings):
    values = np.random.default_rng(0).random((4, 5)) if attribution is None else attribution
    photo = np.random.default_rng(1).integers(0, 256, (48, 70, 3), dtype=np.uint8)
    facts = {
        "layer": "layer4",
        "probability": 0.93,
        "model": "1f0a92bc12345678",
        "versions": {"camscope": "9.8.7", "torch": "6.5.4"},
        "image": photo,
        "placement": Placement.identity((48, 70)).cropped((4, 5), (40, 60)),
    } | settings
    return Explanation(values, "gradcam", 3, "tabby $_^", 7.5, input_size=(40, 60), **facts)


def read_images(svg):
    root = ElementTree.fromstring(svg)
    links = [
        element.get("{http://www.w3.org/1999/xlink}href") for element in root.iter("{http://www.w3.org/2000/svg}image")
    ]
    assert all(link.startswith("data:image/png;base64,") for link in links)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))) for link in links]


def read_text(svg):
    root = ElementTree.fromstring(svg)
    return " ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize("width", [40, 85, 174])
def test_a_figure_is_as_wide_as_its_millimeters(width):
    figure = PrintFigure([explanation()])
    page = re.search(rb"/MediaBox \[ ?([\d. ]+)\]", figure.encode(".pdf", width_mm=width))[1].split()
    assert float(page[2]) == pytest.approx(width * POINTS_PER_MM, abs=0.01)
    svg_width = re.search(rb'<svg [^>]*width="([\d.]+)pt"', figure.encode(".svg", width_mm=width))[1]
    assert float(svg_width) == pytest.approx(width * POINTS_PER_MM, abs=0.01)


def test_the_caption_names_what_a_reader_needs_to_draw_it_again():
    caption = explanation().figure_caption(interpolation="cells")
    for part in ("Grad-CAM", "layer4", "tabby $_^", "p=0.93", "score 7.5", "inferno", "maximum", "4x5 cells"):
        assert part in caption
    assert "drawn as 4x5 cells" in caption
    assert caption.endswith("Digest of the weights: 1f0a92bc12345678. Software: camscope 9.8.7, torch 6.5.4.")
    assert "linearly" in explanation().figure_caption(interpolation="bilinear")
    assert "on the scale 0 to 2" in explanation().figure_caption(scale=(0, 2))


def test_an_svg_has_its_caption_as_text_and_refers_to_no_file():
    shown = explanation()
    svg = PrintFigure([shown]).encode(".svg").decode()
    text = read_text(svg)
    for word in shown.figure_caption().split():
        assert word in text
    root = ElementTree.fromstring(svg)
    assert root.find("{http://www.w3.org/2000/svg}desc").text == shown.figure_caption()
    assert re.findall(r'(?:href|src)="(?!data:|#)[^"]*"', svg) == []
    assert "url(http" not in svg


def test_the_photo_keeps_its_pixels_and_the_map_lies_over_it():
    shown = explanation()
    photo, layer, bar = read_images(PrintFigure([shown]).encode(".svg"))
    assert photo.shape[:2] == layer.shape[:2] == (48, 70)
    covered = shown.coverage_mask()
    assert np.array_equal(photo[..., :3][covered], shown.image[covered])
    opacity = layer[..., 3:] / 255
    blended = opacity * layer[..., :3] + (1 - opacity) * photo[..., :3]
    assert np.abs(blended - shown.overlay()).max() <= 1.5  # the rounding of colors and opacity
    assert not layer[~covered][:, 3].any()
    assert np.array_equal(bar[::255, 0, :3], render.colorize(np.array([[1.0], [0.0]]))[:, 0])


def test_a_signed_map_has_gray_below_it_and_zero_on_its_bar():
    shown = explanation(np.array([[-1.0, 2.0], [0.5, 0.0]]))
    svg = PrintFigure([shown]).encode(".svg")
    photo, layer, _ = read_images(svg)
    opacity = layer[..., 3:] / 255
    blended = opacity * layer[..., :3] + (1 - opacity) * photo[..., :3]
    assert np.abs(blended - shown.overlay()).max() <= 1.5
    assert {"0", "diverging"} <= set(re.findall(r"[\w.]+", read_text(svg)))


@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".png"])
def test_the_same_figure_has_the_same_bytes_without_a_date(suffix):
    first, second = (PrintFigure([explanation()]).encode(suffix) for _ in range(2))
    assert first == second
    assert b"Date" not in first


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not here")
def test_pdftotext_finds_the_caption(tmp_path):
    shown = explanation()
    path = shown.save(tmp_path / "map.pdf")
    text = subprocess.run(["pdftotext", str(path), "-"], capture_output=True, text=True, check=True).stdout
    assert shown.figure_caption() in " ".join(text.split())


def test_a_pdf_has_fonts_as_truetype_and_its_caption_in_the_metadata():
    data = PrintFigure([explanation(attribution=np.eye(3))]).encode(".pdf")
    assert b"/Subtype /CIDFontType2" in data
    assert b"/Type3" not in data
    assert b"/Subject (Grad-CAM at layer4 for tabby" in data


def test_letters_number_the_images_and_the_caption_uses_them():
    shown = explanation()
    figure = PrintFigure([shown, shown], photo=shown.image)
    assert figure.caption.startswith("a, image; b, Grad-CAM at layer4 for tabby $_^ (p=0.93, score 7.5); c, Grad-CAM")
    text = read_text(figure.encode(".svg", width_mm=174))
    assert {"a", "b", "c"} <= set(text.split())
    assert len(read_images(figure.encode(".svg"))) == 1 + 2 * 3
    bare = PrintFigure([shown], titles=[""]).encode(".svg", caption=False)
    assert "Grad-CAM" not in read_text(bare)


def test_warnings_masks_outlines_volumes_and_signals_can_be_drawn():
    flagged = explanation(np.zeros((2, 2)), status="zero_gradient")
    assert "zero gradient" in read_text(PrintFigure([flagged]).encode(".svg"))
    assert "Flagged: zero gradient." in flagged.figure_caption()
    outlined = PrintFigure([explanation()], contour=[0.5])
    assert len(read_images(outlined.encode(".svg"))) == 2  # an image and a bar
    assert "linearly" in outlined.caption
    volume = Explanation(
        np.random.default_rng(0).random((2, 3, 3)), "gradcam", 1, "nodule", 7.5, input_size=(4, 12, 12)
    )
    signal = Explanation(np.random.default_rng(0).random(5), "gradcam", 1, "beat", 7.5, input_size=(40,))
    for shown in (volume, signal):
        assert len(read_images(PrintFigure([shown]).encode(".svg"))) == 2


def test_saving_and_its_errors(tmp_path):
    shown = explanation()
    assert shown.save(tmp_path / "map.svg", width_mm=60, interpolation="cells").stat().st_size > 1000
    with pytest.raises(OutputError):
        shown.save(tmp_path / "map.svg", overwrite=False)
    for settings in ({"width_mm": 3}, {"width_mm": 4000}):
        with pytest.raises(InputError, match="expected 30 to 1000 mm"):
            shown.save(tmp_path / "other.pdf", **settings)
    with pytest.raises(InputError, match="at least one"):
        PrintFigure([])
    with pytest.raises(InputError, match=r"expected \.pdf, \.svg, \.png"):
        render.encode_figure(shown.print_figure(), ".eps")
    assert not (tmp_path / "other.pdf").exists()


def test_text_fits_into_its_width_and_letters_of_other_scripts_stay():
    """No line of the caption is wider than the figure, by the advance widths of the font."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    word = "W" * 90
    shown = explanation(layer=word)
    svg = PrintFigure([shown]).encode(".svg", width_mm=60)
    lines = ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    for line in filter(str.strip, lines):
        path = TextPath((0, 0), line.replace("$", "S"), size=7, prop=FontProperties(family="DejaVu Sans"))
        assert path.get_extents().width <= 60 * POINTS_PER_MM + 1
    assert "猫" in PrintFigure([explanation(name="猫")], titles=["猫"]).encode(".svg").decode()


@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".png"])
def test_a_figure_needs_neither_title_nor_caption(suffix):
    figure = render.draw_print_figure([render.PrintPanel(np.zeros((8, 8, 3), np.uint8), "nodule")])
    data = render.encode_figure(figure, suffix)
    assert b"<desc>" not in data
    assert len(data) > 500
