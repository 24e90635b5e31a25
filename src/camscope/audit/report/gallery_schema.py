"""Shelves: the pictures of a report, and all that is said of them; what is said is also JSON, so that it can be checked."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

PICTURE = re.compile(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]*")


@dataclass(frozen=True)
class Kind:
    """What a shelf is called, and what is on it."""

    title: str
    words: str


KINDS: Mapping[str, Kind] = {
    "random": Kind("Drawn by the seed", "Of all images that have an answer, in the order in which they were drawn."),
    "missed": Kind("Missed", "Images with the finding whose probability is below a half, the lowest first."),
    "alarms": Kind("False alarms", "Images without the finding whose probability is above a half, the highest first."),
    "borderline": Kind("On the border", "Images whose probability is nearest to a half."),
    "clearest": Kind(
        "Clearest", "Images with the finding whose probability is above a half, the highest first, to compare."
    ),
    "reading": Kind("To be read", "Images that the audit asks somebody to look at, each with its reason."),
    "prototypes": Kind("Prototypes", "The most typical images of each group of maps."),
}


@dataclass(frozen=True)
class Case:
    """An image that has an answer. `odds`, `truths`: by the name of the finding."""

    row: int
    id: str
    odds: Mapping[str, float]
    truths: Mapping[str, bool | None]


@dataclass(frozen=True)
class Frame:
    """An image that is to be shown, asked for a finding. `cluster`, `method`: whose prototype it is."""

    row: int
    finding: str
    why: str = ""
    cluster: int | None = None
    method: str = ""


@dataclass(frozen=True)
class Layer:
    """A map of an image. `picture`: a data URI, of the map alone; `whole`: with its image in it; `reason`: why there is none.

    `signed`: with colours for and against, which need a pale image below.
    """

    method: str
    picture: str | None = None
    whole: bool = False
    signed: bool = False
    flag: str = ""
    reason: str = ""
    words: str = "The map"


@dataclass(frozen=True)
class Shot:
    """An image with its maps. `photo`: a data URI; `missing`: why it is not shown; `odds`: what the model says.

    `cluster`: the group that it is typical of, by the maps of the method `grouped_by`.
    """

    id: str
    finding: str
    truth: str
    odds: float | None
    layers: tuple[Layer, ...]
    photo: str | None = None
    missing: str = ""
    why: str = ""
    cluster: int | None = None
    grouped_by: str = ""


@dataclass(frozen=True)
class Shelf:
    """Images of one kind."""

    kind: str
    finding: str
    shots: tuple[Shot, ...]


@dataclass(frozen=True)
class Pictures:
    """All shelves of a report."""

    shelves: tuple[Shelf, ...]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """What `plain` said: with the digest of each picture in its place, as `unpictured` leaves them on a page."""
        return cls(
            tuple(
                Shelf(one["kind"], one["finding"], tuple(_shot(shot) for shot in one["shots"]))
                for one in plain["shelves"]
            )
        )

    @property
    def plain(self) -> dict[str, Any]:
        """What is said of the pictures, and of each its digest, for `gallery.json`."""
        return {
            "shelves": [
                {"kind": shelf.kind, "finding": shelf.finding, "shots": [_said(one) for one in shelf.shots]}
                for shelf in self.shelves
            ]
        }


def _said(one: Shot) -> dict[str, Any]:
    return {
        "id": one.id,
        "finding": one.finding,
        "truth": one.truth,
        "odds": one.odds,
        "why": one.why,
        "cluster": one.cluster,
        "grouped_by": one.grouped_by,
        "missing": one.missing,
        "photo": _digest(one.photo),
        "maps": [{**vars(each), "picture": _digest(each.picture)} for each in one.layers],
    }


def _shot(plain: Mapping[str, Any]) -> Shot:
    return Shot(
        layers=tuple(Layer(**one) for one in plain["maps"]),
        **{name: value for name, value in plain.items() if name != "maps"},
    )


def unpictured(html: str) -> str:
    """A page with the digest of each picture in its place."""
    return PICTURE.sub(lambda found: _digest(found[0]) or "", html)


def _digest(picture: str | None) -> str | None:
    return None if picture is None else hashlib.sha256(picture.encode()).hexdigest()
