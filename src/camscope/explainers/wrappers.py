"""Wrappers: what goes with any method is an explainer round an explainer, and they nest.

Augmented(Denoised(GradCAM(model, "layer4")), flips=True, scales=(0.75, 1.0, 1.25)).explain("cat.jpg", 281)
Contrast(LayerCAM(model, "layer3"), "tabby", "lynx").explain("cat.jpg")
"""

import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from camscope.errors import InputError, TargetError
from camscope.explainers.base import Explainer, Maps
from camscope.explainers.cam import WeightedChannels
from camscope.explainers.features import Features
from camscope.explainers.grids import on_grid, resized
from camscope.explainers.principal import first_component
from camscope.hooks.base import unwrap
from camscope.targets import Difference, Question, Score


class Wrapper(Explainer):
    """An explainer made of others, whose model, preprocessing, mode and precision it keeps. A wrapper writes `maps`."""

    paper: ClassVar[str] = ""  # that of what is inside
    inner: tuple[Explainer, ...]

    def __init__(self, *inner: Explainer) -> None:
        for one in inner:
            if not isinstance(one, Explainer):
                raise InputError(
                    f"{type(self).__name__} goes round an explainer, as GradCAM(model); {one!r:.80} came instead"
                )
        first, self.inner = inner[0], inner
        for one in inner[1:]:
            if unwrap(one.model) is not unwrap(first.model):
                raise InputError(f"{first!r} and {one!r} are not of one model")
            if (one.mode, one.precision) != (first.mode, first.precision):
                raise InputError(f"{first!r} and {one!r} differ in mode or precision")
        super().__init__(
            first.model,
            preprocess=first.preprocess,
            categories=first.categories,
            mode=first.mode,
            on_nonfinite=first.on_nonfinite,
            precision=first.precision,
        )

    @abstractmethod
    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """(N,C,*S) -> a map of each score, made of the inner ones."""

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*s): see `maps`."""
        return self.maps(x, [score])[0].heat

    @property
    def title(self) -> str:
        """`gradcam, denoised`."""
        return f"{' + '.join(dict.fromkeys(one.title for one in self.inner))}, {self.name}"

    @property
    def takes_gradients(self) -> bool:
        """Whether an inner one does."""
        return any(one.takes_gradients for one in self.inner)

    def asked(self, target: Question) -> Question:
        """The question as the inner ones put it, which must be one."""
        questions = [one.asked(target) for one in self.inner]
        for one, question in zip(self.inner, questions, strict=True):
            same = isinstance(question, Difference) and question == questions[0]
            if question is not questions[0] and not same:
                raise InputError(f"{self.inner[0]!r} and {one!r} ask different questions: {self.name} needs one")
        return questions[0]

    def sibling(self, method: str | type[Explainer]) -> Explainer:
        """The same wrapper round another method."""
        return self._round([one.sibling(method) for one in self.inner])

    def _round(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner[0], **self._own)

    @property
    def _own(self) -> dict[str, Any]:
        """The wrapper's own settings: all but the first argument, which is what is inside."""
        return {name: getattr(self, name) for name in list(signature(type(self)).parameters)[1:]}

    def __repr__(self) -> str:
        inside = repr(self.inner[0]) if len(self.inner) == 1 else repr(list(self.inner))
        usual = {name: one.default for name, one in signature(type(self)).parameters.items()}
        changed = [f"{name}={value!r}" for name, value in self._own.items() if value != usual[name]]
        return f"{type(self).__name__}({', '.join([inside, *changed])})"


