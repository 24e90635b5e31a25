"""`Wrapper`: base class of explainers around other explainers. They can be nested: `Augmented(Denoised(GradCAM(model)))`."""

from abc import abstractmethod
from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, Self

from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.run_methods_in_shared_passes import check_compatible_explainers
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
        """Compute the maps of several scores for an input (N,C,*S) by combining the maps of the inner explainers."""

    def with_chosen_layers(self, x: Tensor, score: Score) -> Self:
        """Let the inner explainers choose their layers for this input. Return a wrapper around these explainers."""
        return self._with_inner_explainers([explainer.with_chosen_layers(x, score) for explainer in self.inner])

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the attribution map (N,*s) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    @property
    def setting_names(self) -> frozenset[str]:
        """The names of all settings, including the settings of inner explainers."""
        return super().setting_names.union(*(explainer.setting_names for explainer in self.inner))

    def with_settings(self, **settings: Any) -> Self:
        """Return a copy of the wrapper with changed settings. Each setting also goes to all inner explainers that have it."""
        return self._with_inner_explainers(
            [
                explainer.with_settings(**{k: value for k, value in settings.items() if k in explainer.setting_names})
                for explainer in self.inner
            ]
        )

    @property
    def composed_name(self) -> str:
        """The names of the inner explainers, followed by the wrapper's name, such as `gradcam, denoised`."""
        return f"{' + '.join(dict.fromkeys(explainer.composed_name for explainer in self.inner))}, {self.name}"

    @property
    def uses_gradients(self) -> bool:
        """Whether any inner explainer needs gradients."""
        return any(explainer.uses_gradients for explainer in self.inner)

    @property
    def needs_only_scores(self) -> bool:
        """Whether all inner explainers need only scores."""
        return all(explainer.needs_only_scores for explainer in self.inner)

    @property
    def needs_target(self) -> bool:
        """Whether any inner explainer needs a target."""
        return any(explainer.needs_target for explainer in self.inner)

    @property
    def accepts_integer_input(self) -> bool:
        """Whether all inner explainers accept an integer input."""
        return all(explainer.accepts_integer_input for explainer in self.inner)

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """Return the target that the inner explainers have in common. Raise InputError if their targets differ."""
        first, *other_targets = [explainer.resolve_target(target) for explainer in self.inner]
        for explainer, other in zip(self.inner[1:], other_targets, strict=True):
            if other is not first and not (isinstance(other, Difference) and other == first):
                raise InputError(
                    f"{self.inner[0]!r} and {explainer!r} explain different targets: {self.name} needs the same target"
                )
        return first

    def with_method(self, method: str | type[Explainer]) -> Explainer:
        """Create the same wrapper for the same model, but around another method."""
        return self._with_inner_explainers([explainer.with_method(method) for explainer in self.inner])

    def _with_inner_explainers(self, inner: Sequence[Explainer]) -> Self:
        """Create the same wrapper around other explainers."""
        return type(self)(inner[0], **self._wrapper_settings)

    @property
    def _wrapper_settings(self) -> dict[str, Any]:
        """The settings of the wrapper itself, without the settings of the inner explainers."""
        return {name: getattr(self, name) for name in list(signature(type(self)).parameters)[1:]}

    def __repr__(self) -> str:
        inside = repr(self.inner[0]) if len(self.inner) == 1 else repr(list(self.inner))
        usual = signature(type(self)).parameters
        settings = self._wrapper_settings.items()
        changed = [f"{name}={value!r}" for name, value in settings if value != usual[name].default]
        return f"{type(self).__name__}({', '.join([inside, *changed])})"
