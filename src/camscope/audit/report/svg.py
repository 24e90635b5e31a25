"""Matplotlib figures as inline SVG, with selectable text and the colors of the page."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from camscope.optional import require

if TYPE_CHECKING:
    from markupsafe import Markup

# Placeholder colors; the style sheet of the page sets them for light and dark mode.
TEXT_COLOR, MUTED_COLOR, LINE_COLOR, BAND_COLOR, SUPPORTS_COLOR, CONTRADICTS_COLOR, CONTROL_COLOR, BACKGROUND_COLOR = (
    "#000001",
    "#000002",
    "#000003",
    "#000004",
    "#000005",
    "#000006",
    "#000007",
    "#000008",
)
COLOR_CLASS_NAMES: Mapping[str, str] = {
    TEXT_COLOR: "text",
    MUTED_COLOR: "muted",
    LINE_COLOR: "line",
    BAND_COLOR: "band",
    SUPPORTS_COLOR: "supports",
    CONTRADICTS_COLOR: "contradicts",
    CONTROL_COLOR: "control",
    BACKGROUND_COLOR: "background",
}
FONT_SIZE = 11.5  # pixels
DROPPED_STYLE_PROPERTIES = ("font-family", "font-style", "font-variant", "font-stretch", "font")
DECIMAL_PATTERN = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
FORMATTED_NUMBER_PATTERN = re.compile(r"−?\d[\d,]*(?:\.\d+)?(?:e-\d+)?")  # as number_to_text formats them


class Plot:
    """A figure measured in CSS pixels from its top left corner."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72))
        self.figure.patch.set_visible(False)

    def add_axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Add axes with a bottom spine and vertical grid lines."""
        w, h = self.width, self.height
        axes = self.figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))
        axes.patch.set_visible(False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(LINE_COLOR)
        axes.tick_params(colors=MUTED_COLOR, labelsize=FONT_SIZE - 1, length=3, color=LINE_COLOR)
        axes.grid(axis="x", color=LINE_COLOR, linewidth=0.7)
        axes.set_axisbelow(True)
        return axes

    def add_text(self, x: float, y: float, text: str, **text_style: Any) -> None:
        """Add text at a pixel; math markup is not parsed."""
        defaults = {"fontsize": FONT_SIZE, "color": TEXT_COLOR, "va": "center", "ha": "left", "parse_math": False}
        self.figure.text(x / self.width, 1 - y / self.height, text, **{**defaults, **text_style})

    def add_numbers(self, x: float, y: float, text: str, values: Sequence[float], **text_style: Any) -> None:
        """Add text that contains these formatted numbers of the summary, in their order."""
        self.add_text(x, y, text, gid="value " + " ".join(map(repr, values)), **text_style)

    def to_svg(self, figure_id: str, aria_label: str) -> "Markup":
        """Return the inline SVG; `figure_id` must be unique on the page."""
        stream = io.StringIO()
        self.figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        return _prepare_inline_svg(stream.getvalue(), figure_id, aria_label)


@contextmanager
def default_style_scope() -> Iterator[None]:
    """Use matplotlib's default style inside the block, regardless of user settings."""
    matplotlib = require("matplotlib", extra="audit")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "camscope", "path.simplify": False})
        matplotlib.rcParams["text.parse_math"] = False
        yield


def _prepare_inline_svg(svg: str, figure_id: str, aria_label: str) -> "Markup":
    """Remove unreferenced ids and inline styles, which the page forbids, and round the coordinates."""
    from xml.etree import ElementTree

    from markupsafe import Markup

    root = ElementTree.fromstring(svg.partition("?>")[2].partition('dtd">')[2])  # noqa: S314 - written by matplotlib
    for parent in list(root.iter()):
        for child in list(parent):
            if _strip_namespace(child.tag) in ("metadata", "style"):
                parent.remove(child)
    referenced_ids = {
        value.lstrip("#") for one in root.iter() for key, value in one.attrib.items() if _strip_namespace(key) == "href"
    }
    referenced_ids |= {place for one in root.iter() for place in re.findall(r"url\(#([^)]+)\)", str(one.attrib))}
    for one in root.iter():
        one.tag = _strip_namespace(one.tag)
        one.attrib = dict(_convert_attributes(one.attrib, figure_id, referenced_ids))
    for one in [one for one in root.iter() if "data-values" in one.attrib]:
        _split_numbers_into_tspans(one[0], one.attrib.pop("data-values").split())
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": aria_label, "class": "plot"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704 - escaped by ElementTree


def _split_numbers_into_tspans(text_element: Any, values: Sequence[str]) -> None:
    """Wrap each number of a text in a tspan with its exact value."""
    from xml.etree.ElementTree import SubElement

    text, position, last_tspan = text_element.text or "", 0, None
    text_element.text = ""
    for match, value in zip(FORMATTED_NUMBER_PATTERN.finditer(text), values, strict=True):
        text_before = text[position : match.start()]
        if last_tspan is None:
            text_element.text = text_before
        else:
            last_tspan.tail = text_before
        last_tspan = SubElement(text_element, "tspan", {"data-value": value})
        last_tspan.text, position = match.group(), match.end()
    if last_tspan is not None:
        last_tspan.tail = text[position:]


def _convert_attributes(
    attributes: Mapping[str, str], figure_id: str, referenced_ids: set[str]
) -> Iterator[tuple[str, str]]:
    classes = []
    for key, value in attributes.items():
        local = _strip_namespace(key)
        if local == "id":
            if value in referenced_ids:
                yield "id", f"{figure_id}-{value}"
            elif value.startswith("matplotlib.axis"):
                classes.append("tick")
            elif value.startswith("value "):
                yield "data-values", value.removeprefix("value ")
        elif local == "style":
            for property_, setting in _parse_style(value):
                if setting in COLOR_CLASS_NAMES:
                    classes.append(f"{property_[0]}-{COLOR_CLASS_NAMES[setting]}")
                else:
                    yield property_, setting
        elif local == "href":
            yield "href", f"#{figure_id}-{value[1:]}"
        elif local == "clip-path":
            yield "clip-path", value.replace("#", f"#{figure_id}-")
        elif not (local == "transform" and value.startswith("rotate(-0 ")):
            yield local, DECIMAL_PATTERN.sub(_round_number, value)
    if classes:
        yield "class", " ".join(sorted(classes))


def _parse_style(style: str) -> Iterator[tuple[str, str]]:
    for declaration in style.split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":  # older matplotlib versions write the font shorthand
            yield from [("font-size", size) for size in re.findall(r"([\d.]+)px", value)]
            yield from [("font-weight", "bold")] * ("bold" in value or "700" in value)
        elif key and key not in DROPPED_STYLE_PROPERTIES:
            yield key, value.removesuffix("px") if key == "font-size" else value


def _round_number(number_match: re.Match[str]) -> str:
    text = f"{float(number_match.group()):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _strip_namespace(qualified_name: str) -> str:
    return qualified_name.rpartition("}")[2]
