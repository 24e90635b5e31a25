"""Finer-CAM: Grad-CAM of a class compared with similar classes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.cam.gradcam_variants import GradCAM
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.validated_setting_types import Number, PositiveInteger
from camscope.targets import Score, class_scores, full_precision


@register
class FinerCAM(GradCAM):
    """Grad-CAM of a class compared with similar classes: y_c - gamma · mean of their logits (Zhang et al. 2025).

    The similar classes are those whose logits differ least from y_c in the clean pass, never c itself. Grad-CAM is
    linear before its ReLU, so this is the difference of the classes' maps before the ReLU. The reference code weights
    the similar classes by their probabilities, through which its gradient also flows. Here it is the mean. Use it for
    classes that look alike, such as two species of birds: it shows what sets the class apart.

    Args:
        gamma: Weight of the mean of the similar classes. 0 is Grad-CAM.
        n_references: Number of similar classes, at most all others.

    >>> explanation = FinerCAM(model, "layer4", n_references=1).explain(image, "nodule")
    >>> explanation.method_title, explanation.status
    ('Finer-CAM', 'ok')

    """

    name, title, paper = "finercam", "Finer-CAM", "arXiv:2501.11309"
    gamma: Number = 0.6
    n_references: PositiveInteger = 3

    def compute_differentiated_score(self, score: Score, output: Any, n_samples: int) -> Tensor:
        """Compute the logit of the class minus gamma times the mean logit of similar classes (N,)."""
        target_scores = score.read_score(output, n_samples)
        logits, classes = require_class_logits(self.name, score, output)
        distance = (logits - target_scores[:, None]).detach().abs().scatter(1, classes[:, None], torch.inf)
        closest = distance.argsort(dim=1, stable=True)[:, : min(self.n_references, logits.shape[1] - 1)]
        return target_scores - self.gamma * logits.gather(1, closest).mean(1)


class ClassLogits(NamedTuple):
    """The logits (N,K) of all classes, and the target class of each sample (N,)."""

    logits: Tensor
    classes: Tensor


def require_class_logits(method_name: str, score: Score, output: object) -> ClassLogits:
    """Return the logits and the target class of each sample. Raise TargetError if the target is not a class."""
    problem = "the target is a difference or a callable: pass a class, or use gradcam"
    if score.classes is not None:
        logits = class_scores(output)
        if logits.shape[1] > 1:
            return ClassLogits(full_precision(logits), score.classes)
        problem = "this model has one output: use gradcam"
    raise TargetError(f"{method_name} compares a class with the other classes, but {problem}")