class Augmented(Wrapper):
    """The mean of the raw maps of the input, flipped and scaled, each carried back to where it belongs.

    `flips`: True, the last spatial axis; an axis or several (0 is the first spatial one), in every combination; False.
    `scales`: factors of the input's size, linear, antialiased where it shrinks; the model must take such sizes. Each
    flip comes at each scale. The plain input always counts, comes first and fixes the class; maps of other scales are
    interpolated linearly onto its grid. What else the model is given stays as it is.
    """

    name = "augmented"

    def __init__(
        self, explainer: Explainer, flips: bool | int | Sequence[int] = True, scales: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__(explainer)
        self.explainer, self.flips, self.scales = explainer, flips, tuple(scales)
        for scale in self.scales:
            if not (math.isfinite(scale) and scale > 0):
                raise InputError(f"scales={self.scales}: expected factors above 0, e.g. (0.75, 1.0, 1.25)")

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The mean over all views."""
        views = self._views(x.ndim - 2)
        made = [self.explainer.maps(x, scores)]
        for scale, axes in views:
            size = [max(1, round(scale * pixels)) for pixels in x.shape[2:]]
            there = self.explainer.maps(resized(x.flip([axis + 2 for axis in axes]), size), scores)
            made.append([_carried_back(one, axes, plain) for one, plain in zip(there, made[0], strict=True)])
        return [_mean([row[i] for row in made]) for i in range(len(scores))]

    def _views(self, rank: int) -> list[tuple[float, tuple[int, ...]]]:
        """Scale and flipped axes of every view but the plain one."""
        if isinstance(self.flips, bool):
            axes = {rank - 1} if self.flips else set()
        else:
            given = [self.flips] if isinstance(self.flips, int) else list(self.flips)
            if not all(-rank <= axis < rank for axis in given):
                raise InputError(f"flips={self.flips!r}: the input's spatial axes are 0..{rank - 1}")
            axes = {axis % rank for axis in given}
        every = [flipped for count in range(len(axes) + 1) for flipped in itertools.combinations(sorted(axes), count)]
        return list(itertools.product(dict.fromkeys((1.0, *map(float, self.scales))), every))[1:]


class Denoised(Wrapper):
    """The part of Σ_k of the channels' contributions that lies along their first principal component.

    A map (N,cells) is summed of contributions (N,K,cells); of the sum only its projection on their first right singular
    vector is kept, not centred, and the ReLU follows where the method has one. In score units; channels that all say the
    same leave the sum as it is. A method that has one map only is its own first component: it is handed on, and a note
    says so.
    """

    name = "denoised"

    def __init__(self, explainer: Explainer) -> None:
        super().__init__(explainer)
        self.explainer = explainer

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The inner method's passes, combined in another way."""
        method = self.explainer
        while isinstance(method, Contrast):  # it only asks another question
            method = method.explainer
        if not isinstance(method, WeightedChannels):
            said = f"{method.title} makes one map, which is its own first component: nothing was denoised"
            return [replace(one, notes=(*one.notes, said)) for one in method.maps(x, scores)]
        principal = copy.copy(method)
        vars(principal)["combine"] = partial(_principal, method)  # of this copy alone; its passes are the method's
        return principal.maps(x, scores)


class Contrast(Wrapper):
    """Why `a` rather than `b`: the map of the difference of their scores. It takes no other target."""

    name = "contrast"

    def __init__(self, explainer: Explainer, a: int | str, b: int | str) -> None:
        super().__init__(explainer)
        self.explainer, self.a, self.b = explainer, a, b
        self._question = Difference(a, b)

    def asked(self, target: Question) -> Question:
        """The difference."""
        if target is not None:
            raise TargetError(
                f"Contrast asks why {self.a!r} rather than {self.b!r} and takes no other target; {target!r:.80} came"
            )
        return self.explainer.asked(self._question)

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The inner method's."""
        return self.explainer.maps(x, scores)


def _carried_back(maps: Maps, axes: Sequence[int], plain: Maps) -> Maps:
    heat = maps.heat.flip([axis + 1 for axis in axes])
    return replace(maps, heat=on_grid(heat, plain.heat.shape[1:]))


def _mean(made: Sequence[Maps]) -> Maps:
    heat = made[0].heat.clone()
    for one in made[1:]:
        heat += one.heat
    zeros = [one.zero_gradient for one in made if one.zero_gradient is not None]
    zero = torch.stack(zeros).all(0) if len(zeros) == len(made) else None
    notes = dict.fromkeys(note for one in made for note in one.notes)
    return replace(made[0], heat=heat / len(made), zero_gradient=zero, notes=(*notes, f"the mean of {len(made)} views"))


def _principal(method: WeightedChannels, features: Features) -> Tensor:
    """(N,*s): the sum's projection on the first component's direction, and the method's ReLU."""
    parts = method.contributions(features)
    total, component = parts.sum(1), first_component(parts)
    size = component.abs().amax(1, keepdim=True)
    along = torch.where(size > 0, component / size, 0)  # at 1, where a square neither vanishes nor overflows
    length = along.square().sum(1, keepdim=True)
    share = torch.where(length > 0, (total * along).sum(1, keepdim=True) / length, 0)
    cells = share * along
    return (cells.relu() if method.relu else cells).view(len(cells), *features.activation.shape[2:])
