"""Wrappers: what goes with any method is an explainer round an explainer, and they nest.

Augmented(Denoised(GradCAM(model, "layer4")), flips=True, scales=(0.75, 1.25)).explain("cat.jpg", 281)
Contrast(LayerCAM(model, "layer3"), "tabby", "lynx").explain("cat.jpg")

Wrapper: what every explainer shares that is made of others.
Contrast: why one class rather than another.
Denoised: what most channels agree on.
Augmented: the mean over flips and scales of the input.
"""

import copy
import itertools
import math
import numbers
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from camscope.errors import CamscopeError, InputError, TargetError
from camscope.explainers.cam.base import BaseWeightedChannels
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.dispatch import check_compatible_explainers, compute_group_maps
from camscope.explainers.core.linalg import project_on_first_component
from camscope.explainers.core.maps import AttributionMaps, merge_maps
from camscope.explainers.core.method import BaseMethod
from camscope.explainers.core.resampling import resize_input, resize_maps
from camscope.hooks.base import unwrap
from camscope.plurals import plural
from camscope.targets import Difference, Score, TargetLike


class Wrapper(Explainer):
    """An explainer made of others, whose model, preprocessing, mode and precision it keeps. A wrapper writes `compute_maps`."""

    paper: ClassVar[str] = ""  # that of what is inside
    inner: tuple[Explainer, ...]

    def __init__(self, *inner: Explainer) -> None:
        for one in inner:
            if not isinstance(one, Explainer):
                raise InputError(
                    f"{type(self).__name__} goes round an explainer, as GradCAM(model); {one!r:.80} came instead"
                )
        check_compatible_explainers(inner)
        first, self.inner = inner[0], inner
        for one in inner[1:]:
            if (one.mode, one.precision, one.call_settings) != (first.mode, first.precision, first.call_settings):
                raise InputError(f"{first!r} and {one!r} differ in mode, precision, input_key or frames_first")
        super().__init__(
            first.model,
            preprocess=first.preprocess,
            class_names=first.class_names,
            mode=first.mode,
            on_nonfinite=first.on_nonfinite,
            precision=first.precision,
            **first.call_settings,
        )

    @abstractmethod
    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """(N,C,*S) -> a map of each score, made of the inner ones."""

    def resolve(self, x: Tensor, score: Score) -> Self:
        """The same wrapper round inner ones that have chosen for this input."""
        return self._rewrap([one.resolve(x, score) for one in self.inner])

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*s): see `compute_maps`."""
        return self.compute_maps(x, [score])[0].attribution

    @property
    def setting_names(self) -> frozenset[str]:
        """Those of the inner ones, too."""
        return super().setting_names.union(*(one.setting_names for one in self.inner))

    def with_settings(self, **settings: Any) -> Self:
        """The same wrapper round inner ones with other settings, each with those that it has."""
        return self._rewrap(
            [
                one.with_settings(**{name: value for name, value in settings.items() if name in one.setting_names})
                for one in self.inner
            ]
        )

    @property
    def full_name(self) -> str:
        """`gradcam, denoised`."""
        return f"{' + '.join(dict.fromkeys(one.full_name for one in self.inner))}, {self.name}"

    @property
    def uses_gradients(self) -> bool:
        """Whether an inner one does."""
        return any(one.uses_gradients for one in self.inner)

    @property
    def accepts_integer_input(self) -> bool:
        """Whether all inner ones do."""
        return all(one.accepts_integer_input for one in self.inner)

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """The question as the inner ones put it, which must be one."""
        questions = [one.resolve_target(target) for one in self.inner]
        for one, question in zip(self.inner, questions, strict=True):
            same = isinstance(question, Difference) and question == questions[0]
            if question is not questions[0] and not same:
                raise InputError(f"{self.inner[0]!r} and {one!r} ask different questions: {self.name} needs one")
        return questions[0]

    def create_sibling(self, method: str | type[Explainer]) -> Explainer:
        """The same wrapper round another method."""
        return self._rewrap([one.create_sibling(method) for one in self.inner])

    def _rewrap(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner[0], **self._wrapper_settings)

    @property
    def _wrapper_settings(self) -> dict[str, Any]:
        """The wrapper's own settings: all but the first argument, which is what is inside."""
        return {name: getattr(self, name) for name in list(signature(type(self)).parameters)[1:]}

    def __repr__(self) -> str:
        inside = repr(self.inner[0]) if len(self.inner) == 1 else repr(list(self.inner))
        usual = {name: one.default for name, one in signature(type(self)).parameters.items()}
        changed = [f"{name}={value!r}" for name, value in self._wrapper_settings.items() if value != usual[name]]
        return f"{type(self).__name__}({', '.join([inside, *changed])})"


