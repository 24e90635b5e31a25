"""Labels of masks: find the values in a mask, and choose the labels that belong to the region."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.errors import CategoryError

ALL_LABELS: Final = "all"  # every category, together
MAX_LISTED_NAMES: Final = 12  # categories that a message lists
CHOICE_HINT: Final = (
    'choose: {{ file = …, category = "{name}" }} in the config of an audit, --category {option} on the command line, '
    'categories=["{name}"] in Python; "all" merges them'
)


@dataclass(frozen=True)
class LabelImage:
    """The label (*S) of each pixel or voxel of a mask. 0 is outside the region.

    With `is_color`, a label is a color 0xRRGGBB, and black is outside.
    """

    values: NDArray[Any]
    is_color: bool = False

    @classmethod
    def from_colors(cls, pixels: NDArray[Any]) -> "LabelImage":
        """Create labels from an RGB image (*S,3). If the image is gray, the gray levels are the labels."""
        first = pixels[..., 0]
        if all(np.array_equal(first, pixels[..., channel]) for channel in (1, 2)):
            return cls(first)
        return cls(pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32), is_color=True)

    @property
    def foreground(self) -> NDArray[np.bool_]:
        """A mask (*S) of the pixels that have a label."""
        return np.asarray((self.values != 0) & (self.values == self.values))

    def label_names(self, max_names: int | None = None) -> tuple[str, ...]:
        """Return the names of the labels in sorted order, such as `1`, `255` or `#ff0000`. Return at most `max_names` names."""
        inside = self.values[self.foreground]
        if not inside.size:
            return ()
        low = inside.min()
        return tuple(map(self._format_label, [low] if low == inside.max() else np.unique(inside)[:max_names]))

    def mask_of_labels(self, labels: Iterable[str]) -> NDArray[np.bool_]:
        """Return a mask (*S) of the pixels whose label is in `names`."""
        names = set(labels)
        values = [value for value in np.unique(self.values[self.foreground]) if self._format_label(value) in names]
        return np.isin(self.values, values)

    def _format_label(self, value: Any) -> str:
        return f"#{int(value):06x}" if self.is_color else f"{float(value):.9g}"


@dataclass(frozen=True)
class LabelChoice:
    """The labels that belong to the region: `categories` by name, or `("all",)` for all labels.

    Without categories, each mask must have one label. `first_label` records that label, because all masks must have the
    same one.
    """

    categories: tuple[str, ...] = ()
    first_label: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def select_mask(self, label_image: LabelImage) -> NDArray[np.bool_]:
        """Return a mask (*S) of the pixels with the chosen labels. Raise CategoryError if a chosen label is missing."""
        if self.categories == (ALL_LABELS,):
            return label_image.foreground
        if self.categories:
            return label_image.mask_of_labels(map(_standardize_label_or_color, self.categories))
        names = label_image.label_names()
        if len(names) > 1:
            raise CategoryError(
                f"the mask holds {format_count_and_names(names)}, but no label was chosen; {format_category_hint(names)}"
            )
        if names and (first := self.first_label.setdefault("label", names[0])) != names[0]:
            both = (first, names[0])
            raise CategoryError(f"masks hold different labels, {first} and {names[0]}; {format_category_hint(both)}")
        return label_image.foreground


def _standardize_label_or_color(name: str) -> str:
    """Convert the name of a label to its standard spelling. Raise CategoryError for an invalid label."""
    try:
        return name.lower() if name.startswith("#") and int(name[1:], 16) >= 0 else f"{float(name):.9g}"
    except ValueError:
        raise CategoryError(
            f"the category of a mask is {name!r}; expected a label such as 1, a color such as #ff0000, or all"
        ) from None


def parse_categories(categories: str | int | Iterable[str | int]) -> tuple[str, ...]:
    """Return the names of the chosen categories without duplicates."""
    names = [categories] if isinstance(categories, str | int) else list(categories)
    return tuple(dict.fromkeys(str(name) for name in names))


def choose_categories(
    annotated: Sequence[str], chosen: Sequence[str], source: str, declared: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return those annotated categories that the user chose. `declared` holds more names that are valid.

    Raises CategoryError if several categories have no choice, if a name is unknown, or if no annotation has a chosen
    category.
    """
    names = tuple(dict.fromkeys(annotated))
    if not chosen and len(names) > 1:
        raise CategoryError(
            f"{source} has {format_count_and_names(names, 'categories')}, but none was chosen; {format_category_hint(names)}"
        )
    if not chosen or (tuple(chosen) == (ALL_LABELS,) and ALL_LABELS not in names):
        return names
    if unknown := [name for name in chosen if name not in {*names, *declared}]:
        raise CategoryError(f"{source} has no category {unknown[0]!r}; available: {format_first_names(names)}")
    counted = tuple(name for name in names if name in chosen)
    if not counted:
        raise CategoryError(f"{source} has no annotation of {', '.join(chosen)}; annotated: {', '.join(names)}")
    return counted


def format_count_and_names(names: Sequence[str], noun: str = "labels") -> str:
    """Format names together with their count, such as `2 labels (1, 2)`."""
    ellipsis = ", …" if len(names) > MAX_LISTED_NAMES else ""
    return f"{len(names)} {noun} ({format_first_names(names)}{ellipsis})"


def format_first_names(names: Sequence[str]) -> str:
    """Join the first few names with commas. Put a name with a comma in double quotes, as command options expect it."""
    return ", ".join(f'"{name}"' if "," in name else name for name in names[:MAX_LISTED_NAMES])


def format_category_hint(names: Sequence[str]) -> str:
    """Return the part of an error message about how to choose a category."""
    name = names[0]
    option = f"'\"{name}\"'" if "," in name else shlex.quote(name)
    return CHOICE_HINT.format(name=name, option=option)


def find_multiple_labels(values: NDArray[Any]) -> tuple[str, ...]:
    """Return the names of the labels of a mask if there are several. Return an empty tuple if there is one."""
    names = () if values.dtype == np.bool_ else LabelImage(values).label_names()
    return names if len(names) > 1 else ()
