"""Blocks: the modules around each self-attention, and passes in which none of them runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.attention import Attention
from camscope.hooks.base import Hooks, here_only, unwrap
from camscope.hooks.checkpoint import recomputing
from camscope.hooks.shadow import Stand, has_own, shadowed
from camscope.structure import Path, leaves, replaced
from camscope.wording import plural


@dataclass
class Block:
    """A module that held one self-attention of a pass; its output (N,T,K), a part of the graph, in what it returned."""

    name: str
    module: nn.Module
    output: Tensor
    path: Path
    returned: Any


class Blocks(Hooks):
    """Inside the `with`: which module was around each attention of a list that forward passes fill.

    A block is found by what it does: it is the outermost module that holds this attention and no other, and returns one
    tensor of as many tokens.
    """

    def __init__(self, model: nn.Module, attentions: list[Attention]) -> None:
        super().__init__()
        self._model, self._attentions = unwrap(model), attentions
        self._inside: list[tuple[nn.Module, int]] = []
        self._found: dict[int, Block] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.hold(module.register_forward_pre_hook(here_only(self._begin)))
                self.hold(module.register_forward_hook(here_only(partial(self._end, name))))
        return self

    def around(self, attentions: Sequence[Attention]) -> list[Block]:
        """The block of each of the attentions; a LayerError where they have none, or blocks of several kinds."""
        numbers = [next(i for i, one in enumerate(self._attentions) if one is wanted) for wanted in attentions]
        blocks = [self._found[i] for i in numbers if i in self._found]
        kinds = {(type(block.module), block.output.shape) for block in blocks}
        if len(blocks) < len(numbers) or len({id(block.module) for block in blocks}) < len(blocks) or len(kinds) > 1:
            raise LayerError(
                f"{plural(len(numbers), 'self-attention')}, and {plural(len(blocks), 'block')} around them ("
                f"{', '.join(dict.fromkeys(f'{b.name} {type(b.module).__name__}' for b in blocks)) or 'none'}): expected "
                f"as many modules of one class, each with one attention, that return one tensor of the tokens' shape"
            )
        return blocks

    def _begin(self, module: nn.Module, args: object) -> None:
        if not self._inside:
            self._found.clear()
        self._inside.append((module, len(self._attentions)))

    def _end(self, name: str, module: nn.Module, args: object, returned: Any) -> Any:
        before = next((count for one, count in reversed(self._inside) if one is module), -1)
        while self._inside and self._inside.pop()[0] is not module:
            pass
        if recomputing() or before < 0 or len(self._attentions) != before + 1:
            return None
        samples, _, _, tokens = self._attentions[before].probabilities.shape[:4]
        shapes = (samples, tokens), (tokens, samples)
        outputs = [(path, one) for path, one in leaves(returned) if one.ndim == 3 and tuple(one.shape[:2]) in shapes]
        if len(outputs) != 1:
            return None
        path, output = outputs[0]
        self._found[before] = Block(name, module, output, path, returned)
        return replaced(returned, path, output.clone())  # a next block may add to it in place


@contextmanager
def skipped(blocks: Sequence[Block], output: Tensor) -> Iterator[None]:
    """Passes of this thread in which no block runs: each returns what it did, the last one this output in its place."""
    for block in blocks:
        if has_own(block.module):
            raise LayerError(f"block {block.name!r} has a forward of its own on the instance: it cannot be left out")
    last = blocks[-1]
    stands: dict[nn.Module, Stand] = {block.module: partial(_hand_back, block.returned) for block in blocks}
    stands[last.module] = partial(_hand_back, replaced(last.returned, last.path, output))
    with shadowed(stands):
        yield


def _hand_back(returned: Any, module: nn.Module, args: object, kwargs: object) -> Any:
    return returned
