"""Base class `BaseMethod`: the settings of every method, the maps that a method computes, and the status of a map."""

import hashlib
import math
import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import Any, ClassVar, Self, cast

import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError, TargetError
from camscope.explainers.core.evaluation_context import (
    Mode,
    OnNonFinite,
    Precision,
    device_and_dtype,
    evaluation_context,
    inspect_model,
)
from camscope.explainers.core.inputs import ExtraInputs, ModelInput, read_model_input
from camscope.explainers.core.method_docstrings import complete_docstring
from camscope.explainers.core.setting_types import check_settings
from camscope.explanation import STATUS_OK
from camscope.hooks.base import unwrap
from camscope.layers.layout import Layout
from camscope.model_metadata import get_card
from camscope.targets import ImageContext, Score, Target, TargetLike, image_embedding

SETTINGS_WITHOUT_EFFECT = ("model", "preprocess", "class_names", "on_nonfinite")  # on the map
SAFE_WORD_PATTERN = re.compile(r"[\w+-]{1,40}")  # a setting's word, but no path or file name


@dataclass
class AttributionMaps:
    """Raw maps (N,*s) of one score, with notes about all samples (`notes`) and about each (`sample_notes`).

    `constant_score` (N,): whether the score stayed the same, up to rounding, for all altered inputs.
    `diagnostics`: numbers (N,) by name, which results contain unchanged.
    `standard_error` (N,*s): the standard error of each cell, if the map is a mean over random samples.
    `layout_unverified`: whether the layout of the layer could be neither verified nor contradicted.
    """

    attribution: Tensor
    layer: str | None = None
    layout: Layout | None = None
    zero_gradient: Tensor | None = None
    constant_score: Tensor | None = None
    notes: tuple[str, ...] = ()
    sample_notes: tuple[tuple[str, ...], ...] = ()
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    standard_error: Tensor | None = None
    layout_unverified: bool = False

    def get_sample_notes(self, sample: int) -> tuple[str, ...]:
        """Return the notes that apply to one sample."""
        return (*self.notes, *(self.sample_notes[sample] if self.sample_notes else ()))


DeferredMap = Callable[[], AttributionMaps]  # computes a map that needs its own passes, after the shared ones


