"""Wrappers: explainers around other explainers. They can be nested: `Augmented(Denoised(GradCAM(model)), flips=True)`."""

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
from camscope.explainers.core.base_method import AttributionMaps, BaseMethod, merge_notes_and_flags
from camscope.explainers.core.linalg import project_on_first_component
from camscope.explainers.core.resampling import resize_input, resize_maps
from camscope.explainers.core.shared_passes import check_compatible_explainers, compute_group_maps
from camscope.hooks.base import unwrap
from camscope.plurals import plural
from camscope.targets import Difference, Score, TargetLike


class Wrapper(Explainer):
    """Base class of explainers that use other explainers of the same model. A subclass implements `compute_maps`."""

    paper: ClassVar[str] = ""  # see the inner explainers
    inner: tuple[Explainer, ...]

    def __init__(self, *inner: Explainer) -> None:
        for explainer in inner:
            if not isinstance(explainer, Explainer):
                raise InputError(
                    f"{type(self).__name__} wraps an explainer, such as GradCAM(model); got {explainer!r:.80}"
                )
        check_compatible_explainers(inner)
        first, self.inner = inner[0], inner
        for explainer in inner[1:]:
            settings = [(item.mode, item.precision, item.forward_options) for item in (first, explainer)]
            if settings[0] != settings[1]:
                raise InputError(
                    f"{first!r} and {explainer!r} differ in mode, precision, input_key or frames_first: pass equal settings"
                )
        super().__init__(
            first.model,
            preprocess=first.preprocess,
            class_names=first.class_names,
            mode=first.mode,
            on_nonfinite=first.on_nonfinite,
            precision=first.precision,
            **first.forward_options,
        )

    @abstractmethod
    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute one map per score of an input (N,C,*S), by combining the maps of the inner explainers."""

    def with_chosen_layers(self, x: Tensor, score: Score) -> Self:
        """Return this wrapper around inner explainers that have chosen their layers for the input."""
        return self._with_inner([explainer.with_chosen_layers(x, score) for explainer in self.inner])

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the attribution map (N,*s) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    @property
    def setting_names(self) -> frozenset[str]:
        """Names of the settings, including those of the inner explainers."""
        return super().setting_names.union(*(explainer.setting_names for explainer in self.inner))

    def with_settings(self, **settings: Any) -> Self:
        """Return this wrapper with changed settings of the inner explainers. Each explainer takes the settings that it has."""
        return self._with_inner(
            [
                explainer.with_settings(**{k: value for k, value in settings.items() if k in explainer.setting_names})
                for explainer in self.inner
            ]
        )

    @property
    def composed_name(self) -> str:
        """Name of the wrapper after those of the inner explainers, such as `gradcam, denoised`."""
        return f"{' + '.join(dict.fromkeys(explainer.composed_name for explainer in self.inner))}, {self.name}"

    @property
    def uses_gradients(self) -> bool:
        """Whether any inner explainer needs gradients."""
        return any(explainer.uses_gradients for explainer in self.inner)

    @property
    def accepts_integer_input(self) -> bool:
        """Whether all inner explainers accept an integer input."""
        return all(explainer.accepts_integer_input for explainer in self.inner)

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """Return the common target of all inner explainers. Raises InputError if they differ."""
        first, *other_targets = [explainer.resolve_target(target) for explainer in self.inner]
        for explainer, other in zip(self.inner[1:], other_targets, strict=True):
            if other is not first and not (isinstance(other, Difference) and other == first):
                raise InputError(
                    f"{self.inner[0]!r} and {explainer!r} explain different targets: {self.name} needs the same target"
                )
        return first

    def create_sibling(self, method: str | type[Explainer]) -> Explainer:
        """Return this wrapper around another method."""
        return self._with_inner([explainer.create_sibling(method) for explainer in self.inner])

    def _with_inner(self, inner: Sequence[Explainer]) -> Self:
        """Return this wrapper around other inner explainers."""
        return type(self)(inner[0], **self._wrapper_settings)

    @property
    def _wrapper_settings(self) -> dict[str, Any]:
        """The settings of the wrapper itself, without those of the inner explainers."""
        return {name: getattr(self, name) for name in list(signature(type(self)).parameters)[1:]}

    def __repr__(self) -> str:
        inside = repr(self.inner[0]) if len(self.inner) == 1 else repr(list(self.inner))
        usual = signature(type(self)).parameters
        settings = self._wrapper_settings.items()
        changed = [f"{name}={value!r}" for name, value in settings if value != usual[name].default]
        return f"{type(self).__name__}({', '.join([inside, *changed])})"


class Contrast(Wrapper):
    """Explain class `a` rather than `b`: the map of the difference of their scores. No other target is accepted.

    Use it to see why the model decided for `a` and not for `b`. It costs one map of the inner method.

    Args:
        explainer: The method.
        a: Index or name of the class to explain.
        b: Index or name of the class that it is compared with.

    >>> from camscope import GradCAM
    >>> Contrast(GradCAM(model, "layer4"), "nodule", "effusion").explain(image).label
    'log-odds of nodule over effusion'

    """

    name = "contrast"

    def __init__(self, explainer: Explainer, a: int | str, b: int | str) -> None:
        super().__init__(explainer)
        self.explainer, self.a, self.b = explainer, a, b
        self._target = Difference(a, b)

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """Return the difference of the two classes as the target. Raises TargetError for any other target."""
        if target is not None:
            raise TargetError(
                f"Contrast explains {self.a!r} rather than {self.b!r} and accepts no other target; got {target!r:.80}"
            )
        return self.explainer.resolve_target(self._target)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of the inner explainer."""
        return self.explainer.compute_maps(x, scores)


