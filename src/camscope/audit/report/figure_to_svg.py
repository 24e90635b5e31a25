"""Matplotlib figures as inline SVG, with selectable text and the colors of the page."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from camscope.optional import require

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from matplotlib.figure import Figure

# Placeholder colors; the style sheet of the page sets them for light and dark mode.
COLOR_CLASS_NAMES = {
    f"#00000{n}": name
    for n, name in enumerate(
        ("text", "muted", "line", "band", "supports", "contradicts", "control", "background"), start=1
    )
}
TEXT, MUTED, LINE, BAND, SUPPORTS, CONTRADICTS, CONTROL, BACKGROUND = COLOR_CLASS_NAMES
DECIMAL_PATTERN = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
VALUES_PREFIX = "values "  # of the id of a text that shows numbers of the summary


@contextmanager
def default_style_scope() -> Iterator[None]:
    """Use matplotlib's default style inside the block, regardless of user settings; equal figures give equal SVG."""
    matplotlib = require("matplotlib", extra="audit")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "camscope", "path.simplify": False, "text.parse_math": False}
        )
        yield


def to_inline_svg(figure: "Figure", figure_id: str, aria_label: str) -> Markup:
    """Return a figure as SVG without inline styles, which the page forbids; `figure_id` must be unique on the page.

    A text whose id is `VALUES_PREFIX` and numbers gets these as its attribute `data-values`.
    """
    from xml.etree import ElementTree

    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(stream.getvalue())  # noqa: S314 - written by matplotlib
    for element in list(root.iter()):
        for style_sheet in element.findall("{*}style"):
            element.remove(style_sheet)
        element.tag = _strip_namespace(element.tag)
        element.attrib = dict(_convert_attributes(element, figure_id))
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-label": aria_label, "class": "plot"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704 - escaped by ElementTree


def _convert_attributes(element: "Element", figure_id: str) -> Iterator[tuple[str, str]]:
    """Yield the attributes with the id of the figure in every id, styles as attributes, and rounded numbers."""
    classes = []
    for key, value in element.attrib.items():
        name = _strip_namespace(key)
        if name == "id" and value.startswith(VALUES_PREFIX):
            yield "data-values", value.removeprefix(VALUES_PREFIX)
        elif name == "id" and value.startswith("matplotlib.axis"):
            classes.append("tick")
        elif name == "id" and element.tag in ("path", "clipPath"):  # no other element is referred to
            yield "id", f"{figure_id}-{value}"
        elif name == "style":
            for property_, setting in _parse_style(value):
                if setting in COLOR_CLASS_NAMES:
                    classes.append(f"{property_[0]}-{COLOR_CLASS_NAMES[setting]}")
                else:
                    yield property_, setting
        elif name in ("href", "clip-path"):
            yield name, value.replace("#", f"#{figure_id}-")
        elif name != "id" and not value.startswith("rotate(-0 "):
            yield name, DECIMAL_PATTERN.sub(_round_number, value)
    if classes:
        yield "class", " ".join(sorted(classes))


def _parse_style(style: str) -> Iterator[tuple[str, str]]:
    """Yield the properties of a style; of fonts only the size and weight, because the page sets the font."""
    for declaration in style.split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":  # older matplotlib versions write the font shorthand
            yield from [("font-size", size) for size in re.findall(r"([\d.]+)px", value)]
        elif key == "font-size":
            yield key, value.removesuffix("px")
        elif key and not key.startswith("font-"):
            yield key, value


def _round_number(number: re.Match[str]) -> str:
    text = f"{float(number.group()):.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _strip_namespace(name: Any) -> str:
    return str(name).rpartition("}")[2]
