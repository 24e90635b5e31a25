"""Many versions of one layer's output, in one pass: what comes before the layer runs once for all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from camscope.hooks.base import Hooks, find_layer, here_only, unwrap
from camscope.hooks.checkpoint import plain_checkpoints
from camscope.structure import replaced, the_tensor


@contextmanager
def branched(
    model: nn.Module,
    layer: str | nn.Module,
    owners: Tensor,
    change: Callable[[Tensor], Tensor],
    *,
    output: str | int | None = None,
    call: int = 0,
) -> Iterator[None]:
    """Inside the `with` a layer hands on R versions of its N rows, row i a copy of row owners[i], as `change` makes them.

        with branched(model, "layer4", torch.zeros(512, dtype=int), without_one_channel_each):
            scores = model(x)        # (512,): the layers up to layer4 saw one image, the rest 512

    `owners` (R,) int64; `change`: (R,...) -> (R,...), may work in place. Only call number `call` is changed. A model
    that joins the layer's output to something of N rows raises its own error, unless N = 1, where that is right.
    """
    name, module = find_layer(unwrap(model), layer)
    seen = 0

    def grow(module: nn.Module, args: object, result: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen != call + 1:
            return None
        path, tensor = the_tensor(name, result, output)
        return replaced(result, path, change(tensor.index_select(0, owners)))

    with Hooks() as hooks, plain_checkpoints():
        hooks.hold(module.register_forward_hook(here_only(grow)))
        yield