class Denoised(Wrapper):
    """Denoise a CAM: project the map on the first principal component of its channel contributions.

    A map (N,cells) is the sum of contributions (N,K,cells). It is projected on their first right singular vector, without
    centering. The ReLU follows if the method has one. The result is in units of the score, and unchanged if all channels
    agree. The order of wrappers does not matter: Denoised(Augmented(x)) is Augmented(Denoised(x)). A method with a single map
    is returned unchanged, with a note.

    It costs as much as the inner method. Use it if single channels clutter the map.

    Args:
        explainer: The method.

    >>> from camscope import GradCAM
    >>> Denoised(GradCAM(model, "layer4")).explain(image, "nodule").method
    'gradcam, denoised'

    """

    name = "denoised"

    def __init__(self, explainer: Explainer) -> None:
        super().__init__(explainer)
        self.explainer = explainer

    @property
    def share_key(self) -> Hashable:
        """Methods with equal keys share passes, also when denoised."""
        return (Denoised, self.explainer.share_key) if isinstance(self.explainer, BaseWeightedChannels) else id(self)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps]]:
        """Compute the denoised maps [method][score]. The inner methods share their passes."""
        inner = [wrapper.explainer for wrapper in explainers if isinstance(wrapper, Denoised)]
        channel_methods = [method for method in inner if isinstance(method, BaseWeightedChannels)]
        if len(channel_methods) < len(inner):
            return [wrapper.compute_maps(x, scores) for wrapper in explainers]
        principal_methods = [copy.copy(method) for method in channel_methods]  # with the same passes
        for principal, method in zip(principal_methods, channel_methods, strict=True):
            vars(principal)["combine"] = partial(_combine_along_principal_component, method)
        return compute_group_maps(principal_methods, x, scores)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the denoised maps. If the inner explainer is a wrapper, its inner explainers are denoised."""
        inner = self.explainer
        if isinstance(inner, BaseWeightedChannels):
            return list(self.compute_shared_maps([self], x, scores)[0])
        if isinstance(inner, Denoised):
            return inner.compute_maps(x, scores)
        if isinstance(inner, Wrapper):
            return inner._with_inner([Denoised(explainer) for explainer in inner.inner]).compute_maps(x, scores)
        note = f"{inner.composed_name} computes a single map, so that nothing was denoised"
        return [replace(maps, notes=(*maps.notes, note)) for maps in inner.compute_maps(x, scores)]


def _combine_along_principal_component(method: BaseWeightedChannels, features: LayerFeatures) -> Tensor:
    """Project the sum of the contributions on their first component, (N,cells). Apply a ReLU if the method has one."""
    parts = method.contributions(features)
    total, component = parts.sum(1), project_on_first_component(parts)
    size = component.abs().amax(1, keepdim=True)
    along = torch.where(size > 0, component / size, 0)  # near 1, where a square neither vanishes nor overflows
    length = along.square().sum(1, keepdim=True)
    cells = torch.where(length > 0, (total * along).sum(1, keepdim=True) / length, 0) * along
    return cells.relu() if method.relu else cells


class Augmented(Wrapper):
    """Test-time augmentation: the mean of the raw maps over flips and scales of the input.

    Each map is mapped back to the original input. Resizing is linear, with antialiasing. Each flip is used at each
    scale. The unchanged input is always included and fixes the class. A Region or a Box is moved with the view, a
    function of the output is not.

    Maps of other scales are interpolated linearly to the grid of the unchanged input. Because the values may depend on
    the number of cells, the maps of each scale are multiplied by one number that gives them the mean magnitude of the
    original scale. With flips alone the result is the exact mean. If no layer is named, the one chosen for the
    unchanged input is used for all views. Extra inputs of the model stay the same. It costs one map of the inner method
    for each view.

    Args:
        explainer: The method.
        flips: True for the last spatial axis; an axis or several (0 is the first spatial axis), in every combination;
            or False.
        scales: Factors of the input size, which the model must accept.

    Raises:
        InputError: `scales` has a number that is not above 0, or `flips` is no axis.

    >>> from camscope import GradCAM
    >>> explanation = Augmented(GradCAM(model, "layer4"), flips=True, scales=(1.0, 1.5)).explain(image, "nodule")
    >>> explanation.method, explanation.grid
    ('gradcam, augmented', (16, 16))

    """

    name = "augmented"

    def __init__(
        self, explainer: Explainer, flips: bool | int | Sequence[int] = True, scales: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__(explainer)
        if not _is_sequence_of(scales, numbers.Real) or not all(math.isfinite(scale) and scale > 0 for scale in scales):
            raise InputError(f"scales={scales!r}: expected a list of factors above 0, e.g. (0.75, 1.0, 1.25)")
        if not isinstance(flips, bool | int) and not _is_sequence_of(flips, int):
            raise InputError(f"flips={flips!r}: expected True, False, or spatial axes, e.g. 0 or (0, 1)")
        self.explainer, self.flips, self.scales = explainer, flips, tuple(scales)

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the inner explainer accepts an integer input and no view is interpolated."""
        return super().accepts_integer_input and set(self.scales) == {1.0}

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the mean map over all views, for each score."""
        if len(scores) > 1 and any(callable(score.target) for score in scores):  # each may have its own layer
            return [self.compute_maps(x, [score])[0] for score in scores]
        unchanged_maps, explainer = (
            self.explainer.compute_maps(x, scores),
            self.explainer.with_chosen_layers(x, scores[0]),
        )
        flips, views_by_scale = self._list_flip_axes(x.ndim - 2), []
        for scale in dict.fromkeys((1.0, *map(float, self.scales))):
            size = [max(1, round(scale * pixels)) for pixels in x.shape[2:]]
            views = [unchanged_maps] if scale == 1 else []
            for axes in flips[len(views) :]:
                view = resize_input(x.flip([axis + 2 for axis in axes]), size)
                view_scores = [score.flipped(axes, size) for score in scores]
                maps = _compute_maps_at_scale(scale, explainer, view, view_scores)
                pairs = zip(maps, unchanged_maps, strict=True)
                views.append([_undo_flip(flipped_maps, axes, reference) for flipped_maps, reference in pairs])
            views_by_scale.append(views)
        return [_average_views([[row[i] for row in views] for views in views_by_scale]) for i in range(len(scores))]

    def _list_flip_axes(self, n_axes: int) -> list[tuple[int, ...]]:
        """Return the flipped axes of each view. The first view is not flipped."""
        if isinstance(self.flips, bool):
            flips = [n_axes - 1] * self.flips
        else:
            flips = [self.flips] if isinstance(self.flips, int) else list(self.flips)
        if not all(-n_axes <= axis < n_axes for axis in flips):
            raise InputError(f"flips={self.flips!r} is out of range: the spatial axes of the input are 0..{n_axes - 1}")
        axes = sorted({axis % n_axes for axis in flips})
        return [flipped for count in range(len(axes) + 1) for flipped in itertools.combinations(axes, count)]


def _is_sequence_of(values: object, number_type: type) -> bool:
    """Whether a value is a sequence of numbers of this type."""
    if not isinstance(values, Sequence):
        return False
    return all(isinstance(value, number_type) and not isinstance(value, bool) for value in values)


def _compute_maps_at_scale(
    scale: float, explainer: Explainer, x: Tensor, scores: Sequence[Score]
) -> list[AttributionMaps]:
    """Compute the maps of one view. Raises InputError if the model does not accept the size of the view."""
    try:
        return explainer.compute_maps(x, scores)
    except Exception as error:
        if scale == 1 or isinstance(error, CamscopeError | torch.OutOfMemoryError):
            raise
        size, model = " x ".join(map(str, x.shape[2:])), type(unwrap(explainer.model)).__name__
        raise InputError(
            f"{model} does not accept an input of size {size} (scale {scale:g}): pass scales=(1.0,), or scales that the model "
            f"accepts. Its error was {type(error).__name__}: {error}"
        ) from error


def _undo_flip(maps: AttributionMaps, axes: Sequence[int], reference: AttributionMaps) -> AttributionMaps:
    """Flip maps back and resize them to the grid of the reference."""
    attribution = maps.attribution.flip([axis + 1 for axis in axes])
    return replace(maps, attribution=resize_maps(attribution, reference.attribution.shape[1:]))


def _average_views(views_by_scale: Sequence[Sequence[AttributionMaps]]) -> AttributionMaps:
    """Return the mean map over all views. The first list of `views_by_scale` has the original scale."""
    sums = [torch.stack([view.attribution for view in views]).sum(0) for views in views_by_scale]
    sizes = [torch.stack([_mean_magnitude(view.attribution) for view in views]).sum(0) for views in views_by_scale]
    total_map = sums[0]
    for total, size in zip(sums[1:], sizes[1:], strict=True):
        total_map = total_map + total * torch.where(size > 0, sizes[0] / size, 0)
    views = [view for group in views_by_scale for view in group]
    return merge_notes_and_flags(views, total_map / len(views), f"the mean of {plural(len(views), 'view')}")


def _mean_magnitude(attribution: Tensor) -> Tensor:
    """Return the mean absolute value (N,1,..) of each map."""
    return attribution.abs().mean(tuple(range(1, attribution.ndim)), keepdim=True)
