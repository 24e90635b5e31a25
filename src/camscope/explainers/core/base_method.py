"""`BaseMethod`: the settings that all methods share, and the functions that a method may override."""

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Self, cast

from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError, TargetError
from camscope.explainers.core.evaluation_context import (
    Mode,
    OnNonFinite,
    Precision,
    evaluation_context,
    get_device_and_dtype,
    inspect_model,
)
from camscope.explainers.core.maps_with_flags import AttributionMaps, DeferredMap
from camscope.explainers.core.method_docstrings import complete_docstring
from camscope.explainers.core.model_input import ExtraInputs, ModelInput, read_model_input
from camscope.explainers.core.redacted_settings_text import describe_setting
from camscope.explainers.core.validated_setting_types import check_settings
from camscope.forward_signature import takes_frames_first
from camscope.hooks.find_layers import unwrap
from camscope.hooks.wrap_black_box_function_as_module import wrap_function
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.models.ultralytics_yolo import is_ultralytics_object
from camscope.targets import ImageContext, Score, Target, TargetLike, image_embedding
from camscope.targets.score_per_sample import replace_class_targets

SETTINGS_WITHOUT_EFFECT = ("model", "preprocess", "class_names", "on_nonfinite")  # on the map


@dataclass(eq=False, repr=False)
class BaseMethod(ABC):
    """A method that computes maps. A subclass implements `attribution`, and overrides more to share passes.

    Args:
        model: The model, or a `YOLO` object of Ultralytics. It runs in eval mode during a call and is restored afterwards.
            Methods that need only scores also take TorchScript, and a function from a batch (N,C,*S) to scores (N,K).
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
            for (N,C,D,H,W). None: the former for VideoMAE, TimeSformer, ViViT and V-JEPA 2 of Hugging Face. For other models
            the latter, or an error if the channels seem to be at the third axis.

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
    differentiable: ClassVar[bool] = (
        False  # whether the map can be a part of a loss: `attribute(..., differentiable=True)`
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = complete_docstring(cls) or cls.__doc__

    def __post_init__(self) -> None:
        if is_ultralytics_object(self.model):
            from camscope.models import load_model

            self.model = load_model(self.model)
        for name, value in list(vars(self).items()):
            setattr(self, name, _to_builtin_numbers(value))
        check_settings(self)
        model: object = self.model
        if not isinstance(model, nn.Module):
            self.model = wrap_function(model)
        inspect_model(self.model, scores_suffice=self.needs_only_scores)
        if self.frames_first is None and takes_frames_first(unwrap(self.model)):
            self.frames_first = True
        model_metadata = get_loaded_model_metadata(unwrap(self.model))
        preprocess = model_metadata.preprocess if self.preprocess is None and model_metadata else self.preprocess
        class_names = model_metadata.class_names if self.class_names is None and model_metadata else self.class_names
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

        >>> import torch
        >>> from camscope import Saliency, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> Saliency(model).attribution(torch.zeros(2, 1, 128, 128), Score(model, 1)).shape
        torch.Size([2, 128, 128])

        """

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return one result per score for the same input. Override this method if the scores can share passes.

        Args:
            x: The model's input (N,C,*S).
            scores: The scores that are explained.

        Returns:
            One result per score, with a map (N,*s) in units of the score.

        >>> import torch
        >>> from camscope import Saliency, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> maps = Saliency(model).compute_maps(torch.zeros(1, 1, 128, 128), [Score(model, 1), Score(model, 2)])
        >>> [result.attribution.shape for result in maps]
        [torch.Size([1, 128, 128]), torch.Size([1, 128, 128])]

        """
        return [AttributionMaps(self.attribution(x, score)) for score in scores]

    def compute_differentiable_map(self, x: Tensor, score: Score) -> Tensor:
        """Compute a map (N,*s) with its graph, back to the input and all parameters. Nothing is detached.

        A class whose constant `differentiable` is True implements this method. The caller switches gradients on.

        Args:
            x: The model's input (N,C,*S).
            score: The score that is explained.

        Returns:
            The signed raw map (N,*s), as `attribution` returns it.

        Raises:
            InputError: The method is not differentiable.

        >>> import torch
        >>> from camscope import Saliency, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> Saliency(model).compute_differentiable_map(torch.ones(1, 1, 128, 128), Score(model, 1)).requires_grad
        True

        """
        raise InputError(f"{self.composed_name} has no differentiable map")

    def with_layer_and_layout(self, x: Tensor, create_score: Callable[[], Score]) -> Self:
        """Return a copy of the method with all choices made that need further forward passes. By default, return it unchanged.

        Args:
            x: The model's input (N,C,*S).
            create_score: A function that creates a new score of the target.

        Returns:
            This method, or a copy with a layer and a layout.

        >>> import torch
        >>> from camscope import GradCAM, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> GradCAM(model).with_layer_and_layout(torch.ones(1, 1, 128, 128), lambda: Score(model, 1))
        GradCAM(PhantomNet, layer='layer4', layout='channels_first 16x16')

        """
        return self

    def with_chosen_layers(self, x: Tensor, score: Score) -> Self:
        """Return a copy of the method for this input. Settings that the user left open, such as the layer, are chosen.

        Args:
            x: The model's input (N,C,*S).
            score: The score that is explained.

        Returns:
            This method, or a copy with the choices made.

        >>> import torch
        >>> from camscope import GradCAM, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> GradCAM(model).with_chosen_layers(torch.zeros(1, 1, 128, 128), Score(model, 1)).layer
        'layer4'

        """
        return self

    @property
    def composed_name(self) -> str:
        """The name of the method in results: `name`, or for a wrapper a combined name such as `gradcam, denoised`."""
        return self.name

    @property
    def uses_gradients(self) -> bool:
        """Whether the method needs gradients of the model."""
        return self.backward_passes != "0"

    @property
    def needs_only_scores(self) -> bool:
        """Whether the method uses only the output of the model. The model may then be any function."""
        return False

    @property
    def needs_target(self) -> bool:
        """Whether the map depends on a target. If so, the output of the model must have classes or another target."""
        return self.class_specific

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """Return the target that the method explains for the requested `target`.
        Raise TargetError for a target that does not suit it.

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
        """A key for shared computations: `compute_shared_maps` computes the maps of methods with equal keys together."""
        return id(self)

    @staticmethod
    def compute_shared_maps(
        explainers: "Sequence[BaseMethod]", x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps | DeferredMap | CamscopeError]]:
        """Compute the maps of methods with the same `share_key`. The result has rows [method][score].

        Override this method to share passes between methods. An entry is a map, a function that computes a map later,
        or the error of that method.

        Args:
            explainers: The methods, all with the same `share_key`.
            x: The model's input (N,C,*S).
            scores: The scores that are explained.

        Returns:
            Entries [method][score].

        >>> import torch
        >>> from camscope import GradCAM, LayerCAM, load_model
        >>> from camscope.targets import Score
        >>> model = load_model("phantom")
        >>> explainers = [GradCAM(model, "layer4"), LayerCAM(model, "layer2")]
        >>> rows = GradCAM.compute_shared_maps(explainers, torch.ones(1, 1, 128, 128), [Score(model, 1)])
        >>> [row[0].layer for row in rows]
        ['layer4', 'layer2']

        """
        return [explainer.compute_maps(x, scores) for explainer in explainers]

    def compute_text_maps(self, inputs: Any, targets: Sequence[Sequence[Any]], answers: Sequence[Sequence[Any]]) -> Any:
        """Compute the maps [image][target] of text that a vision-language model writes. Override this method to support it.

        Args:
            inputs: The inputs of the model, with the places of the image tokens.
            targets: The targets of each image.
            answers: The tokens of each target.

        Returns:
            One `TokenMap` for each target.

        Raises:
            TargetError: The method does not support text targets.

        >>> from camscope import Saliency, load_model
        >>> Saliency(load_model("phantom")).compute_text_maps(None, [], [])
        Traceback (most recent call last):
        ...
        camscope.errors.TargetError: saliency cannot explain the text of a vision-language model; use a method ...

        """
        raise TargetError(
            f"{self.composed_name} cannot explain the text of a vision-language model",
            fix="use a method of one layer, of attention or of scores alone, such as gradcam, chefer or occlusion",
        )

    def prepare_input(self, image: Any) -> ModelInput:
        """Convert an image to the model's input, and find which part of the image this input shows.

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
            image, self.preprocess, model, get_device_and_dtype(model), frames_first=bool(self.frames_first)
        )

    def prepare_each_target_for_its_image(
        self, targets: Sequence[TargetLike], inputs: Sequence[ModelInput], extra_inputs: ExtraInputs
    ) -> TargetLike:
        """Prepare each target for its own image. For example, a region is converted to the size of the image.

        Args:
            targets: One target per image.
            inputs: The inputs of the images, as `prepare_input` returns them.
            extra_inputs: The inputs of the model other than the images.

        Returns:
            One target if all are the same, otherwise a list with one per image.

        >>> import torch
        >>> from camscope import Saliency, load_model
        >>> explainer = Saliency(load_model("phantom"))
        >>> inputs = [explainer.prepare_input(torch.zeros(1, 128, 128))] * 2
        >>> explainer.prepare_each_target_for_its_image([1, 2], inputs, ExtraInputs())
        [1, 2]

        """
        replaced = [replace_class_targets(unwrap(self.model), target) for target in targets]
        bound = [
            target.prepare_for_image(self._build_image_context(item, extra_inputs.select_rows([i], len(inputs))))
            if isinstance(target, Target)
            else target
            for i, (target, item) in enumerate(zip(replaced, inputs, strict=True))
        ]
        return bound[0] if all(target is bound[0] for target in bound) else cast(TargetLike, bound)

    def _build_image_context(self, model_input: ModelInput, extra_inputs: ExtraInputs) -> ImageContext:
        """Build what targets may use to prepare themselves: sizes, geometry and encoders of image and text."""
        placement, model_metadata = model_input.placement, get_loaded_model_metadata(unwrap(self.model))
        return ImageContext(
            input_size=tuple(model_input.x.shape[1:]),
            image_size=placement.image_size if placement else None,
            to_input=placement.to_input if placement else _raise_unknown_geometry,
            to_image=placement.to_image if placement else _raise_unknown_geometry,
            embed_image=partial(self._embed_image, extra_inputs=extra_inputs),
            embed_text=model_metadata.embed_text if model_metadata else None,
        )

    def _embed_image(self, image: Any, extra_inputs: ExtraInputs) -> Tensor:
        """Compute the embedding (D,) of a reference image. The model gets the extra inputs of the explained image."""
        x = self.prepare_input(image).x[None]
        model_info = inspect_model(self.model, scores_suffice=self.needs_only_scores)
        with evaluation_context(model_info, self, x, extra_inputs) as context:
            return image_embedding(context.create_score().forward(context.x))[0].detach()

    @property
    def forward_options(self) -> dict[str, Any]:
        """Options of `Score` about how the model's forward takes its input."""
        return {"input_key": self.input_key, "frames_first": self.frames_first}

    @property
    def setting_names(self) -> frozenset[str]:
        """The names of all settings, which are the arguments of the constructor."""
        return frozenset(signature(type(self)).parameters)

    def with_settings(self, **settings: Any) -> Self:
        """Return a copy of the method with some settings replaced.

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
        """Whether the method accepts an integer input.
        This requires a method that uses no gradients and never changes the input.
        """
        return False

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings that affect the map, by name. The values are in the form in which results store them."""
        return {
            name: value if isinstance(value, int | float | str) else describe_setting(value)
            for name in signature(type(self)).parameters
            if name not in (*SETTINGS_WITHOUT_EFFECT, "progress") and (value := getattr(self, name)) is not None
        }

    def __repr__(self) -> str:
        defaults = {name: parameter.default for name, parameter in signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.parameters.items() if getattr(self, name) is not defaults[name]}
        settings = "".join(f", {name}={value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({type(self.model).__name__}{settings})"


def _raise_unknown_geometry(points: ArrayLike) -> NDArray[Any]:
    """Raise TargetError. This function stands in for an unknown coordinate transform."""
    raise TargetError(
        "a point of the image cannot be located on the model's input: the geometry of the preprocessing is unknown"
    )


def _to_builtin_numbers(value: Any) -> Any:
    """Convert a number of another library, such as NumPy, to a Python number. For a list or tuple, convert each item."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) in (list, tuple) and any(isinstance(item, numbers.Real) for item in value):
        return type(value)(map(_to_builtin_numbers, value))
    return value


def _parse_class_names(class_names: Any) -> tuple[str, ...] | None:
    """Convert class names from a sequence or a dict {index: name} to names by index."""
    if isinstance(class_names, Mapping):
        class_names = [class_names[key] for key in sorted(class_names, key=int)]
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, Iterable)):
        raise InputError(
            f"class_names={class_names!r}: expected a sequence of names in class order, or a dict {{index: name}}"
        )
    return None if class_names is None else tuple(map(str, class_names))