@dataclass(eq=False, repr=False)
class BaseMethod(ABC):
    """A method that computes maps. A subclass implements `attribution`, and overrides more to share passes.

    Args:
        model: The model. It runs in eval mode during a call and is restored afterwards.
        preprocess: How an image becomes the model's input. Default: that of a model loaded by `load_model`.
        class_names: Names by class index, as a sequence or a dict. Default: those of a model loaded by `load_model`.
        mode: "eval", or "as_is" to explain a model in train mode.
        on_nonfinite: "raise" an error for NaN and infinity, or "warn" to accept them.
        precision: "bf16" runs the model in bfloat16 with channels last in memory, about twice as fast. Grad-CAM maps
            keep their order then (three models, 40 photographs: rank correlations of 0.977 or more). Where terms
            cancel, as in Grad-CAM++ and XGrad-CAM at a LayerNorm, the map may be lost. None: the model's own precision.
        input_key: The keyword, or the key of a dict, by which the model's forward takes the image. None: the first
            argument, or `pixel_values` if forward names it.
        frames_first: True for inputs (N,T,C,H,W), frames of a video or instances of a bag, with maps (N,T,H,W). False
            for (N,C,D,H,W). None: the latter, or an error if the channels seem to be at the third axis.

    """

    model: nn.Module
    _: KW_ONLY
    preprocess: Any = None
    class_names: Sequence[str] | None = None
    mode: Mode = "eval"
    on_nonfinite: OnNonFinite = "raise"
    precision: Precision | None = None
    input_key: str | None = None
    frames_first: bool | None = None

    name: ClassVar[str]  # the key in METHODS: "gradcam++"
    title: ClassVar[str]  # the name as the field writes it: "Grad-CAM++"
    paper: ClassVar[str]
    forward_passes: ClassVar[str] = "1"
    backward_passes: ClassVar[str] = "0"
    control: ClassVar[bool] = False  # whether the map is a baseline for comparisons, independent of the model's answer
    class_specific: ClassVar[bool] = True  # whether the map depends on the target
    slow: ClassVar[bool] = False  # whether it runs only when it is named: it takes hundreds of passes or more
    runs_partial_forward: ClassVar[bool] = False  # whether later passes are of the same input, up to a layer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = complete_docstring(cls) or cls.__doc__

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            setattr(self, name, _to_builtin_number(value))
        check_settings(self)
        inspect_model(self.model)
        card = get_card(unwrap(self.model))
        preprocess = card.preprocess if self.preprocess is None and card else self.preprocess
        class_names = card.class_names if self.class_names is None and card else self.class_names
        if preprocess is not None:
            from camscope.images.preprocess import as_preprocess

            preprocess = as_preprocess(preprocess)
        self.preprocess, self.class_names = preprocess, _parse_class_names(class_names)

    @abstractmethod
    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the raw map (N,*s) of an input (N,C,*S), as defined by the method's formula.

        Args:
            x: The model's input (N,C,*S).
            score: The scalar per sample that is explained.

        Returns:
            The signed raw map (N,*s), in units of the score.

        >>> from camscope import Saliency, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> Saliency(model).attribution(torch.zeros(2, 1, 128, 128), Score(model, 1)).shape
        torch.Size([2, 128, 128])

        """

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores of one input. Override this method to share passes between scores.

        Args:
            x: The model's input (N,C,*S).
            scores: The scores that are explained.

        Returns:
            One result per score, with a map (N,*s) in units of the score.

        >>> from camscope import Saliency, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> maps = Saliency(model).compute_maps(torch.zeros(1, 1, 128, 128), [Score(model, 1), Score(model, 2)])
        >>> [result.attribution.shape for result in maps]
        [torch.Size([1, 128, 128]), torch.Size([1, 128, 128])]

        """
        return [AttributionMaps(self.attribution(x, score)) for score in scores]

    def resolve(self, x: Tensor, score: Score) -> Self:
        """Return this method with all open choices made for an input, such as the layer.

        Args:
            x: The model's input (N,C,*S).
            score: The score that is explained.

        Returns:
            This method, or a copy with the choices made.

        >>> from camscope import GradCAM, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> GradCAM(model).resolve(torch.zeros(1, 1, 128, 128), Score(model, 1)).layer
        'layer4'

        """
        return self

    @property
    def composed_name(self) -> str:
        """The name in the results: `name`, or the name of a composed method, such as `gradcam, denoised`."""
        return self.name

    @property
    def uses_gradients(self) -> bool:
        """Whether the method needs gradients of the model."""
        return self.backward_passes != "0"

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """Return the target to explain. Raise TargetError if the method cannot explain it.

        Args:
            target: The target that the caller asks for.

        Returns:
            The target that is explained: the same, unless a wrapper such as `Contrast` has its own.

        >>> from camscope import Contrast, Saliency, load_model
        >>> explainer = Saliency(load_model("phantom"))
        >>> explainer.resolve_target("nodule")
        'nodule'
        >>> Contrast(explainer, "nodule", "effusion").resolve_target(None)
        Difference(a='nodule', b='effusion')

        """
        return target

    @property
    def share_key(self) -> Hashable:
        """A key for shared passes: `compute_shared_maps` computes the maps of all methods with the same key together."""
        return id(self)

    @staticmethod
    def compute_shared_maps(
        explainers: "Sequence[BaseMethod]", x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps | DeferredMap | CamscopeError]]:
        """Return the maps [method][score] of methods with the same `share_key`.

        Override this method to share passes between methods. An entry may be a function that computes a map with passes
        of its own, or the error of that method alone.

        Args:
            explainers: The methods, all with the same `share_key`.
            x: The model's input (N,C,*S).
            scores: The scores that are explained.

        Returns:
            Entries [method][score].

        >>> from camscope import GradCAM, LayerCAM, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> explainers = [GradCAM(model, "layer4"), LayerCAM(model, "layer2")]
        >>> rows = GradCAM.compute_shared_maps(explainers, torch.ones(1, 1, 128, 128), [Score(model, 1)])
        >>> [row[0].layer for row in rows]
        ['layer4', 'layer2']

        """
        return [explainer.compute_maps(x, scores) for explainer in explainers]

    def prepare_input(self, image: Any) -> ModelInput:
        """Return the model's input for an image, and its position on the image.

        Args:
            image: An image of any kind that `explain` takes.

        Returns:
            The input (C,*S), its placement on the image, and the images to draw on.

        >>> from camscope import Saliency, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> Saliency(load_model("phantom")).prepare_input(draw_radiograph(0).image).x.shape
        torch.Size([1, 128, 128])

        """
        model = unwrap(self.model)
        return read_model_input(
            image, self.preprocess, model, device_and_dtype(model), frames_first=bool(self.frames_first)
        )

    def bind_targets(
        self, targets: Sequence[TargetLike], inputs: Sequence[ModelInput], extra_inputs: ExtraInputs
    ) -> TargetLike:
        """Bind each target to its image. Return one target if all are the same, otherwise a list.

        Args:
            targets: One target per image.
            inputs: The inputs of the images, as `prepare_input` returns them.
            extra_inputs: The inputs of the model other than the images.

        Returns:
            The bound target, or a list with one per image.

        >>> from camscope import Saliency, load_model
        >>> explainer = Saliency(load_model("phantom"))
        >>> inputs = [explainer.prepare_input(torch.zeros(1, 128, 128))] * 2
        >>> explainer.bind_targets([1, 2], inputs, ExtraInputs())
        [1, 2]

        """
        bound = [
            target.prepare_for_image(self._build_image_context(item, extra_inputs.select_rows([i], len(inputs))))
            if isinstance(target, Target)
            else target
            for i, (target, item) in enumerate(zip(targets, inputs, strict=True))
        ]
        return bound[0] if all(target is bound[0] for target in bound) else cast(TargetLike, bound)

    def _build_image_context(self, model_input: ModelInput, extra_inputs: ExtraInputs) -> ImageContext:
        placement, card = model_input.placement, get_card(unwrap(self.model))
        return ImageContext(
            input_size=tuple(model_input.x.shape[1:]),
            image_size=placement.image_size if placement else None,
            to_input=placement.to_input if placement else _raise_unknown_geometry,
            to_image=placement.to_image if placement else _raise_unknown_geometry,
            embed_image=partial(self._embed_image, extra_inputs=extra_inputs),
            embed_text=card.embed_text if card else None,
        )

    def _embed_image(self, image: Any, extra_inputs: ExtraInputs) -> Tensor:
        """Return the embedding (D,) of another image, computed with the same extra inputs."""
        x = self.prepare_input(image).x[None]
        with evaluation_context(inspect_model(self.model), self, x, extra_inputs) as context:
            return image_embedding(context.create_score().forward(context.x))[0].detach()

    @property
    def forward_options(self) -> dict[str, Any]:
        """Options for the call of the model's forward. See `Score`."""
        return {"input_key": self.input_key, "frames_first": self.frames_first}

    @property
    def setting_names(self) -> frozenset[str]:
        """The names of the constructor's arguments."""
        return frozenset(signature(type(self)).parameters)

    def with_settings(self, **settings: Any) -> Self:
        """Return a copy of the method with some settings changed.

        Args:
            **settings: New values of constructor arguments.

        Returns:
            A copy, or this method if there are no settings.

        >>> from camscope import SmoothGrad, load_model
        >>> SmoothGrad(load_model("phantom")).with_settings(n_samples=4).n_samples
        4

        """
        return replace(self, **settings) if settings else self

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the method can explain an integer input, because it needs neither a gradient nor changed values."""
        return False

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings that affect the map, by name, as stored in results."""
        return {
            name: value if isinstance(value, int | float | str) else _describe_setting(value)
            for name in signature(type(self)).parameters
            if name not in (*SETTINGS_WITHOUT_EFFECT, "progress") and (value := getattr(self, name)) is not None
        }

    def __repr__(self) -> str:
        defaults = {name: parameter.default for name, parameter in signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.parameters.items() if getattr(self, name) is not defaults[name]}
        settings = "".join(f", {name}={value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({type(self.model).__name__}{settings})"


def _raise_unknown_geometry(points: ArrayLike) -> NDArray[Any]:
    raise TargetError(
        "a point of the image cannot be located on the model's input: the geometry of the preprocessing is unknown"
    )


def _to_builtin_number(value: Any) -> Any:
    """Convert a number of another library, such as NumPy, to a Python number. Lists and tuples are converted item by
    item.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) in (list, tuple) and any(isinstance(item, numbers.Real) for item in value):
        return type(value)(map(_to_builtin_number, value))
    return value


def _parse_class_names(class_names: Any) -> tuple[str, ...] | None:
    """Return class names by index, from a sequence or a dict {index: name}."""
    if isinstance(class_names, Mapping):
        class_names = [class_names[key] for key in sorted(class_names, key=int)]
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, Iterable)):
        raise InputError(
            f"class_names={class_names!r}: expected a sequence of names in class order, or a dict {{index: name}}"
        )
    return None if class_names is None else tuple(map(str, class_names))


# --- settings as text


def _describe_setting(value: Any) -> str:
    """Return a setting as text. A tensor becomes its shape and a digest."""
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return f"[{', '.join(map(_describe_setting, value))}]"
    if not isinstance(value, Tensor):
        return format_without_address(value)
    if value.ndim == 0:
        return f"{float(value):g}"
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"tensor {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:8]}"


def format_without_address(value: object) -> str:
    """Return `str(value)` without memory addresses. The text is the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def is_simple_setting(value: Any) -> bool:
    """Whether a setting is a number, a single word, or a list of these."""
    if isinstance(value, list | tuple):
        return all(map(is_simple_setting, value))
    return isinstance(value, bool | int | float | None) or bool(
        isinstance(value, str) and SAFE_WORD_PATTERN.fullmatch(value)
    )


def redact_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without file names. Each value that is not simple becomes its type and a digest."""
    return {
        name: value if is_simple_setting(value) else _format_type_and_digest(value)
        for name, value in parameters.items()
    }


def _format_type_and_digest(value: Any) -> str:
    return f"{type(value).__name__} {hashlib.sha256(format_without_address(value).encode()).hexdigest()[:8]}"


# --- maps


def compute_or_return_error(compute: DeferredMap) -> AttributionMaps | CamscopeError:
    """Return the computed map. An error is returned and not raised, so that other methods can continue."""
    try:
        return compute()
    except CamscopeError as error:
        return error


def resolve_map(entry: AttributionMaps | DeferredMap | CamscopeError) -> AttributionMaps:
    """Return the map of one entry of `compute_shared_maps`. A deferred map is computed now, and an error is raised."""
    if isinstance(entry, CamscopeError):
        raise entry
    return entry() if callable(entry) else entry


def merge_maps(maps: Sequence[AttributionMaps], attribution: Tensor, *notes: str) -> AttributionMaps:
    """Merge the notes and flags of several maps into one result with the given `attribution` (N,*s).

    Each note appears once. A zero gradient or a constant score is reported only if all maps have it.
    """

    def merge_notes(rows: Iterable[Iterable[str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for row in rows for note in row))

    def merge_flags(flags: list[Tensor]) -> Tensor:
        return torch.stack(flags).all(0)

    return replace(
        maps[0],
        attribution=attribution,
        standard_error=None,
        zero_gradient=_join_if_none_missing([item.zero_gradient for item in maps], merge_flags),
        constant_score=_join_if_none_missing([item.constant_score for item in maps], merge_flags),
        notes=merge_notes([*(item.notes for item in maps), notes]),
        sample_notes=tuple(map(merge_notes, zip_longest(*(item.sample_notes for item in maps), fillvalue=()))),
        layout_unverified=any(item.layout_unverified for item in maps),
        diagnostics={},  # diagnostics of one map do not hold for the merged map
    )


def stack_samples(maps: Sequence[AttributionMaps], *notes: str) -> AttributionMaps:
    """Combine the maps of separately explained samples into the maps of one batch."""
    shared = tuple(note for note in maps[0].notes if all(note in sample.notes for sample in maps))
    return replace(
        maps[0],
        attribution=torch.cat([sample.attribution for sample in maps]),
        standard_error=_join_if_none_missing([sample.standard_error for sample in maps], torch.cat),
        zero_gradient=_join_if_none_missing([sample.zero_gradient for sample in maps], torch.cat),
        constant_score=_join_if_none_missing([sample.constant_score for sample in maps], torch.cat),
        notes=(*shared, *notes),
        sample_notes=tuple(tuple(note for note in sample.get_sample_notes(0) if note not in shared) for sample in maps),
        diagnostics={name: torch.cat([sample.diagnostics[name] for sample in maps]) for name in maps[0].diagnostics},
    )


def _join_if_none_missing(parts: Sequence[Tensor | None], join: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return join(present) if len(present) == len(parts) else None


def is_below_precision(precision: float, scores: Tensor, gradient: Tensor, activation: Tensor) -> Tensor:
    """Return for each sample (N,) whether setting `activation` to zero changes its score by less than `precision`."""
    change = gradient.flatten(1).norm(dim=1) * activation.flatten(1).norm(dim=1)  # an upper bound, by Cauchy-Schwarz
    faint: Tensor = (change > 0) & (change <= precision * scores.detach().abs())
    return faint


def determine_statuses(maps: AttributionMaps) -> list[str]:
    """Return the status of each sample: "ok", or the most severe key of `STATUS_MEANINGS` that applies."""
    flat = maps.attribution.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero, constant = (
        [False] * len(flat) if flags is None else flags.tolist() for flags in (maps.zero_gradient, maps.constant_score)
    )
    statuses = [_determine_status(flat.shape[1], zero[i], constant[i], low[i], high[i]) for i in range(len(flat))]
    return ["layout_unverified" if status == STATUS_OK and maps.layout_unverified else status for status in statuses]


def _determine_status(n_cells: int, zero_gradient: bool, constant_score: bool, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "nonfinite"
    if zero_gradient:
        return "zero_gradient"
    if n_cells == 1:
        return "no_spatial_resolution"
    if not high > 0:
        return "no_positive_evidence"
    if constant_score:
        return "constant_score"
    return "flat" if low == high else STATUS_OK
