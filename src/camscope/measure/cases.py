"""Cases: an image of a run asked one question, with the maps that answer it; and many of them as the tensors of a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import UndefinedError
from camscope.explainers import Explainer
from camscope.explainers.scope import Mode
from camscope.geometry import Placement
from camscope.measure.again import Again, key_of
from camscope.measure.form import Row, of_control
from camscope.measure.maps import FLOORS, floors
from camscope.metrics.probe import Probe
from camscope.targets import Question

Slot = tuple[str, int]  # a method with its settings, and which of those that are alike
Maker = Callable[[Tensor], Tensor]  # other images of a batch (N,C,*S) -> their maps (N,*S)


@dataclass
class Case:
    """An image asked one question, and the rows of its maps. `x` (C,*S): as it enters the model; None: `reason`, why not.

    `last`: whether its image has no further case.
    """

    x: Tensor | None
    question: Question = None
    mode: Mode = "eval"
    call_settings: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[Slot, Row] = field(default_factory=dict)
    reason: str = ""
    last: bool = False

    @property
    def kind(self) -> object:
        """Cases of one kind share their passes."""
        return None if self.x is None else (tuple(self.x.shape), self.mode)

    @property
    def first(self) -> Row:
        """A row of it."""
        return next(iter(self.rows.values()))


@dataclass(frozen=True)
class Judged:
    """A map of each case: `heat` (N,*S) in score units on the model's input, and its row; None and NaN where there is none.

    `ties`: a seed for each, its image's number; `maps_of`: the maps that the same method makes of other images, if that can
    be had.
    """

    heat: Tensor
    rows: Sequence[Row | None]
    ties: Sequence[int]
    maps_of: Maker | None
    control: bool = False


def cases_of(again: Again, rows: Sequence[Row]) -> list[Case]:
    """Of one image; what has no map, or no image any more, is a case without one."""
    found: dict[object, Case] = {}
    lost: list[Case] = []
    x: Tensor | None = None
    for row in rows:
        mode, key = again.mode(row), key_of(row)
        try:
            if row["heat"] is None:
                raise UndefinedError(f"no map: {row['error']}")
            x = again.image(row) if x is None else x
            case = found.setdefault((row["target"], mode), Case(x, again.question(row), mode, again.call_settings(row)))
            case.rows[key, sum(key == name for name, _ in case.rows)] = row
        except UndefinedError as error:
            lost.append(Case(None, rows={(key, 0): row}, reason=str(error)))
    made = [*lost, *found.values()]
    made[-1].last = True
    return made


def stored(
    again: Again, cases: Sequence[Case], x: Tensor, questions: Any, tools: Mapping[str, Explainer]
) -> Iterator[Judged]:
    """The maps that the run holds of x (N,C,*S), method by method."""
    none = np.full(x.shape[2:], np.nan)
    for slot in dict.fromkeys(slot for case in cases for slot in case.rows):
        rows = [case.rows.get(slot) for case in cases]
        maps = [none if row is None else again.run.explanation(row).heatmap("input", scale=None) for row in rows]
        tool = tools.get(slot[0])
        maps_of = None if tool is None else _maker(tool, x, questions)
        yield Judged(torch.from_numpy(np.stack(maps)), rows, numbers_of(cases), maps_of)


def blind(again: Again, cases: Sequence[Case], x: Tensor) -> Iterator[Judged]:
    """Maps of x (N,C,*S) that know nothing of the model."""
    about = [again.run.explanation(case.first) for case in cases]

    def named(name: str) -> Maker:
        return lambda images: torch.from_numpy(
            np.stack([floors(image, one)[name] for image, one in zip(images, about, strict=True)])
        )

    for name in FLOORS:
        rows = [of_control(case.first, name) for case in cases]
        yield Judged(named(name)(x), rows, numbers_of(cases), named(name), control=True)


def numbers_of(cases: Sequence[Case]) -> list[int]:
    """Of the images of cases, in the run."""
    return [case.first["row"] for case in cases]


def _maker(tool: Explainer, x: Tensor, questions: Any) -> Maker:
    """The maps of other images, asked about the classes of x, on the model's input."""

    def maps(images: Tensor) -> Tensor:
        made = Probe.of(tool, x, questions).maps(images, range(len(images)))
        place = Placement.identity(tuple(images.shape[2:]))
        return torch.from_numpy(np.stack([place.project(one)[0] for one in made]))

    return maps
