"""Labels: the values that a mask holds, and which of them count. Several labels are never merged unless asked for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.errors import CategoryError

ALL_LABELS: Final = "all"  # every category, together
MAX_LISTED_NAMES: Final = 12  # categories that a message lists
CHOICE_HINT: Final = (
    'choose: {{ file = …, category = "{name}" }} in the config of an audit, --category {name} on the command line, '
    'categories=["{name}"] in Python; "all" merges them'
)


@dataclass(frozen=True)
class LabelImage:
    """(*S) labels of pixels or voxels, 0 outside. `is_color`: labels are colors, 0xRRGGBB, and black is outside."""

    values: NDArray[Any]
    is_color: bool = False

    @classmethod
    def from_colors(cls, pixels: NDArray[Any]) -> "LabelImage":
        """(*S,3) uint8; an image without colors has its gray levels as labels."""
        first = pixels[..., 0]
        if all(np.array_equal(first, pixels[..., channel]) for channel in (1, 2)):
            return cls(first)
        return cls(pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32), is_color=True)

    @property
    def foreground(self) -> NDArray[np.bool_]:
        """(*S): where there is any label; NaN is none."""
        return np.asarray((self.values != 0) & (self.values == self.values))

    def label_names(self, most: int | None = None) -> tuple[str, ...]:
        """The labels in order, or the first of them: `1`, `255`, or `#ff0000`."""
        inside = self.values[self.foreground]
        if not inside.size:
            return ()
        low = inside.min()
        return tuple(map(self._format_label, [low] if low == inside.max() else np.unique(inside)[:most]))

    def mask_of_labels(self, labels: Iterable[str]) -> NDArray[np.bool_]:
        """(*S): where the label is one of these."""
        names = set(labels)
        values = [value for value in np.unique(self.values[self.foreground]) if self._format_label(value) in names]
        return np.isin(self.values, values)

    def _format_label(self, value: Any) -> str:
        return f"#{int(value):06x}" if self.is_color else f"{float(value):.9g}"


@dataclass(frozen=True)
class LabelChoice:
    """Which labels of masks count: `categories` by name, `("all",)` for every one; none named: masks have one label each.

    `first_label`: the one label that masks without a choice had so far. Masks with different labels are not merged, either.
    """

    categories: tuple[str, ...] = ()
    first_label: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def select_mask(self, label_image: LabelImage) -> NDArray[np.bool_]:
        """(*S): the pixels that count. CategoryError for several labels, where none was chosen."""
        if self.categories == (ALL_LABELS,):
            return label_image.foreground
        if self.categories:
            return label_image.mask_of_labels(map(_normalize_label, self.categories))
        names = label_image.label_names()
        if len(names) > 1:
            raise CategoryError(
                f"the mask holds {format_name_list(names)} and no label was chosen; {format_choice_hint(names)}"
            )
        if names and (first := self.first_label.setdefault("label", names[0])) != names[0]:
            both = (first, names[0])
            raise CategoryError(f"masks hold different labels, {first} and {names[0]}; {format_choice_hint(both)}")
        return label_image.foreground


def _normalize_label(name: str) -> str:
    """As labels are called here; CategoryError for what no label can be."""
    try:
        return name.lower() if name.startswith("#") and int(name[1:], 16) >= 0 else f"{float(name):.9g}"
    except ValueError:
        raise CategoryError(
            f"the category {name!r} of a mask; expected one of its labels, as 1, #ff0000 of a color, or all"
        ) from None


def parse_categories(categories: str | int | Iterable[str | int]) -> tuple[str, ...]:
    """A choice as it was given, as names, each once."""
    names = [categories] if isinstance(categories, str | int) else list(categories)
    return tuple(dict.fromkeys(str(name) for name in names))


def choose_categories(
    annotated: Sequence[str], chosen: Sequence[str], source: str, declared: Sequence[str] = ()
) -> tuple[str, ...]:
    """Those of the `annotated` categories that count; `declared`: names without an annotation.

    CategoryError for several without a choice, for an unknown name, and where no annotation has a chosen one.
    """
    names = tuple(dict.fromkeys(annotated))
    if not chosen and len(names) > 1:
        raise CategoryError(
            f"{source} has {format_name_list(names, 'categories')} and none was chosen; {format_choice_hint(names)}"
        )
    if not chosen or (tuple(chosen) == (ALL_LABELS,) and ALL_LABELS not in names):
        return names
    if unknown := [name for name in chosen if name not in {*names, *declared}]:
        raise CategoryError(f"{source} has no category {unknown[0]!r}; there are {', '.join(names[:MAX_LISTED_NAMES])}")
    counted = tuple(name for name in names if name in chosen)
    if not counted:
        raise CategoryError(f"{source} has no annotation of {', '.join(chosen)}; there are some of {', '.join(names)}")
    return counted


def format_name_list(names: Sequence[str], noun: str = "labels") -> str:
    """`2 labels (1, 2)`"""
    more = ", …" if len(names) > MAX_LISTED_NAMES else ""
    return f"{len(names)} {noun} ({', '.join(names[:MAX_LISTED_NAMES])}{more})"


def format_choice_hint(names: Sequence[str]) -> str:
    """The ways to say which category counts, for a message."""
    return CHOICE_HINT.format(name=names[0])


def find_multiple_labels(values: NDArray[Any]) -> tuple[str, ...]:
    """The labels of an array that holds more than one; none for a mask of one region."""
    names = () if values.dtype == np.bool_ else LabelImage(values).label_names()
    return names if len(names) > 1 else ()
