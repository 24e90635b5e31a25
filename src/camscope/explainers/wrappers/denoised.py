"""Denoised: what most channels agree on."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from camscope.explainers.base import Explainer
from camscope.explainers.cam import WeightedChannels
from camscope.explainers.features import Features
from camscope.explainers.maps import Maps
from camscope.explainers.principal import first_component
from camscope.explainers.wrappers.base import Wrapper
from camscope.explainers.wrappers.contrast import Contrast
from camscope.targets import Score


class Denoised(Wrapper):
    """The part of Σ_k of the channels' contributions that lies along their first principal component.

    A map (N,cells) is summed of contributions (N,K,cells); of the sum only its projection on their first right singular
    vector is kept, not centred, and the ReLU follows where the method has one. In score units; channels that all say the
    same leave the sum as it is. A method that has one map only is its own first component: it is handed on, and a note
    says so.
    """

    name = "denoised"

    def __init__(self, explainer: Explainer) -> None:
        super().__init__(explainer)
        self.explainer = explainer

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The inner method's passes, combined in another way."""
        method = self.explainer
        while isinstance(method, Contrast):  # it only asks another question
            method = method.explainer
        if not isinstance(method, WeightedChannels):
            said = f"{method.title} makes one map, which is its own first component: nothing was denoised"
            return [replace(one, notes=(*one.notes, said)) for one in method.maps(x, scores)]
        principal = copy.copy(method)
        vars(principal)["combine"] = partial(_principal, method)  # of this copy alone; its passes are the method's
        return principal.maps(x, scores)


def _principal(method: WeightedChannels, features: Features) -> Tensor:
    """(N,*s): the sum's projection on the first component's direction, and the method's ReLU."""
    parts = method.contributions(features)
    total, component = parts.sum(1), first_component(parts)
    size = component.abs().amax(1, keepdim=True)
    along = torch.where(size > 0, component / size, 0)  # at 1, where a square neither vanishes nor overflows
    length = along.square().sum(1, keepdim=True)
    share = torch.where(length > 0, (total * along).sum(1, keepdim=True) / length, 0)
    cells = share * along
    return (cells.relu() if method.relu else cells).view(len(cells), *features.activation.shape[2:])
