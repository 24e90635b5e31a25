"""Labels: the values that a mask holds, and which of them count. Several labels are never merged unless asked for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from camscope.errors import CategoryError

ALL: Final = "all"  # every category, together
MAX_NAMED: Final = 12  # categories that a message lists
HOW_TO_CHOOSE: Final = (
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
    def inside(self) -> NDArray[np.bool_]:
        """(*S): where there is any label; NaN is none."""
        return np.asarray((self.values != 0) & (self.values == self.values))

    def names(self, most: int | None = None) -> tuple[str, ...]:
        """The labels in order, or the first of them: `1`, `255`, or `#ff0000`."""
        inside = self.values[self.inside]
        if not inside.size:
            return ()
        low = inside.min()
        return tuple(map(self._name, [low] if low == inside.max() else np.unique(inside)[:most]))

    def having(self, categories: Iterable[str]) -> NDArray[np.bool_]:
        """(*S): where the label is one of these."""
        names = set(categories)
        wanted = [value for value in np.unique(self.values[self.inside]) if self._name(value) in names]
        return np.isin(self.values, wanted)

    def _name(self, value: Any) -> str:
        return f"#{int(value):06x}" if self.is_color else f"{float(value):.9g}"


@dataclass(frozen=True)
class LabelChoice:
    """Which labels of masks count: `categories` by name, `("all",)` for every one; none named: masks have one label each.

    `seen`: the one label that masks without a choice had so far. Masks with different labels are not merged, either.
    """

    categories: tuple[str, ...] = ()
    seen: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def mask(self, labels: LabelImage) -> NDArray[np.bool_]:
        """(*S): the pixels that count. CategoryError for several labels, where none was chosen."""
        if self.categories == (ALL,):
            return labels.inside
        if self.categories:
            return labels.having(map(_label_name, self.categories))
        names = labels.names()
        if len(names) > 1:
            raise CategoryError(f"the mask holds {listed(names)} and no label was chosen; {how_to_choose(names)}")
        if names and (first := self.seen.setdefault("label", names[0])) != names[0]:
            both = (first, names[0])
            raise CategoryError(f"masks hold different labels, {first} and {names[0]}; {how_to_choose(both)}")
        return labels.inside


def _label_name(name: str) -> str:
    """As labels are called here; CategoryError for what no label can be."""
    try:
        return name.lower() if name.startswith("#") and int(name[1:], 16) >= 0 else f"{float(name):.9g}"
    except ValueError:
        raise CategoryError(
            f"the category {name!r} of a mask; expected one of its labels, as 1, #ff0000 of a color, or all"
        ) from None


def chosen_names(categories: str | int | Iterable[str | int]) -> tuple[str, ...]:
    """A choice as it was given, as names, each once."""
    given = [categories] if isinstance(categories, str | int) else list(categories)
    return tuple(dict.fromkeys(str(name) for name in given))


def choose_categories(
    used: Sequence[str], chosen: Sequence[str], what: str, declared: Sequence[str] = ()
) -> tuple[str, ...]:
    """Those of the `used` categories that count; `declared`: names without an annotation.

    CategoryError for several without a choice, for an unknown name, and where no annotation has a chosen one.
    """
    names = tuple(dict.fromkeys(used))
    if not chosen and len(names) > 1:
        raise CategoryError(f"{what} has {listed(names, 'categories')} and none was chosen; {how_to_choose(names)}")
    if not chosen or (tuple(chosen) == (ALL,) and ALL not in names):
        return names
    if unknown := [name for name in chosen if name not in {*names, *declared}]:
        raise CategoryError(f"{what} has no category {unknown[0]!r}; there are {', '.join(names[:MAX_NAMED])}")
    counted = tuple(name for name in names if name in chosen)
    if not counted:
        raise CategoryError(f"{what} has no annotation of {', '.join(chosen)}; there are some of {', '.join(names)}")
    return counted


def listed(names: Sequence[str], what: str = "labels") -> str:
    """`2 labels (1, 2)`"""
    more = ", …" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {what} ({', '.join(names[:MAX_NAMED])}{more})"


def how_to_choose(names: Sequence[str]) -> str:
    """The ways to say which category counts, for a message."""
    return HOW_TO_CHOOSE.format(name=names[0])


def several_labels(values: NDArray[Any]) -> tuple[str, ...]:
    """The labels of an array that holds more than one; none for a mask of one region."""
    names = () if values.dtype == np.bool_ else LabelImage(values).names()
    return names if len(names) > 1 else ()
