"""The original class activation map (CAM), which weights channels by the weights of a linear classifier."""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from camscope.errors import LayerError, ModelError, TargetError
from camscope.explainers.cam.layer_features_and_perturbed_scores import (
    SCORE_TOLERANCE_BY_DTYPE,
    ActivationVariants,
    LayerFeatures,
)
from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS, BaseWeightedChannels
from camscope.explainers.core.base_explainer import register
from camscope.hooks.find_layers import find_layer, unwrap
from camscope.plurals import plural

LinearHeads = dict[str, tuple[Tensor, Tensor]]


@register
class CAM(BaseWeightedChannels):
    """Sum of the channels, each weighted by the classifier's weight for the class: Σ_k w_ck A_k, signed (Zhou et al. 2016).

    The target may also be the difference of two classes, with the difference of their weights. The mean of the map over
    the cells, or its sum if the head pools by a sum, is the score without its bias. This is verified: a ModelError
    reports if the head does not read the mean or sum of the layer, because a ReLU, a norm, attention, a maximum or a
    flattening lies between. Grad-CAM is the generalization. Swin therefore has a CAM at its last norm. ConvNeXt has
    none, because its norm follows the pooling. If the scores differ from the head only by a constant, two more passes
    of an empty layer show it. Use it if the model has such a head: the map then explains the score exactly.

    Args:
        head: Name or module of the Linear or 1x1 convolution that computes the class scores. None: it is searched.

    Raises:
        LayerError: The head is not a Linear or a 1x1 convolution.

    >>> explanation = CAM(model, "layer4", head="fc").explain(image, "nodule")
    >>> bias = float(model.fc.bias[1].detach())
    >>> abs(float(explanation.attribution.mean()) + bias - explanation.score) < 1e-3
    True

    """

    name, title, paper = "cam", "CAM", "arXiv:1512.04150"
    runs_model, relu = True, False
    head: str | nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None:
            self.head, module = find_layer(unwrap(self.model), self.head)
            if not _is_linear_or_1x1_convolution(module):
                kind = type(module).__name__
                raise LayerError(f"head {self.head!r} is a {kind}; expected a Linear or a 1x1 convolution")

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """Return the weights (N,K,1) of the linear head for the target class. Raise ModelError if no head fits."""
        score, layer, K = features.score, features.layer, features.activation.shape[1]
        pairs, logits = score.class_pairs, score.logits
        if pairs is None or logits is None:
            raise TargetError(
                "cam uses the classifier weights of a class, and a callable target has no class: pass a class, or the difference "
                "of two classes, or use gradcam"
            )
        n_classes = logits.shape[1]
        heads = self._find_linear_heads(features, n_classes)
        if not heads:
            missing = "no Linear or 1x1 convolution maps" if self.head is None else f"head {self.head!r} does not map"
            layer_hint = "name the layer before the head, or " if n_classes == K else ""
            raise ModelError(
                f"cam needs a linear head, and {missing} the {plural(K, 'channel')} of layer {layer!r} to "
                f"{plural(n_classes, 'class')}; {layer_hint}use gradcam, its generalization"
            )
        rows = _find_head_weights_of_all_classes(features, logits, pairs, heads)
        if rows is not None:
            return _select_target_weights(rows, pairs)[..., None]
        head_names = " or ".join(map(repr, heads))
        modules = score.model.named_modules()
        dropouts = [name for name, m in modules if isinstance(m, _DropoutNd) and m.training and m.p]
        if dropouts:
            raise ModelError(
                f"the class scores differ from {head_names} of layer {layer!r}, because dropout {dropouts[0]!r} is on: set "
                f"mode='eval', or use gradcam, which generalizes cam"
            )
        raise ModelError(
            f"the class scores are not {head_names} of the mean or sum of layer {layer!r}: an operation between them is not "
            f"linear, or {head_names} also reads other layers; choose the layer that is pooled, or use gradcam, the "
            f"generalization of cam"
        )

    def _find_linear_heads(self, features: LayerFeatures, n_classes: int) -> LinearHeads:
        """Find the linear modules that map the channels of the layer to the classes. Return their weights and biases by name."""
        like, heads = features.activation, LinearHeads()
        for name, module in features.score.model.named_modules():
            if self.head in (None, name) and _is_linear_or_1x1_convolution(module):
                weight, bias = module.weight.detach().flatten(1).to(like), module.bias
                if weight.shape == (n_classes, like.shape[1]):
                    heads[name] = weight, weight.new_zeros(n_classes) if bias is None else bias.detach().to(like)
        return heads


def _is_linear_or_1x1_convolution(module: nn.Module) -> bool:
    """Whether a module is a Linear or a 1x1 convolution. Both mix the channels of a cell linearly."""
    if isinstance(module, _ConvNd):
        return set(module.kernel_size) == {1}
    return isinstance(module, nn.Linear)


def _find_head_weights_of_all_classes(
    features: LayerFeatures, logits: Tensor, class_pairs: Tensor, heads: LinearHeads
) -> Tensor | None:
    """Find the head that computes the class scores from the pooled layer. Return its weights (classes,K), or None if
    there is no such head.
    """
    cells = features.activation.flatten(2)
    poolings = cells.mean(SPATIAL_AXIS), cells.sum(SPATIAL_AXIS)  # these keep a linear head linear in the cells
    candidates = [(rows, bias, pooled) for rows, bias in heads.values() for pooled in poolings]
    for rows, bias, pooled in candidates:
        if _is_equal_within_rounding(logits, pooled @ rows.T + bias, pooled.square() @ rows.square().T, logits.abs()):
            return rows
    samples = torch.arange(len(features.x), device=features.x.device)
    empty = features.score_activations(len(samples), lambda part: ActivationVariants(Tensor.zero_, samples[part]))
    gained, size = features.values - empty, features.values.abs() + empty.abs()
    for rows, _, pooled in candidates:
        terms = pooled * _select_target_weights(rows, class_pairs)
        if _is_equal_within_rounding(gained, terms.sum(1), terms.square().sum(1), size):
            return rows
    return None


def _select_target_weights(head_weights: Tensor, class_pairs: Tensor) -> Tensor:
    """Select the head weights (N,K) of the target class of each sample. If the target compares two classes, subtract
    the weights of the second.
    """
    first, second = class_pairs.T
    rows = head_weights[first]
    return torch.where(second[:, None] >= 0, rows - head_weights[second.clamp(min=0)], rows)


def _is_equal_within_rounding(values: Tensor, expected: Tensor, sum_of_squares: Tensor, magnitude: Tensor) -> bool:
    """Whether the sums `values` equal `expected` within rounding. `sum_of_squares` is the sum of the squared terms."""
    tolerance = SCORE_TOLERANCE_BY_DTYPE.get(values.dtype, 1e-4)
    allowed = tolerance * sum_of_squares.sqrt() + 8 * torch.finfo(values.dtype).eps * magnitude
    return bool(((values - expected).abs() <= allowed).all())
