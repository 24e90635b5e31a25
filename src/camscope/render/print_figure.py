"""Draw figures for print with matplotlib: text as text, maps as images, sizes in millimeters, a caption, the same bytes."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.optional_packages import require
from camscope.render.color_bar import format_range_number
from camscope.render.colors import DIVERGING, colorize, get_colormap_minimum
from camscope.render.image_encoding import RGBImage

VECTOR_FORMATS = (".pdf", ".svg")
ONE_COLUMN_MM, TWO_COLUMNS_MM, MAX_WIDTH_MM = 85.0, 174.0, 1000.0  # of many journals; 85 mm is between 80 and 90
MIN_WIDTH_MM, MIN_PANEL_MM = 30.0, 18.0
FONT_SIZE_PT, MAX_PANEL_COLUMNS, MM_PER_INCH, PT_PER_INCH = 7.0, 6, 25.4, 72.0
GAP_MM, BAR_WIDTH_MM, BAR_GAP_MM, TICK_MM = 2.0, 1.8, 0.8, 1.0
LINE_HEIGHT, TOP_MARGIN_MM = 1.3, 0.5  # of the font size; above the first line
MAX_TITLE_LINES = 4
TEXT_COLOR, FLAG_COLOR, FRAME_COLOR = "#222222", "#ffbf00", "#969696"
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Arial Unicode MS")
PRINT_SETTINGS: Mapping[str, Any] = {
    "pdf.fonttype": 42,  # TrueType, so that text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "camscope",
    "image.composite_image": False,  # keeps the map and its opacity apart from the photo
    "text.parse_math": False,
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
}


class PrintPanel(NamedTuple):
    """One image of a figure for print.

    Attributes:
        image: (H,W,3) uint8, the photo.
        title: Text above the image.
        map_image: (H,W,4) uint8, the colors of the map and their opacity. None for a photo alone.
        value_range: The values at both ends of the color bar, or None for no color bar.
        colormap: One of COLORMAPS, for the color bar.
        flag: Warning above the image, or None.

    >>> PrintPanel(np.zeros((8, 8, 3), np.uint8), "nodule").title
    'nodule'

    """

    image: RGBImage
    title: str
    map_image: NDArray[np.uint8] | None = None
    value_range: tuple[float, float] | None = None
    colormap: str = "inferno"
    flag: str | None = None


def draw_print_figure(
    panels: Sequence[PrintPanel | None],
    *,
    caption: str = "",
    width_mm: float = ONE_COLUMN_MM,
    columns: int | None = None,
    letters: bool | None = None,
    font_size: float = FONT_SIZE_PT,
) -> Any:
    """Draw images and their maps as a matplotlib figure of a given width in millimeters. Text is in points.

    Images keep their own pixels. The photo and the map are two images, so that an editor can change the opacity.

    Args:
        panels: The images in rows. A panel None stays empty.
        caption: Text below the images.
        width_mm: Width of the figure: 85 for one column of a journal, 174 for two.
        columns: Images in a row. Default: as many as get 18 mm each, and not more than 6.
        letters: Whether titles begin with a, b, c ... Default: with two or more images.
        font_size: In points.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        InputError: There is no panel, or the width is out of range.
        MissingExtraError: matplotlib is not installed.

    >>> figure = draw_print_figure([PrintPanel(np.zeros((8, 8, 3), np.uint8), "nodule")], width_mm=85)
    >>> round(figure.get_figwidth() * 25.4)
    85

    """
    if not any(panels):
        raise InputError("there is no image to draw; expected at least one panel")
    if not MIN_WIDTH_MM <= width_mm <= MAX_WIDTH_MM:
        raise InputError(f"width_mm={width_mm}; expected {MIN_WIDTH_MM:g} to {MAX_WIDTH_MM:g} mm, such as 85 or 174")
    if columns is not None and columns < 1:
        raise InputError(f"columns={columns}; expected at least 1")
    if not 4 <= font_size <= 36:
        raise InputError(f"font_size={font_size}; expected 4 to 36 points")
    with print_style_scope():
        layout = _Layout(width_mm, columns or _choose_n_columns(len(panels), width_mm), font_size)
        layout.columns = min(layout.columns, len(panels))
        return layout.draw(panels, caption, len(panels) > 1 if letters is None else letters)


@contextmanager
def print_style_scope() -> Iterator[None]:
    """Use matplotlib's default style and editable text inside the `with` block. Settings of the user have no effect."""
    matplotlib, fonts = require("matplotlib", extra="metrics"), require("matplotlib.font_manager", extra="metrics")
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")  # drawn as a box
        matplotlib.rcdefaults()
        installed = set(fonts.get_font_names())
        matplotlib.rcParams.update({**PRINT_SETTINGS, "font.family": [name for name in FONTS if name in installed]})
        yield


