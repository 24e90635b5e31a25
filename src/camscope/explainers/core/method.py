"""Method: what every method has: its settings, its facts, and the map that it makes of one input."""

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
    """A way to make a map. It writes `attribution`; what has passes to share writes more.

    `preprocess`: how an image becomes the model's input (default: that of a model camscope loaded). `class_names`: class
    names by index. `mode`: "eval", or "as_is" for a model that is explained in train mode. `on_nonfinite`: "raise", or
    "warn" to go on with NaN or infinity. `precision`: "bf16" runs the model in bfloat16 with the channels last in
    memory, about twice as fast; Grad-CAM's maps keep their order (three models, 40 photographs: ranks correlate at
    0.977 or more); where terms cancel, as in Grad-CAM++ and XGrad-CAM at a LayerNorm, nothing may be left of them.
    Default: the model's own. `input_key`: the keyword by which the model's forward takes the image, or the key of the dict
    that it takes; None: the first argument, or `pixel_values` where forward names that. `frames_first`: True for a model whose
    input is (N,T,C,H,W), frames of a video or instances of a bag: its map is (N,T,H,W); False for (N,C,D,H,W); None: the
    latter, or an error where the channels seem to be at the third axis.
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
        known = card.preprocess if self.preprocess is None and card else self.preprocess
        self.preprocess = _parse_preprocess(known)
        self.class_names = _parse_class_names(
            card.class_names if self.class_names is None and card else self.class_names
        )

    @abstractmethod
    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> raw map (N,*s): as the method's formula has it, scaled by nothing."""

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Maps of several scores of one input; a family that can share passes between them does it here."""
        return [AttributionMaps(self.attribution(x, score)) for score in scores]

    def resolve(self, x: Tensor, score: Score) -> Self:
        """The same method, with whatever it chooses for itself chosen for this input."""
        return self

    @property
    def full_name(self) -> str:
        """The method as a result names it."""
        return self.name

    @property
    def uses_gradients(self) -> bool:
        """Whether any of the model's are taken."""
        return self.backward_passes != "0"

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """The question that a target means; TargetError for one that the method does not answer."""
        return target

    @property
    def share_key(self) -> Hashable:
        """Methods of one company can share passes: `compute_shared_maps` makes the maps of them all."""
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
        """An image as the model takes it, and where it lies."""
        model = unwrap(self.model)
        return read_model_input(
            image, self.preprocess, model, device_and_dtype(model), frames_first=bool(self.frames_first)
        )

    @property
    def call_settings(self) -> dict[str, Any]:
        """How the model is called with an input: see `Score`."""
        return {"input_key": self.input_key, "frames_first": self.frames_first}

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the map can be made of an input of integers: its values are not changed, and no gradient is taken there."""
        return False

    @property
    def parameters(self) -> dict[str, Any]:
        """The method's own settings: its constructor's arguments that are not every method's."""
        names = [
            name for name in signature(type(self)).parameters if name not in (*SETTINGS_WITHOUT_EFFECT, "progress")
        ]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {
            name: value if isinstance(value, int | float | str) else _describe_setting(value)
            for name, value in given.items()
        }

    def __repr__(self) -> str:
        usual = {name: one.default for name, one in signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.parameters.items() if getattr(self, name) is not usual[name]}
        settings = "".join(f", {name}={value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({type(self.model).__name__}{settings})"


def _to_builtin_number(value: Any) -> Any:
    """A number of another library, such as NumPy's, as Python's own, which PyTorch and a file take; in a list, too."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) in (list, tuple) and any(isinstance(one, numbers.Real) for one in value):
        return type(value)(map(_to_builtin_number, value))
    return value


def _describe_setting(value: Any) -> str:
    """A setting in words: of a tensor, and of those in a list, the shape and a digest."""
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
        return f"[{', '.join(map(_describe_setting, value))}]"
    if not isinstance(value, Tensor):
        return format_without_address(value)
    if value.ndim == 0:
        return f"{float(value):g}"
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"tensor {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:8]}"


def _parse_class_names(class_names: Any) -> tuple[str, ...] | None:
    """Class names by index, of a sequence or of a dict from index to name."""
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
