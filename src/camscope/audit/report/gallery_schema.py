"""Shelves: the pictures of a report, and all that is said of them; what is said is also JSON, so that it can be checked."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

DATA_URI_PATTERN = re.compile(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]*")


@dataclass(frozen=True)
class GalleryKind:
    """What a shelf is called, and what is on it."""

    title: str
    description: str


GALLERY_KINDS: Mapping[str, GalleryKind] = {
    "random": GalleryKind(
        "Drawn by the seed", "Of all images that have an answer, in the order in which they were drawn."
    ),
    "missed": GalleryKind("Missed", "Images with the finding whose probability is below a half, the lowest first."),
    "false_alarms": GalleryKind(
        "False alarms", "Images without the finding whose probability is above a half, the highest first."
    ),
    "borderline": GalleryKind("On the border", "Images whose probability is nearest to a half."),
    "most_confident": GalleryKind(
        "Clearest", "Images with the finding whose probability is above a half, the highest first, to compare."
    ),
    "review": GalleryKind("To be read", "Images that the audit asks somebody to look at, each with its reason."),
    "prototypes": GalleryKind("Prototypes", "The most typical images of each group of maps."),
}


@dataclass(frozen=True)
class PredictedImage:
    """An image that has an answer. `log_odds`, `truths`: by the name of the finding."""

    row: int
    id: str
    log_odds: Mapping[str, float]
    truths: Mapping[str, bool | None]


@dataclass(frozen=True)
class GalleryEntry:
    """An image that is to be shown, asked for a finding. `cluster`, `prototype_method`: whose prototype it is."""

    row: int
    finding: str
    reason: str = ""
    cluster: int | None = None
    prototype_method: str = ""


@dataclass(frozen=True)
class GalleryMap:
    """A map of an image. `data_uri`: a data URI, of the map alone; `includes_image`: with its image in it; `reason`: why there is none.

    `is_signed`: with colours for and against, which need a pale image below.
    """

    method: str
    data_uri: str | None = None
    includes_image: bool = False
    is_signed: bool = False
    warning_text: str = ""
    reason: str = ""
    alt_text: str = "The map"


@dataclass(frozen=True)
class GalleryImage:
    """An image with its maps. `image_data_uri`: a data URI; `missing_reason`: why it is not shown; `log_odds`: what the model says.

    `cluster`: the group that it is typical of, by the maps of the method `prototype_method`.
    """

    id: str
    finding: str
    truth: str
    log_odds: float | None
    maps: tuple[GalleryMap, ...]
    image_data_uri: str | None = None
    missing_reason: str = ""
    reason: str = ""
    cluster: int | None = None
    prototype_method: str = ""


@dataclass(frozen=True)
class GallerySection:
    """Images of one kind."""

    kind: str
    finding: str
    images: tuple[GalleryImage, ...]


@dataclass(frozen=True)
class Gallery:
    """All shelves of a report."""

    sections: tuple[GallerySection, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `data` said: with the digest of each picture in its place, as `replace_images_with_digests` leaves them on a page."""
        return cls(
            tuple(
                GallerySection(
                    section["kind"], section["finding"], tuple(_image_from_dict(image) for image in section["images"])
                )
                for section in data["sections"]
            )
        )

    @property
    def as_dict(self) -> dict[str, Any]:
        """What is said of the pictures, and of each its digest, for `gallery.json`."""
        return {
            "sections": [
                {
                    "kind": section.kind,
                    "finding": section.finding,
                    "images": [_image_to_dict(image) for image in section.images],
                }
                for section in self.sections
            ]
        }


def _image_to_dict(image: GalleryImage) -> dict[str, Any]:
    return {
        "id": image.id,
        "finding": image.finding,
        "truth": image.truth,
        "log_odds": image.log_odds,
        "reason": image.reason,
        "cluster": image.cluster,
        "prototype_method": image.prototype_method,
        "missing_reason": image.missing_reason,
        "image_data_uri": _digest_data_uri(image.image_data_uri),
        "maps": [{**vars(map_), "data_uri": _digest_data_uri(map_.data_uri)} for map_ in image.maps],
    }


def _image_from_dict(data: Mapping[str, Any]) -> GalleryImage:
    return GalleryImage(
        maps=tuple(GalleryMap(**map_data) for map_data in data["maps"]),
        **{name: value for name, value in data.items() if name != "maps"},
    )


def replace_images_with_digests(html: str) -> str:
    """A page with the digest of each picture in its place."""
    return DATA_URI_PATTERN.sub(lambda match: _digest_data_uri(match[0]) or "", html)


def _digest_data_uri(data_uri: str | None) -> str | None:
    return None if data_uri is None else hashlib.sha256(data_uri.encode()).hexdigest()