def encode_figure(figure: Any, suffix: str, *, title: str = "", caption: str = "", dpi: int = 300) -> bytes:
    """Encode a matplotlib figure as a file. The same figure gives the same bytes: no date is written.

    Args:
        figure: The figure.
        suffix: ".pdf", ".svg" or ".png".
        title: Title in the metadata of the file.
        caption: Description in the metadata of the file: `Subject` in a PDF, `<desc>` in an SVG.
        dpi: Pixels per inch of a PNG.

    Returns:
        The bytes of the file.

    Raises:
        InputError: The suffix is unknown.

    >>> figure = draw_print_figure([PrintPanel(np.zeros((8, 8, 3), np.uint8), "nodule")])
    >>> encode_figure(figure, ".pdf")[:5]
    b'%PDF-'

    """
    title, caption = " ".join(title.split()), " ".join(caption.split())
    metadata: dict[str, dict[str, Any]] = {
        ".pdf": {"Title": title, "Subject": caption, "Creator": "camscope", "Producer": None, "CreationDate": None},
        ".svg": {
            **{name: text for name, text in (("Title", title), ("Description", caption)) if text},
            "Creator": "camscope",
            "Date": None,
        },
        ".png": {"Title": title, "Description": caption, "Software": None},
    }
    if suffix not in metadata:
        raise InputError(f"cannot write a figure with suffix {suffix!r}; expected {', '.join(metadata)}")
    stream = io.BytesIO()
    with print_style_scope():
        figure.savefig(stream, format=suffix[1:], dpi=dpi, metadata=metadata[suffix])
    data = stream.getvalue()
    if suffix == ".svg" and caption:  # the element that screen readers read
        start = data.index(b">", data.index(b"<svg ")) + 1
        data = data[:start] + f"\n <desc>{escape(caption)}</desc>".encode() + data[start:]
    return data


