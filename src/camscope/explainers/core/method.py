"""Base class `BaseMethod`: the settings and facts of every method, and the map that it computes from one input."""

import hashlib
import numbers
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError
from camscope.explainers.core.evaluation_context import (
    Mode,
    OnNonFinite,
    Precision,
    check_one_of,
    device_and_dtype,
    inspect_model,
)
from camscope.explainers.core.inputs import ModelInput, PreprocessFunction, read_model_input
from camscope.explainers.core.maps import AttributionMaps, DeferredMap, format_without_address
from camscope.hooks.base import unwrap
from camscope.model_card import get_card
from camscope.targets import Score, TargetLike

SETTINGS_WITHOUT_EFFECT = ("model", "preprocess", "class_names", "on_nonfinite")  # of no weight for the map


@dataclass(eq=False, repr=False)
class BaseMethod(ABC):
    """A method that computes maps. A subclass implements `attribution`, and overrides more to share passes.

    `preprocess`: how an image becomes the model's input (default: that of a model loaded by camscope). `class_names`: names
    by class index. `mode`: "eval", or "as_is" to explain a model in train mode. `on_nonfinite`: "raise", or "warn" to
    accept NaN and infinity. `precision`: "bf16" runs the model in bfloat16 with channels last in memory, about twice as
    fast. Grad-CAM maps keep their order then (three models, 40 photographs: rank correlations of 0.977 or more). Where terms
    cancel, as in Grad-CAM++ and XGrad-CAM at a LayerNorm, the map may be lost. Default: the model's own precision.
    `input_key`: the keyword, or the key of a dict, by which the model's forward takes the image; None: the first argument,
    or `pixel_values` if forward names it. `frames_first`: True for a model whose input is (N,T,C,H,W), frames of a video or
    instances of a bag, with maps (N,T,H,W); False for (N,C,D,H,W); None: the latter, or an error if the channels seem to be
    at the third axis.
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
    control: ClassVar[bool] = False  # a floor for comparisons: it knows nothing of the model's answer
    class_specific: ClassVar[bool] = True  # whether the map depends on the target
    slow: ClassVar[bool] = False  # whether it is only run when it is asked for by name: hundreds of passes and more
    runs_partial_forward: ClassVar[bool] = False  # whether later passes are of the same input, up to a layer

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            setattr(self, name, _to_builtin_number(value))
        check_one_of("mode", self.mode, "eval", "as_is")
        check_one_of("on_nonfinite", self.on_nonfinite, "raise", "warn")
        check_one_of("precision", self.precision, None, "bf16")
        check_one_of("frames_first", self.frames_first, None, True, False)
        inspect_model(self.model)
        card = get_card(unwrap(self.model))
        preprocess = card.preprocess if self.preprocess is None and card else self.preprocess
        self.preprocess = _parse_preprocess(preprocess)
        self.class_names = _parse_class_names(
            card.class_names if self.class_names is None and card else self.class_names
        )

    @abstractmethod
    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the raw map (N,*s) of an input (N,C,*S), unscaled, as the formula of the method defines it."""

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores of one input; override it to share passes between scores."""
        return [AttributionMaps(self.attribution(x, score)) for score in scores]

    def resolve(self, x: Tensor, score: Score) -> Self:
        """Return the same method with the choices made that it leaves open for an input, such as the layer."""
        return self

    @property
    def full_name(self) -> str:
        """The name that results carry: `name`, or that of a composed method, such as `gradcam, denoised`."""
        return self.name

    @property
    def uses_gradients(self) -> bool:
        """Whether the method needs gradients of the model."""
        return self.backward_passes != "0"

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """Return the target that the method explains; raise TargetError for one that it cannot."""
        return target

    @property
    def share_key(self) -> Hashable:
        """Methods with the same key can share passes; `compute_shared_maps` then computes the maps of all of them."""
        return id(self)

    @staticmethod
    def compute_shared_maps(
        explainers: "Sequence[BaseMethod]", x: Tensor, scores: Sequence[Score]
    ) -> Sequence[Sequence[AttributionMaps | DeferredMap | CamscopeError]]:
        """Return the maps [method][score] of methods with one `share_key`; override it to share passes between methods.

        An entry may be a function that computes a map with passes of its own, or the error of that method alone.
        """
        return [explainer.compute_maps(x, scores) for explainer in explainers]

    def prepare_input(self, image: Any) -> ModelInput:
        """Return an image as the model takes it, with its placement."""
        model = unwrap(self.model)
        return read_model_input(
            image, self.preprocess, model, device_and_dtype(model), frames_first=bool(self.frames_first)
        )

    @property
    def call_settings(self) -> dict[str, Any]:
        """Settings of how the model is called with an input; see `Score`."""
        return {"input_key": self.input_key, "frames_first": self.frames_first}

    @property
    def accepts_integer_input(self) -> bool:
        """Whether an integer input can be explained: the method neither changes its values nor needs a gradient there."""
        return False

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings of this method that affect the map, by name, as results store them."""
        names = [
            name for name in signature(type(self)).parameters if name not in (*SETTINGS_WITHOUT_EFFECT, "progress")
        ]
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {
            name: value if isinstance(value, int | float | str) else _describe_setting(value)
            for name, value in values.items()
        }

    def __repr__(self) -> str:
        usual = {name: parameter.default for name, parameter in signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.parameters.items() if getattr(self, name) is not usual[name]}
        settings = "".join(f", {name}={value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({type(self.model).__name__}{settings})"


def _to_builtin_number(value: Any) -> Any:
    """Convert a number of another library, such as NumPy, to a Python number, also inside a list or tuple."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) in (list, tuple) and any(isinstance(item, numbers.Real) for item in value):
        return type(value)(map(_to_builtin_number, value))
    return value


def _describe_setting(value: Any) -> str:
    """Return a setting as text; a tensor as its shape and a digest."""
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return f"[{', '.join(map(_describe_setting, value))}]"
    if not isinstance(value, Tensor):
        return format_without_address(value)
    if value.ndim == 0:
        return f"{float(value):g}"
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"tensor {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:8]}"


def _parse_class_names(class_names: Any) -> tuple[str, ...] | None:
    """Return class names by index, from a sequence or a dict from index to name."""
    if isinstance(class_names, Mapping):
        class_names = [class_names[key] for key in sorted(class_names, key=int)]
    if class_names is not None and (isinstance(class_names, str) or not isinstance(class_names, Iterable)):
        raise InputError(
            f"class_names={class_names!r}: expected the class names by index, or a dict from index to name"
        )
    return None if class_names is None else tuple(map(str, class_names))


def _parse_preprocess(preprocess: Any) -> PreprocessFunction | None:
    if preprocess is None:
        return None
    from camscope.images.preprocess import as_preprocess

    ready: PreprocessFunction = as_preprocess(preprocess)
    return ready
