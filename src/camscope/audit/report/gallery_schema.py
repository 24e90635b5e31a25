"""Images of a report and their texts, which are also written as JSON so that the report can be checked."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

DATA_URI_PATTERN = re.compile(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]*")


@dataclass(frozen=True)
class GalleryKind:
    """Title and description of a kind of gallery section."""

    title: str
    description: str


GALLERY_KINDS: Mapping[str, GalleryKind] = {
    "random": GalleryKind("Random sample", "Images drawn by the seed from all images with a prediction."),
    "missed": GalleryKind("Missed", "Images with the finding and a probability below one half, lowest first."),
    "false_alarms": GalleryKind(
        "False alarms", "Images without the finding and a probability above one half, highest first."
    ),
    "borderline": GalleryKind("Borderline", "Images with a probability closest to one half."),
    "most_confident": GalleryKind(
        "Most confident", "Images with the finding and a probability above one half, highest first, for comparison."
    ),
    "review": GalleryKind("For review", "Images that should be reviewed, each with the reason."),
    "prototypes": GalleryKind("Prototypes", "The most typical images of each cluster of maps."),
}


@dataclass(frozen=True)
class PredictedImage:
    """An image with a prediction. `log_odds`, `truths`: by the name of the finding."""

    row: int
    id: str
    log_odds: Mapping[str, float]
    truths: Mapping[str, bool | None]


@dataclass(frozen=True)
class GalleryEntry:
    """An image to show with the maps of a finding; `cluster`, `prototype_method`: the cluster it is a prototype of."""

    row: int
    finding: str
    reason: str = ""
    cluster: int | None = None
    prototype_method: str = ""


@dataclass(frozen=True)
class GalleryMap:
    """A map of an image.

    `data_uri`: the map without its image, or with it if `includes_image`. `reason`: why the map is missing.
    `is_signed`: the map has positive and negative values and needs a pale image below.
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
    """An image with its maps; `missing_reason`: why the image is not shown.

    `cluster`: the cluster that the image is a prototype of, by the maps of the method `prototype_method`.
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
    """A section of the gallery: images of one kind."""

    kind: str
    finding: str
    images: tuple[GalleryImage, ...]


@dataclass(frozen=True)
class Gallery:
    """All gallery sections of a report."""

    sections: tuple[GallerySection, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a gallery from `as_dict`; digests stand in for the images, as after `replace_images_with_digests`."""
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
        """The texts and image digests of the gallery, for `gallery.json`."""
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
    """Replace each embedded image of a page by its digest."""
    return DATA_URI_PATTERN.sub(lambda match: _digest_data_uri(match[0]) or "", html)


def _digest_data_uri(data_uri: str | None) -> str | None:
    return None if data_uri is None else hashlib.sha256(data_uri.encode()).hexdigest()
