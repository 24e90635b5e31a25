"""Regions where shortcuts live, found by an image's pixels alone; which of them are looked for, by modality."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from camscope.audit.shortcuts.regions.apertures import aperture, rim
from camscope.audit.shortcuts.regions.base import Bools, Find, Region
from camscope.audit.shortcuts.regions.bodies import background, outside_body, outside_body_ct, outside_field, shell
from camscope.audit.shortcuts.regions.frames import border, corners, padding
from camscope.audit.shortcuts.regions.marks import ink, outside_tissue, pen, saturated
from camscope.audit.shortcuts.regions.placing import equivalent_diameter, on_input
from camscope.errors import InputError

__all__ = ["PRESETS", "REGIONS", "Bools", "Region", "equivalent_diameter", "on_input", "region"]

_ALL: Final[tuple[tuple[str, str, Find], ...]] = (
    ("border", "within 5 % of an edge", border),
    ("corners", "within a fifth of the sides from a corner", corners),
    ("padding", "an outermost row or column of one value", padding),
    ("saturated", "a small, hard-edged part at the maximum", saturated),
    ("outside-body", "outside the largest part above Otsu's threshold", outside_body),
    ("outside-body-ct", "outside the largest part above -500 HU", outside_body_ct),
    ("outside-field", "below -1100 HU, outside the scanner's field", outside_field),
    ("background", "outside the foreground", background),
    ("shell", "along the edge of the foreground", shell),
    ("aperture", "outside the round field", aperture),
    ("rim", "along the edge of the round field", rim),
    ("ink", "purple ink", ink),
    ("outside-tissue", "glass without tissue", outside_tissue),
    ("pen", "green, blue or black pen", pen),
)

REGIONS: Final[Mapping[str, Region]] = MappingProxyType({name: Region(name, words, find) for name, words, find in _ALL})

PRESETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "xray": ("border", "corners", "padding", "outside-body", "saturated"),
        "ct": ("border", "padding", "outside-field", "outside-body-ct"),
        "mri": ("border", "padding", "background", "shell"),
        "dermoscopy": ("border", "corners", "aperture", "rim", "ink"),
        "retina": ("border", "aperture", "rim"),
        "pathology": ("border", "outside-tissue", "pen"),
        "any": ("border", "corners", "padding", "saturated"),
    }
)


def region(name: str) -> Region:
    """By its name; InputError that lists them for another."""
    if name not in REGIONS:
        raise InputError(f"no region {name!r}; expected one of {', '.join(REGIONS)}")
    return REGIONS[name]