def _choose_n_columns(n_panels: int, width_mm: float) -> int:
    """Choose the images in a row. The rows are of equal length if possible."""
    most = int(np.clip((width_mm + GAP_MM) // (MIN_PANEL_MM + GAP_MM), 1, MAX_PANEL_COLUMNS))
    n_rows = -(-n_panels // most)
    return -(-n_panels // n_rows)


class _Layout:
    """Places panels, text and color bars on a figure. All lengths are in millimeters, from the top left."""

    def __init__(self, width_mm: float, columns: int, font_size: float) -> None:
        self.width_mm, self.columns, self.font_size = width_mm, columns, font_size
        self.line_mm = LINE_HEIGHT * font_size / PT_PER_INCH * MM_PER_INCH
        figures = require("matplotlib.figure", extra="metrics")
        agg = require("matplotlib.backends.backend_agg", extra="metrics")
        self.figure = figures.Figure()
        self._renderer = agg.FigureCanvasAgg(self.figure).get_renderer()

    def draw(self, panels: Sequence[PrintPanel | None], caption: str, letters: bool) -> Any:
        """Draw the figure. Its height follows from its contents."""
        rows = [panels[start : start + self.columns] for start in range(0, len(panels), self.columns)]
        cell_mm = (self.width_mm - GAP_MM * (self.columns - 1)) / self.columns
        bars = [panel.value_range for panel in panels if panel is not None and panel.value_range is not None]
        bar_mm = 0.0
        if bars:
            texts = [text for low, high in bars for text in _format_ends(low, high)]
            bar_mm = BAR_GAP_MM + BAR_WIDTH_MM + TICK_MM + max(self._measure_mm(text) for text in texts)
        image_mm = max(cell_mm - bar_mm, cell_mm / 3)
        names = iter(_iter_letters())
        cells = [
            [
                None if panel is None else (panel, self._wrap(panel, next(names) if letters else "", cell_mm))
                for panel in row
            ]
            for row in rows
        ]
        places, top = [], TOP_MARGIN_MM
        for row in cells:
            filled = [cell for cell in row if cell is not None]
            title_mm = max((self.line_mm * (len(lines[0]) + len(lines[1])) for _, lines in filled), default=0.0)
            heights = [image_mm * panel.image.shape[0] / panel.image.shape[1] for panel, _ in filled]
            top += title_mm + 0.4
            places.append((top, max(heights, default=0.0)))
            top += max(heights, default=0.0) + GAP_MM
        caption_lines = self.wrap_text(caption, self.width_mm)
        height_mm = top + self.line_mm * len(caption_lines) if caption_lines else top - GAP_MM + 0.6
        self.height_mm = height_mm
        self.figure.set_size_inches(self.width_mm / MM_PER_INCH, height_mm / MM_PER_INCH)
        for row, (row_top, _) in zip(cells, places, strict=True):
            for column, cell in enumerate(row):
                if cell is not None:
                    self._draw_panel(*cell, column * (cell_mm + GAP_MM), row_top, image_mm)
        for n, line in enumerate(caption_lines):
            self._draw_text(line, 0.0, top + self.line_mm * n)
        return self.figure

    def _draw_panel(
        self, panel: PrintPanel, lines: tuple[list[str], list[str]], left: float, top: float, width: float
    ) -> None:
        title_lines, flag_lines = lines
        height = width * panel.image.shape[0] / panel.image.shape[1]
        title_top = top - 0.4 - self.line_mm * (len(title_lines) + len(flag_lines))
        for n, line in enumerate([*title_lines, *flag_lines]):
            is_flag = n >= len(title_lines)
            self._draw_text(line, left, title_top + self.line_mm * n, background=FLAG_COLOR if is_flag else None)
        axes = self._add_axes(left, top, width, height)
        for image in (panel.image, panel.map_image):
            if image is not None:
                axes.imshow(image, interpolation="none", aspect="auto")
        axes.set_axis_off()
        if panel.value_range is not None:
            self._draw_color_bar(panel, left + width + BAR_GAP_MM, top, height)

    def _draw_color_bar(self, panel: PrintPanel, left: float, top: float, height: float) -> None:
        low, high = panel.value_range or (0.0, 1.0)
        axes = self._add_axes(left, top, BAR_WIDTH_MM, height)
        ramp = np.linspace(1.0, get_colormap_minimum(panel.colormap), 256)[:, None]
        if panel.colormap == DIVERGING and (strongest := max(abs(low), abs(high))) > 0:
            ramp = np.linspace(high, low, 256)[:, None] / strongest
        axes.imshow(
            colorize(ramp, panel.colormap), extent=(0, 1, 0, 1), interpolation="none", aspect="auto", origin="upper"
        )
        ends = {0.0: format_range_number(low, low, high), 1.0: format_range_number(high, low, high)}
        if panel.colormap == DIVERGING and low < 0 < high:
            ends[-low / (high - low)] = "0"
        axes.set_xticks([])
        axes.yaxis.tick_right()
        axes.set_yticks(list(ends), list(ends.values()), fontsize=self.font_size, color=TEXT_COLOR)
        alignment = {0.0: "bottom", 1.0: "top"}
        for place, label in zip(ends, axes.get_yticklabels(), strict=True):
            label.set_verticalalignment(alignment.get(place, "center"))
        axes.tick_params(axis="y", length=TICK_MM / MM_PER_INCH * PT_PER_INCH / 2, width=0.4, pad=1, color=FRAME_COLOR)
        axes.spines[:].set(linewidth=0.4, color=FRAME_COLOR)

    def _add_axes(self, left: float, top: float, width: float, height: float) -> Any:
        size = self.width_mm, self.height_mm
        return self.figure.add_axes(
            (left / size[0], 1 - (top + height) / size[1], width / size[0], height / size[1]), anchor="NW"
        )

    def _draw_text(self, text: str, left: float, top: float, background: str | None = None) -> None:
        box = None if background is None else {"facecolor": background, "linewidth": 0, "pad": 0.6}
        letter, tab, remainder = text.partition("\t")
        place = {"va": "top", "ha": "left", "fontsize": self.font_size, "color": TEXT_COLOR, "bbox": box}
        y = 1 - top / self.height_mm
        if tab:
            self.figure.text(left / self.width_mm, y, letter, fontweight="bold", **place)
            left += self._measure_mm(f"{letter} ", bold=True)
        self.figure.text(left / self.width_mm, y, remainder if tab else text, **place)

    def _wrap(self, panel: PrintPanel, letter: str, width: float) -> tuple[list[str], list[str]]:
        """Return the lines of a title and of a flag. A letter stands before a tab."""
        indent = self._measure_mm(f"{letter} ", bold=True) if letter else 0.0
        title = self.wrap_text(panel.title, width - indent, MAX_TITLE_LINES)
        if letter:
            first = self.wrap_text(panel.title, width - indent)[:1] or [""]
            title = [f"{letter}\t{first[0]}", *title[1:]]
        return title, self.wrap_text(panel.flag or "", width, MAX_TITLE_LINES)

    def wrap_text(self, text: str, width: float, max_lines: int = 100) -> list[str]:
        """Break a text into lines that fit a width. A long word is broken, too."""
        lines: list[str] = []
        for word in text.split():
            while True:
                line = f"{lines[-1]} {word}" if lines else word
                if lines and self._measure_mm(line) <= width:
                    lines[-1] = line
                    break
                n_fitting = len(word)
                while n_fitting > 1 and self._measure_mm(word[:n_fitting]) > width:
                    n_fitting -= 1
                lines.append(word[:n_fitting])
                word = word[n_fitting:]
                if not word:
                    break
        return lines if len(lines) <= max_lines else [*lines[: max_lines - 1], f"{lines[max_lines - 1]} …"]

    def _measure_mm(self, text: str, *, bold: bool = False) -> float:
        fonts = require("matplotlib.font_manager", extra="metrics")
        properties = fonts.FontProperties(size=self.font_size, weight="bold" if bold else "normal")
        width, _, _ = self._renderer.get_text_width_height_descent(text, properties, False)
        return float(width) / float(self.figure.dpi) * MM_PER_INCH


def _format_ends(low: float, high: float) -> tuple[str, str]:
    return format_range_number(low, low, high), format_range_number(high, low, high)


def _iter_letters() -> Iterator[str]:
    """Yield a, b, ... z, aa, ab ..."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    yield from alphabet
    yield from (first + second for first in alphabet for second in alphabet)
