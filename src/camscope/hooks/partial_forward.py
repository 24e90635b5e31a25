"""Many versions of one layer's output, in one pass: what comes before the layer runs once for all of them.

Replay: of many passes of one input, only the first one runs what comes before a layer.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from camscope.hooks.base import Hooks, find_layer, here_only, plain_checkpoints, unwrap
from camscope.hooks.function_mode import has_own, shadowed
from camscope.pytree import leaves, replaced, the_tensor, unusual


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


LIMIT = 2**28  # bytes that are remembered, the last outputs first


class Replay:
    """Passes of one input through one model, each under `with replay:`, all in one thread, without gradients.

    The first pass remembers the outputs of the modules beside the path to the layer, and of the layer itself, until its
    call number `call` is done; later passes are handed them. What changes its input in place, what is changed later on,
    what has hooks inside, trains or is TorchScript runs again; so does everything in a model that draws random numbers.
    """

    def __init__(self, model: nn.Module, layer: str | nn.Module, call: int = 0) -> None:
        name, self._layer = find_layer(unwrap(model), layer)
        self.call, self._modules = call, _beside(unwrap(model), name)
        self._outputs: dict[tuple[int, int], tuple[Tensor, int]] = {}  # by module and call: an output and its version
        self._ready = False

    def __enter__(self) -> Self:
        self._calls, self._over, self._random = Counter[int](), False, _random_states()
        self._shadows = shadowed(dict.fromkeys(self._modules, self.run))
        self._shadows.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._shadows.__exit__(None, None, None)
        if not self._ready:
            self._ready = kind is None and self._over and all(map(torch.equal, self._random, _random_states()))
            room, found = LIMIT, self._outputs if self._ready else {}
            self._outputs = {}
            for place, (output, version) in reversed(found.items()):
                room -= output.nbytes
                if room >= 0:
                    self._outputs[place] = output, version

    @property
    def remembers(self) -> bool:
        """Whether the next pass is handed anything."""
        return bool(self._outputs)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's own forward returns, or returned in the first pass."""
        place = id(module), self._calls[id(module)]
        self._calls[id(module)] += 1
        known = self._outputs.get(place) if self._ready and not self._over else None
        if known and known[0]._version == known[1]:
            output: Any = known[0]
        else:
            given = [leaf for _, leaf in leaves((args, kwargs))]
            before = list(map(_version, given))
            output = type(module).forward(module, *args, **kwargs)
            plain = isinstance(output, Tensor) and not (
                output.requires_grad or output.is_inference() or unusual(output)
            )
            if not self._ready and not self._over and plain and before == list(map(_version, given)):
                self._outputs[place] = output, output._version
        self._over = self._over or (module is self._layer and place[1] == self.call)
        return output


def _beside(model: nn.Module, name: str) -> list[nn.Module]:
    """The layer and the modules beside the path to it that can be replayed; none where the layer cannot."""
    path, found = [model], list[nn.Module]()
    for part in name.split(".") if name else []:
        found += path[-1].children()
        path.append(path[-1].get_submodule(part))
    usable = [
        m for m in dict.fromkeys(found) if m not in path[:-1] and path[-1] not in [*m.modules()][1:] and _is_plain(m)
    ]
    inside = {part for module in usable for part in [*module.modules()][1:]}
    beside = [module for module in usable if module not in inside]
    copied = any(isinstance(part, nn.DataParallel) for part in model.modules())  # replicas would share the shadow
    return beside if path[-1] in beside and not (copied or everywhere._has_any_global_hook()) else []


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward and leaves nothing but its output."""
    parts = [*module.modules()]
    usual = not any(has_own(part) or part.training for part in parts)
    heard = any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])
    return usual and not heard


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
