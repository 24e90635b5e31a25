"""Attentions: every self-attention of one forward pass, in whatever layer and by whatever kernel it is computed."""

from collections.abc import Callable
from typing import Self, TypeVar

import torch

from camscope.errors import LayerError
from camscope.hooks.attention_watch import Attention, Watch
from camscope.hooks.base import Hooks, autocast_uncached
from camscope.hooks.checkpoint import plain_checkpoints

__all__ = ["Attention", "Attentions"]

T = TypeVar("T")


class Attentions(Hooks):
    """The self-attentions of a forward pass, in the order in which they are computed, without touching the model.

        with Attentions() as seen:
            scores = seen.run(lambda: model(x))
            torch.autograd.grad(scores.sum(), [one.probabilities for one in seen.all])

    Fused kernels are computed anew from their queries and keys; elsewhere a softmax over the last axis of (…,T,T) is an
    attention. The graph starts at the first one: what comes before runs without gradients. Cross-attention is left out.
    Only the thread that entered the `with` is watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Attention] = []

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.enter_context(torch.inference_mode(False))
            self.enter_context(torch.no_grad())
            self.enter_context(autocast_uncached())
            self.enter_context(plain_checkpoints())
            self._watch: Watch = self.enter_context(Watch(self.all))  # a checkpoint that runs again must find it, too
        except BaseException:
            self.close()
            raise
        return self

    def run(self, forward: Callable[[], T]) -> T:
        """The result of a forward pass; done again with gradients on everywhere where the model turned them off."""
        result = self._watch.during(forward)
        if self.all and (self._watch.cut or not torch.is_grad_enabled()):
            self.all.clear()
            torch.set_grad_enabled(True)
            result = self._watch.during(forward)
        if not self.all:
            raise LayerError(
                "no self-attention was seen in the forward pass: the method is for transformers, and reads attention "
                "between tokens; for any other model pass a method that looks at a layer, such as gradcam"
            )
        torch.set_grad_enabled(True)  # for the score, even where the model switches them off and never back on
        return result
