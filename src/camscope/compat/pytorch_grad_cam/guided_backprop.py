"""Guided backpropagation, under the names of pytorch-grad-cam."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from camscope import explainers
from camscope.compat.pytorch_grad_cam.base_cam import warn_once
from camscope.errors import ModelError
from camscope.targets import Score


class GuidedBackpropReLUModel:
    """Guided backpropagation, whose result is an array (H,W,C) for the first image of an input."""

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        self.model = model.eval()
        model_device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.device = model_device if device is None else torch.device(device)

    def forward(self, input_img: Tensor) -> Any:
        """Return the output of the model."""
        return self.model(input_img)

    def __call__(self, input_img: Tensor, target_category: int | None = None) -> npt.NDArray[Any]:
        """Return the guided gradient (H,W,C) of a class. By default, it is the class with the highest score."""
        x = input_img[:1].detach().to(self.device)
        try:
            signal = _Signal(self.model).compute_maps(x, [Score(self.model, target_category)])[0].attribution
        except ModelError:
            warn_once(
                "no ReLU",
                "guided backpropagation reaches no ReLU in this model: as in pytorch-grad-cam, the result is the plain gradient; "
                "camscope.Saliency(model).explain(image) is the method of that name",
            )
            signal = _PlainGradient(self.model).compute_maps(x, [Score(self.model, target_category)])[0].attribution
        return signal[0].movedim(0, -1).cpu().numpy()


class _Signal(explainers.GuidedBackprop):
    """Guided backpropagation that keeps the channels of the input, (N,C,H,W)."""

    def reduce_channels(self, values: Tensor) -> Tensor:
        """Keep all channels, as pytorch-grad-cam does."""
        return values


class _PlainGradient(explainers.Saliency):
    """The gradient at the input that keeps its channels, (N,C,H,W)."""

    def reduce_channels(self, values: Tensor) -> Tensor:
        """Keep all channels, as pytorch-grad-cam does."""
        return values
