"""`BaseCAM`: the base class of pytorch-grad-cam's methods. Maps are computed by camscope's explainers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from camscope import explainers
from camscope.compat.pytorch_grad_cam.activations_and_gradients import (
    ActivationsAndGradients,
    OverwrittenOutputs,
    StructuredOutputError,
    to_device,
)
from camscope.compat.pytorch_grad_cam.utils.image import scale_cam_image
from camscope.compat.pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from camscope.compat.pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from camscope.errors import LayerError, warn_caller
from camscope.explainers import LayerExplainer, LayerFeatures
from camscope.explainers.cam.shared_layer_pass import SharedLayerPass
from camscope.hooks import find_layer, find_layers
from camscope.targets import Score

Array = npt.NDArray[Any]
OutputTarget = Callable[[Any], Tensor]
_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Issue a CamscopeWarning. In one process, issue only the first warning of each `key`."""
    if key not in _warned:
        _warned.add(key)
        warn_caller(message)


class ActivationChannelSum(LayerExplainer):
    """The explainer whose map is the sum of a layer's activations, for subclasses of `BaseCAM` without gradients."""

    name, title, paper = "activation", "Activation", "arXiv:1610.02391"

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Return the sum of the channels of the activation."""
        return features.activation.flatten(2).sum(1)


class BaseCAM:
    """Base class of CAM methods, whose maps (N,H,W) may combine several layers.

    The map of each layer is clipped at 0, scaled to 0..1 and resized. The mean over the layers is scaled to 0..1 again. A
    subclass sets `explainer` to a camscope explainer, or implements `get_cam_weights` or `get_cam_image` on arrays.
    """

    explainer: ClassVar[type[LayerExplainer]] = explainers.GradCAM
    camscope_call: ClassVar[str] = "camscope.GradCAM(model, layer).explain(image)"
    batch_size: int

    def __init_subclass__(cls) -> None:
        name = cls.__name__.replace("_", "")
        if "camscope_call" not in vars(cls) and name in explainers.__all__:
            cls.camscope_call = f"camscope.{name}(model, layer).explain(image)"

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Callable[[Any], Tensor] | None = None,
        compute_input_gradient: bool = False,
        uses_gradients: bool = True,
        tta_transforms: Any = None,
        detach: bool = True,
    ) -> None:
        self.model, self.target_layers = model.eval(), target_layers
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.reshape_transform, self.tta_transforms = reshape_transform, tta_transforms
        self.compute_input_gradient, self.uses_gradients, self.detach = compute_input_gradient, uses_gradients, detach
        self.activations_and_grads = ActivationsAndGradients(model, [], reshape_transform, detach)
        self.outputs: Any = None
        self._features: LayerFeatures | None = None
        self._current_explainer: LayerExplainer | None = None

    # --- one layer

    def get_cam_weights(
        self,
        input_tensor: Tensor,
        target_layers: Any,
        targets: Sequence[OutputTarget],
        activations: Any,
        grads: Any,
    ) -> Any:
        """Return the weights of the channels. Like the activations, the weights are an array or a tensor.

        The shape is (N,K), or (N,K,*s) if the method weights each cell.
        """
        features = self._build_features_from_arrays(activations, grads)
        explainer = self._current_explainer
        if not isinstance(explainer, explainers.BaseWeightedChannels):
            raise NotImplementedError(f"{type(self).__name__} must implement get_cam_weights or get_cam_image")
        weights = explainer.channel_weights(features)
        shape = features.activation.shape
        weights = weights.view(shape) if weights.shape[2] > 1 else weights[..., 0].expand(shape[:2])
        return weights if isinstance(activations, Tensor) else weights.cpu().numpy()

    def get_cam_image(
        self,
        input_tensor: Tensor,
        target_layer: Any,
        targets: Sequence[OutputTarget],
        activations: Any,
        grads: Any,
        eigen_smooth: bool = False,
    ) -> Any:
        """Return the maps (N,*s) of one layer. A map is the sum of the weighted channels, or their first principal component."""
        weights = self.get_cam_weights(input_tensor, target_layer, targets, activations, grads)
        if weights.ndim < activations.ndim:
            weights = weights.reshape(*weights.shape, *[1] * (activations.ndim - weights.ndim))
        weighted = weights * activations
        return get_2d_projection(_to_array(weighted)) if eigen_smooth else weighted.sum(1)

    def _build_features_from_arrays(self, activations: Any, grads: Any) -> LayerFeatures:
        """Return the features of the current call with other activations and gradients."""
        features = self._features
        if features is None:
            raise RuntimeError("get_cam_weights and get_cam_image run inside of a call of the object")
        like = features.activation
        gradient = features.optional_gradient if grads is None else _to_tensor(grads, like)
        return replace(features, activation=_to_tensor(activations, like), optional_gradient=gradient)

    def _create_explainer(self, layer: str) -> LayerExplainer:
        """Create the explainer of a layer with the settings of pytorch-grad-cam."""
        explainer: Any = self.explainer
        if explainer.needs_gradient and not self.uses_gradients:
            explainer = ActivationChannelSum
        settings: dict[str, Any] = (
            {"batch_size": self.batch_size} if hasattr(self, "batch_size") and explainer.runs_model else {}
        )
        settings |= self._explainer_settings()
        created: LayerExplainer = explainer(
            self.model,
            layer,
            call_index=0,
            reshape=self._reshape_and_detach,
            on_nonfinite="warn",
            mode="as_is",
            **settings,
        )
        return created

    def _explainer_settings(self) -> dict[str, Any]:
        """Return the keyword arguments for the constructor of the explainer."""
        return {}

    @property
    def _has_formula_on_arrays(self) -> bool:
        """Whether the user's subclass implements `get_cam_weights` or `get_cam_image` for arrays."""
        methods = (getattr(type(self), name).__module__ for name in ("get_cam_weights", "get_cam_image"))
        instance = {"get_cam_weights", "get_cam_image"} & vars(self).keys()
        return bool(instance) or not all(name.startswith(__package__ or "") for name in methods)

    def _reshape_and_detach(self, output: Any) -> Tensor:
        values: Tensor = output if self.reshape_transform is None else self.reshape_transform(output)
        return values.detach()

    # --- all layers

    def forward(
        self, input_tensor: Tensor, targets: Sequence[OutputTarget] | None, eigen_smooth: bool = False
    ) -> Array:
        """Return the maps (N,H,W) of an input (N,C,H,W)."""
        input_tensor = to_device(input_tensor, self.device)
        self._targets = targets
        return self.aggregate_multi_layers(self.compute_cam_per_layer(input_tensor, targets, eigen_smooth))

    def compute_cam_per_layer(
        self, input_tensor: Tensor, targets: Sequence[OutputTarget] | None, eigen_smooth: bool
    ) -> Any:
        """Return one map (N,1,H,W) for each layer."""
        size = self.get_target_width_height(input_tensor)
        maps = []
        for features, layer in self._iter_features_and_modules(input_tensor):
            self._features = features
            activations: Any = features.activation
            grads: Any = features.optional_gradient
            if self._has_formula_on_arrays:
                activations, grads = _to_array(activations), _to_array(grads)
            cam = self.get_cam_image(input_tensor, layer, self._targets or [], activations, grads, eigen_smooth)
            maps.append(scale_cam_image(np.maximum(_to_array(cam), 0), size)[:, None])
        self._features = self._current_explainer = None
        return maps

    def _iter_features_and_modules(self, x: Tensor) -> Iterator[tuple[LayerFeatures, nn.Module]]:
        """Run one forward and one backward pass. Yield the features and the module of each layer.

        The features have the values that in-place operations of the model left in the layer's output.
        """
        names = [find_layer(self.model, layer)[0] for layer in self.target_layers]
        if not names:
            raise LayerError("target_layers is empty: name one layer at least")
        score, layer_explainers = self._create_score(x), [self._create_explainer(name) for name in names]
        outputs = OverwrittenOutputs(find_layers(self.model, self.target_layers), self._reshape_and_detach)
        with ExitStack() as stack:
            try:
                with outputs.recorded():
                    shared = stack.enter_context(SharedLayerPass(layer_explainers, names, x, [score]))
            except StructuredOutputError:
                yield from self._iter_structured_features_and_modules(x, names, layer_explainers)
                return
            indexed = dict(shared.iter_method_indices_and_features(0))
            if layer_explainers[0].runs_model:
                stack.close()
            for t in sorted(indexed, key=lambda t: list(outputs.outputs).index(names[t])):  # in the order of the pass
                features, left = indexed[t], outputs.outputs[names[t]].to(indexed[t].activation)
                if left.shape == features.activation.shape and not torch.equal(left, features.activation):
                    warn_once(
                        "overwritten",
                        f"layer {names[t]!r} is overwritten in place behind it: as in pytorch-grad-cam, the map multiplies the "
                        f"overwritten activation by the gradient from before; {self.camscope_call} uses the layer's own output",
                    )
                    features = replace(features, activation=left)
                self._current_explainer = layer_explainers[t]
                yield features, self.target_layers[t]

    def _create_score(self, x: Tensor) -> Score:
        """Create the score that sums what each target returns for its row of the output."""

        def compute_scores(output: Any) -> Tensor:
            if self.outputs is None:
                self.outputs = _detach(output)
            if self._targets is None:
                self._targets = self.choose_targets(output)
            pairs = zip(self._targets, output, strict=False)
            values = [_sum_target_result(target(row), self.device) for target, row in pairs]
            like = next((value for value in values if value.is_floating_point()), _sum_target_result(0.0, self.device))
            values += [like.new_zeros(())] * (len(x) - len(values))
            return torch.stack([value.to(like) for value in values])

        self.outputs = None
        return Score(self.model, compute_scores)

    def choose_targets(self, output: Any) -> list[OutputTarget]:
        """Return a target for each sample: the class with the highest score."""
        return [ClassifierOutputTarget(category) for category in output.detach().argmax(-1).tolist()]

    def aggregate_multi_layers(self, cam_per_target_layer: Any) -> Array:
        """Average the maps (N,1,H,W) of the layers, and return the mean (N,H,W) scaled to 0..1."""
        return scale_cam_image(np.maximum(np.concatenate(cam_per_target_layer, axis=1), 0).mean(axis=1))

    def get_target_width_height(self, input_tensor: Tensor) -> tuple[int, ...]:
        """Return the size of the maps: (W,H) for an image, (W,H,D) for a volume."""
        return tuple(reversed(input_tensor.shape[2:]))

    def forward_augmentation_smoothing(
        self, input_tensor: Tensor, targets: Sequence[OutputTarget] | None, eigen_smooth: bool = False
    ) -> Array:
        """Return the mean map over the input and its mirror image, each at three brightnesses."""
        maps = []
        for augment, restore in self._iter_augmentations():
            cams = torch.from_numpy(self.forward(augment(input_tensor), targets, eigen_smooth))
            maps.append(restore(cams[:, None])[:, 0].numpy())
        means: Array = np.asarray(maps, np.float32).mean(axis=0)
        return means

    def _iter_augmentations(self) -> Iterator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
        """Yield pairs of functions: one augments the input, the other undoes that on the maps."""
        if self.tta_transforms is not None:
            yield from ((transform.augment_image, transform.deaugment_mask) for transform in self.tta_transforms)
            return
        for restore in (lambda maps: maps, partial(torch.flip, dims=[3])):
            for factor in (0.9, 1.0, 1.1):
                yield partial(_flip_and_multiply, restore, factor), restore

    def __call__(
        self,
        input_tensor: Tensor,
        targets: Sequence[OutputTarget] | None,
        aug_smooth: bool = False,
        eigen_smooth: bool = False,
    ) -> Array:
        """Return the maps (N,H,W) of an input (N,C,H,W) as float32.

        Args:
            input_tensor: The model's input.
            targets: For each sample, a function of its output. With None, explain the class with the highest score.
            aug_smooth: Average over the input and its mirror image, each at three brightnesses.
            eigen_smooth: Take the first principal component of the weighted channels instead of their sum.

        """
        warn_once(
            "scaling",
            "as in pytorch-grad-cam, each map is stretched from its minimum to its maximum, so that maps of different images "
            f"and of unconfident models look alike; {self.camscope_call} keeps the values of the map",
        )
        smooth = self.forward_augmentation_smoothing if aug_smooth else self.forward
        return smooth(input_tensor, targets, eigen_smooth)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> bool:
        """Return True for an IndexError, so that Python suppresses it. pytorch-grad-cam does the same."""
        self.activations_and_grads.release()
        return isinstance(details[1], IndexError)

    def _iter_structured_features_and_modules(
        self, x: Tensor, names: Sequence[str], layer_explainers: Sequence[LayerExplainer]
    ) -> Iterator[tuple[LayerFeatures, nn.Module]]:
        """For a method without gradients, yield the features and the module of each layer that returns a structure of tensors."""
        if any(explainer.needs_gradient for explainer in layer_explainers):
            raise LayerError("a layer returns no tensor, and the method needs a gradient there: choose another layer")
        score = self._create_score(x)
        recorder = ActivationsAndGradients(self.model, self.target_layers, self.reshape_transform)
        try:
            with torch.no_grad():
                values = score(x)
        finally:
            recorded = list(recorder.activations)
            recorder.release()
        for name, layer, activation, explainer in zip(
            names, self.target_layers, recorded, layer_explainers, strict=False
        ):
            self._current_explainer = explainer
            yield self._build_structured_features(x, name, activation.to(self.device), score, values), layer

    def _build_structured_features(
        self, x: Tensor, name: str, activation: Tensor, score: Score, values: Tensor
    ) -> LayerFeatures:
        """Build the features of a model whose output is not a tensor of class scores."""
        return LayerFeatures(
            layer=name,
            activation=activation,
            x=x,
            score=score,
            values=values,
            layout=None,
            to_maps=self._reshape_and_detach,
            recompute=_raise_missing_gradient_error,
            compute_curvature=_raise_missing_gradient_error,
            batch_size=getattr(self, "batch_size", None),
        )


def _to_tensor(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=like.dtype, device=like.device)


def _sum_target_result(value: Any, device: torch.device) -> Tensor:
    """Return the sum of the result of a target. The result is a tensor or a number."""
    return value.sum() if isinstance(value, Tensor) else torch.tensor(float(value), device=device)


def _raise_missing_gradient_error(*args: object) -> Any:
    raise LayerError("a layer returns no tensor, and the method needs a gradient there: choose another layer")


def _flip_and_multiply(flip: Callable[[Tensor], Tensor], factor: float, x: Tensor) -> Tensor:
    return flip(x) * factor


def _to_array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _detach(output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output