class Contrast(Wrapper):
    """Why `a` rather than `b`: the map of the difference of their scores. It takes no other target."""

    name = "contrast"

    def __init__(self, explainer: Explainer, a: int | str, b: int | str) -> None:
        super().__init__(explainer)
        self.explainer, self.a, self.b = explainer, a, b
        self._target = Difference(a, b)

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """The difference."""
        if target is not None:
            raise TargetError(
                f"Contrast asks why {self.a!r} rather than {self.b!r} and takes no other target; {target!r:.80} came"
            )
        return self.explainer.resolve_target(self._target)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """The inner method's."""
        return self.explainer.compute_maps(x, scores)


class Denoised(Wrapper):
    """The part of Σ_k of the channels' contributions that lies along their first principal component.

    A map (N,cells) is summed of contributions (N,K,cells); of the sum only its projection on their first right singular
    vector is kept, not centred, and the ReLU follows where the method has one. In score units; channels that all say the
    same leave the sum as it is. Round another wrapper it goes round what that is round: Denoised(Augmented(x)) is
    Augmented(Denoised(x)). A method that has one map only is its own first component: it is handed on, and a note says so.
    """

    name = "denoised"

    def __init__(self, explainer: Explainer) -> None:
        super().__init__(explainer)
        self.explainer = explainer

    @property
    def share_key(self) -> Hashable:
        """Methods that share passes share them denoised."""
        return (Denoised, self.explainer.share_key) if isinstance(self.explainer, BaseWeightedChannels) else id(self)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps]]:
        """[method][score]: the inner methods' passes, combined in another way."""
        inner = [tool.explainer for tool in explainers if isinstance(tool, Denoised)]
        if not all(isinstance(one, BaseWeightedChannels) for one in inner):
            return [tool.compute_maps(x, scores) for tool in explainers]
        return compute_group_maps(
            [_copy_with_denoised_combine(one) for one in inner if isinstance(one, BaseWeightedChannels)], x, scores
        )

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Of a wrapper, those that it makes of its inner ones, denoised."""
        inner = self.explainer
        if isinstance(inner, BaseWeightedChannels):
            return list(self.compute_shared_maps([self], x, scores)[0])
        if isinstance(inner, Wrapper):
            round_it = inner if isinstance(inner, Denoised) else inner._rewrap([Denoised(one) for one in inner.inner])
            return round_it.compute_maps(x, scores)
        said = f"{inner.full_name} makes one map, which is its own first component: nothing was denoised"
        return [replace(one, notes=(*one.notes, said)) for one in inner.compute_maps(x, scores)]


def _copy_with_denoised_combine(method: BaseWeightedChannels) -> BaseWeightedChannels:
    """A copy that combines in another way; its passes are the method's."""
    principal = copy.copy(method)
    vars(principal)["combine"] = partial(_combine_along_principal_component, method)
    return principal


def _combine_along_principal_component(method: BaseWeightedChannels, features: LayerFeatures) -> Tensor:
    """(N,*s): the sum's projection on the first component's direction, and the method's ReLU."""
    parts = method.contributions(features)
    total, component = parts.sum(1), project_on_first_component(parts)
    size = component.abs().amax(1, keepdim=True)
    along = torch.where(size > 0, component / size, 0)  # at 1, where a square neither vanishes nor overflows
    length = along.square().sum(1, keepdim=True)
    share = torch.where(length > 0, (total * along).sum(1, keepdim=True) / length, 0)
    cells = share * along
    return (cells.relu() if method.relu else cells).view(len(cells), *features.activation.shape[2:])


