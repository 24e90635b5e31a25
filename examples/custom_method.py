"""A method of your own
====================

A CAM method of your own: ten lines, and it has everything the built-in ones have.
"""

from torch import Tensor

from camscope import load_model
from camscope.explainers import METHODS, SPATIAL_AXIS, BaseCAM, register
from camscope.phantom import draw_radiograph


@register
class PositiveGradCAM(BaseCAM):
    """Each channel weighs the mean of its positive gradients: relu Σ_k mean(relu(g_k)) A_k."""

    name, paper = "positive-gradcam", "this file"

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """(N,K,cells) each -> (N,K,1): the cells of a 1-D, 2-D or 3-D grid lie on the last axis, SPATIAL_AXIS."""
        return gradient.relu().mean(SPATIAL_AXIS, keepdim=True)


def main() -> None:
    """Use the method by class and by name."""
    scan = draw_radiograph(seed=3, finding="effusion")
    model = load_model("phantom")
    explanation = PositiveGradCAM(model, "layer4").explain(scan.image, "effusion")
    print(explanation.caption, explanation.status, explanation.attribution.shape)
    print("registered:", ", ".join(METHODS))


if __name__ == "__main__":
    main()
