"""The original class activation map (CAM), weighted by a linear classifier."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from camscope.errors import LayerError, ModelError, TargetError
from camscope.explainers.cam.base import SPATIAL_AXIS, BaseWeightedChannels
from camscope.explainers.cam.layer_features import SCORE_TOLERANCE_BY_DTYPE, LayerFeatures
from camscope.explainers.core.base import register
from camscope.hooks.base import find_layer, unwrap
from camscope.plurals import plural

LinearHeads = dict[str, tuple[Tensor, Tensor]]


@register
class CAM(BaseWeightedChannels):
    """Each channel weighs its entry in the class's row of the linear head: Σ_k w_ck A_k, signed (Zhou et al. 2016).

    Of the difference of two classes, the difference of their rows. Its mean over the cells (its sum, where the head
    pools by a sum) is the score without its bias. That is measured, not believed: scores that are not the head of the
    layer's mean or sum, because a ReLU, a norm, attention, a maximum or a flattening makes something else of it, are a
    ModelError; Grad-CAM is the generalization. So Swin has a CAM at its last norm, ConvNeXt, whose norm follows the
    pooling, none. Where only a constant is added to the head's scores, that is told by an empty layer's, in two more
    passes. `head`: name or module of the Linear, or 1x1 convolution, that makes the class scores; None: the one with
    which they come out right.
    """

    name, title, paper = "cam", "CAM", "arXiv:1512.04150"
    runs_model: ClassVar[bool] = True
    relu: ClassVar[bool] = False
    head: str | nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None:
            self.head, module = find_layer(unwrap(self.model), self.head)
            if not _is_channelwise_linear(module):
                kind = type(module).__name__
                raise LayerError(f"head {self.head!r} is a {kind}; expected a Linear or a 1x1 convolution")

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        pairs, logits = features.score.class_pairs, features.score.logits
        if pairs is None or logits is None:
            raise TargetError(
                "cam weighs by a class's row of the head: pass a class, or the difference of two, not a callable; or use "
                "gradcam"
            )
        heads = self._find_linear_heads(features, logits.shape[1])
        if not heads:
            what = "no Linear or 1x1 convolution takes" if self.head is None else f"head {self.head!r} does not take"
            channels = f"the {plural(features.activation.shape[1], 'channel')} of layer {features.layer!r}"
            before = "name the layer before the head, or " if features.activation.shape[1] == logits.shape[1] else ""
            raise ModelError(
                f"cam needs a linear head, and {what} {channels} to {plural(logits.shape[1], 'class')}; {before}use gradcam, its "
                f"generalization"
            )
        rows = _find_exact_head_weights(features, logits, heads)
        rows = _find_head_weights_up_to_constant(features, pairs, heads) if rows is None else rows
        if rows is None and (dropped := _find_active_dropout(features.score.model)):
            raise ModelError(
                f"the class scores are not {' or '.join(map(repr, heads))} of layer {features.layer!r} while dropout is on, "
                f"at {dropped!r}: leave mode at 'eval', or use gradcam, the generalization of cam"
            )
        if rows is None:
            raise ModelError(
                f"the class scores are not {' or '.join(map(repr, heads))} of the mean or sum of layer "
                f"{features.layer!r}: something that is not linear lies between, or more than this layer is read; choose "
                f"the layer that is pooled, or use gradcam, the generalization of cam"
            )
        return _select_target_weights(rows, pairs)[..., None]

    def _find_linear_heads(self, features: LayerFeatures, n_classes: int) -> LinearHeads:
        """Find the linear modules that fit between layer and class scores: name to rows (classes,K) and bias."""
        like = features.activation
        heads: LinearHeads = {}
        for name, module in features.score.model.named_modules():
            if self.head in (None, name) and _is_channelwise_linear(module):
                weight, bias = module.weight.detach().flatten(1).to(like), module.bias
                if weight.shape == (n_classes, like.shape[1]):
                    heads[name] = weight, weight.new_zeros(n_classes) if bias is None else bias.detach().to(like)
        return heads


def _find_active_dropout(model: nn.Module) -> str | None:
    """Return the name of the first active dropout module."""
    return next(
        (n for n, module in model.named_modules() if isinstance(module, _DropoutNd) and module.training and module.p),
        None,
    )


def _is_channelwise_linear(module: nn.Module) -> bool:
    """Return whether a module maps channels to channels linearly, and equally at every cell."""
    if isinstance(module, _ConvNd):
        return set(module.kernel_size) == {1}
    return isinstance(module, nn.Linear)


def _pool_cells(features: LayerFeatures) -> tuple[Tensor, Tensor]:
    """Yield the pooled features (N,K) of each pooling that keeps a linear head linear in the cells."""
    cells = features.activation.flatten(2)
    return cells.mean(SPATIAL_AXIS), cells.sum(SPATIAL_AXIS)


def _find_exact_head_weights(features: LayerFeatures, logits: Tensor, heads: LinearHeads) -> Tensor | None:
    """Find the rows of the linear head that computes all class scores from the pooled layer."""
    for rows, bias in heads.values():
        for pooled in _pool_cells(features):
            if _equal_within_rounding(logits, pooled @ rows.T + bias, pooled.square() @ rows.square().T, logits.abs()):
                return rows
    return None


def _select_target_weights(head_weights: Tensor, class_pairs: Tensor) -> Tensor:
    """Return (N,K): the row of each sample's class, minus that of the class it is compared with."""
    first, second = class_pairs.T
    return torch.where(
        second[:, None] >= 0, head_weights[first] - head_weights[second.clamp(min=0)], head_weights[first]
    )


def _find_head_weights_up_to_constant(
    features: LayerFeatures, class_pairs: Tensor, heads: LinearHeads
) -> Tensor | None:
    """Find the rows of the linear head that computes the score difference to an empty layer."""
    every = torch.arange(len(features.x), device=features.x.device)
    empty = features.score_activations(len(every), lambda part: (Tensor.zero_, every[part]))
    gained, size = features.values - empty, features.values.abs() + empty.abs()
    for rows, _ in heads.values():
        for pooled in _pool_cells(features):
            terms = pooled * _select_target_weights(rows, class_pairs)
            if _equal_within_rounding(gained, terms.sum(1), terms.square().sum(1), size):
                return rows
    return None


def _equal_within_rounding(values: Tensor, expected: Tensor, sum_of_squares: Tensor, magnitude: Tensor) -> bool:
    """Whether values are the same to within rounding: of a sum of terms with these squares, and of these sizes."""
    allowed = (
        SCORE_TOLERANCE_BY_DTYPE.get(values.dtype, 1e-4) * sum_of_squares.sqrt()
        + 8 * torch.finfo(values.dtype).eps * magnitude
    )
    return bool(((values - expected).abs() <= allowed).all())