class Augmented(Wrapper):
    """The mean of the raw maps of the input, flipped and scaled, each carried back to where it belongs.

    `flips`: True, the last spatial axis; an axis or several (0 is the first spatial one), in every combination; False.
    `scales`: factors of the input's size, linear, antialiased where it shrinks; the model must take such sizes. Each
    flip comes at each scale. The plain input always counts, comes first and fixes the class; a Region or a Box is asked
    for where the view shows it, a function of the output as it is. Maps of other scales are interpolated linearly onto
    the plain input's grid. How large a map is may depend on how many cells it has, by the method: so each scale's maps
    are multiplied by the one number that gives them, over all flips, the mean size of the input's own scale; of flips
    alone it is the exact mean. A layer that is not named is chosen for the plain input, and serves all views. What else
    the model is given stays as it is.
    """

    name = "augmented"

    def __init__(
        self, explainer: Explainer, flips: bool | int | Sequence[int] = True, scales: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__(explainer)
        if not _is_sequence_of(scales, numbers.Real) or not all(math.isfinite(scale) and scale > 0 for scale in scales):
            raise InputError(f"scales={scales!r}: expected several factors above 0, e.g. (0.75, 1.0, 1.25)")
        if not isinstance(flips, bool | int) and not _is_sequence_of(flips, int):
            raise InputError(f"flips={flips!r}: expected True, False, or spatial axes, e.g. 0 or (0, 1)")
        self.explainer, self.flips, self.scales = explainer, flips, tuple(scales)

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the inner one does, and no view is interpolated."""
        return super().accepts_integer_input and set(self.scales) == {1.0}

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """The mean over all views."""
        if len(scores) > 1 and any(callable(score.target) for score in scores):  # each has a layer of its own
            return [self.compute_maps(x, [score])[0] for score in scores]
        plain = self.explainer.compute_maps(x, scores)
        flips, tool = self._list_flip_axes(x.ndim - 2), self.explainer.resolve(x, scores[0])
        rounds = []
        for scale in dict.fromkeys((1.0, *map(float, self.scales))):
            size = [max(1, round(scale * pixels)) for pixels in x.shape[2:]]
            views = [plain] if scale == 1 else []
            for axes in flips[len(views) :]:
                asked = [score.flipped(axes, size) for score in scores]
                there = _compute_maps_at_scale(
                    scale, tool, resize_input(x.flip([axis + 2 for axis in axes]), size), asked
                )
                views.append([_undo_flip(one, axes, own) for one, own in zip(there, plain, strict=True)])
            rounds.append(views)
        return [_average_views([[row[i] for row in views] for views in rounds]) for i in range(len(scores))]

    def _list_flip_axes(self, n_spatial_axes: int) -> list[tuple[int, ...]]:
        """Flipped axes of every view, none first."""
        if isinstance(self.flips, bool):
            axes = {n_spatial_axes - 1} if self.flips else set()
        else:
            given = [self.flips] if isinstance(self.flips, int) else list(self.flips)
            if not all(-n_spatial_axes <= axis < n_spatial_axes for axis in given):
                raise InputError(f"flips={self.flips!r}: the input's spatial axes are 0..{n_spatial_axes - 1}")
            axes = {axis % n_spatial_axes for axis in given}
        return [flipped for count in range(len(axes) + 1) for flipped in itertools.combinations(sorted(axes), count)]


def _is_sequence_of(values: object, number_type: type) -> bool:
    """Whether it is a sequence of such numbers."""
    return isinstance(values, Sequence) and all(
        isinstance(one, number_type) and not isinstance(one, bool) for one in values
    )


def _compute_maps_at_scale(
    scale: float, explainer: Explainer, x: Tensor, scores: Sequence[Score]
) -> list[AttributionMaps]:
    """The maps of one view; an InputError that names its size where the model refuses what is not the input's own."""
    try:
        return explainer.compute_maps(x, scores)
    except Exception as error:
        if scale == 1 or isinstance(error, CamscopeError | torch.OutOfMemoryError):
            raise
        size, model = " x ".join(map(str, x.shape[2:])), type(unwrap(explainer.model)).__name__
        raise InputError(
            f"{model} has no answer for an input of {size}, scale {scale:g}: {type(error).__name__}: {error}; pass "
            f"scales=(1.0,), or scales of which it takes the sizes"
        ) from error


def _undo_flip(maps: AttributionMaps, axes: Sequence[int], reference: AttributionMaps) -> AttributionMaps:
    heat = maps.attribution.flip([axis + 1 for axis in axes])
    return replace(maps, attribution=resize_maps(heat, reference.attribution.shape[1:]))


def _average_views(views_by_scale: Sequence[Sequence[AttributionMaps]]) -> AttributionMaps:
    """Of all views; the first of `views_by_scale` are those of the input's own scale."""
    sums = [torch.stack([one.attribution for one in views]).sum(0) for views in views_by_scale]
    sizes = [torch.stack([_mean_magnitude(one.attribution) for one in views]).sum(0) for views in views_by_scale]
    heat = sums[0]
    for total, size in zip(sums[1:], sizes[1:], strict=True):
        heat = heat + total * torch.where(size > 0, sizes[0] / size, 0)
    made = [one for views in views_by_scale for one in views]
    return merge_maps(made, heat / len(made), f"the mean of {plural(len(made), 'view')}")


def _mean_magnitude(attribution: Tensor) -> Tensor:
    """(N,1,..): the mean absolute value of each map."""
    return attribution.abs().mean(tuple(range(1, attribution.ndim)), keepdim=True)
