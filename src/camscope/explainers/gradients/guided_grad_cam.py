"""Guided Grad-CAM: where Grad-CAM looks, in the detail of guided backpropagation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from camscope.explainers.at_layer import AtLayer
from camscope.explainers.base import register
from camscope.explainers.gradient_cam import GradCAM
from camscope.explainers.gradients.base import Rectified
from camscope.explainers.maps import Maps
from camscope.explainers.masks import enlarged
from camscope.hooks.rectifiers import Rule
from camscope.targets import Score


@register
class GuidedGradCAM(Rectified, AtLayer):
    """Grad-CAM of a layer, linearly enlarged, times guided backpropagation, cell by cell (Selvaraju et al. 2017, section 3.2)."""

    name, paper = "guidedgradcam", "arXiv:1610.02391"
    forwards: ClassVar[str] = "2"
    backwards: ClassVar[str] = "2"
    rule: ClassVar[Rule] = "guided"

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from two forward passes, two backward passes each."""
        cams = self.settled(x, scores[0]).sibling(GradCAM).maps(x, scores)
        signals = super().maps(x, scores)
        chosen = self.told(str(cams[0].layer), scores[0].model)
        return [self._product(x, cam, signal, chosen) for cam, signal in zip(cams, signals, strict=True)]

    def _product(self, x: Tensor, cam: Maps, signal: Maps, chosen: Sequence[str]) -> Maps:
        nothing = [one.zero_gradient for one in (cam, signal) if one.zero_gradient is not None]
        return replace(
            cam,
            heat=enlarged(cam.heat, x)
            * signal.heat,  # no CAM is negative: over the channels before or after is the same
            zero_gradient=nothing[0] | nothing[-1],
            notes=(*chosen, *cam.notes, *signal.notes),
        )
