"""Denoised: what most channels agree on."""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from camscope.explainers.base import Explainer
from camscope.explainers.cam import WeightedChannels
from camscope.explainers.features import Features
from camscope.explainers.maps import Maps
from camscope.explainers.method import Method
from camscope.explainers.principal import first_component
from camscope.explainers.run import made
from camscope.explainers.wrappers.base import Wrapper
from camscope.targets import Score


class Denoised(Wrapper):
    """The part of Σ_k of the channels' contributions that lies along their first principal component.

    A map (N,cells) is summed of contributions (N,K,cells); of the sum only its projection on their first right singular
    vector is kept, not centred, and the ReLU follows where the method has one. In score units; channels that all say the
    same leave the sum as it is. Round another wrapper it goes round what that is round: Denoised(Augmented(x)) is
    Augmented(Denoised(x)). A method that has one map only is its own first component: it is handed on, and a note says so.
    """

    name = "denoised"

    def __init__(self, explainer: Explainer) -> None:
        super().__init__(explainer)
        self.explainer = explainer

    @property
    def company(self) -> Hashable:
        """Methods that share passes share them denoised."""
        return (Denoised, self.explainer.company) if isinstance(self.explainer, WeightedChannels) else id(self)

    @staticmethod
    def maps_of(tools: Sequence[Method], x: Tensor, scores: Sequence[Score]) -> Sequence[Sequence[Maps]]:
        """[method][score]: the inner methods' passes, combined in another way."""
        inner = [tool.explainer for tool in tools if isinstance(tool, Denoised)]
        if not all(isinstance(one, WeightedChannels) for one in inner):
            return [tool.maps(x, scores) for tool in tools]
        return made([_combined(one) for one in inner if isinstance(one, WeightedChannels)], x, scores)

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """Of a wrapper, those that it makes of its inner ones, denoised."""
        inner = self.explainer
        if isinstance(inner, WeightedChannels):
            return list(self.maps_of([self], x, scores)[0])
        if isinstance(inner, Wrapper):
            round_it = inner if isinstance(inner, Denoised) else inner._round([Denoised(one) for one in inner.inner])
            return round_it.maps(x, scores)
        said = f"{inner.title} makes one map, which is its own first component: nothing was denoised"
        return [replace(one, notes=(*one.notes, said)) for one in inner.maps(x, scores)]


def _combined(method: WeightedChannels) -> WeightedChannels:
    """A copy that combines in another way; its passes are the method's."""
    principal = copy.copy(method)
    vars(principal)["combine"] = partial(_principal, method)
    return principal


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
