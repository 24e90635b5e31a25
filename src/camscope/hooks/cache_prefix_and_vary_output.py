"""Run the part of a model before a layer once, and the part after it for many variants of the layer's output.

- `replace_output_by_variants` replaces the output of a layer by many variants of it.
- `PrefixCache` stores the outputs before a layer, so that later forward passes of the same input skip these layers.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from camscope.hooks.find_layers import find_layer, unwrap
from camscope.hooks.intercept_torch_functions import has_instance_forward, override_forward
from camscope.hooks.thread_local_hooks import Hooks, has_global_hooks, reentrant_checkpoints_disabled, thread_local_hook
from camscope.pytree import find_main_tensor, iter_leaves, replace_leaf
from camscope.unusual_tensors import describe_unusual_tensor


@contextmanager
def replace_output_by_variants(
    model: nn.Module,
    layer: str | nn.Module,
    sample_index: Tensor,
    transform: Callable[[Tensor], Tensor],
    *,
    output_index: str | int | None = None,
    call_index: int = 0,
) -> Iterator[None]:
    """Replace a layer's N output rows by R other rows inside the `with`. Row i is `transform` of row `sample_index[i]`.

        with replace_output_by_variants(model, "layer4", torch.zeros(512, dtype=int), remove_one_channel_each):
            scores = model(x)        # (512,): the layers up to layer4 ran on one image, the rest on 512

    `sample_index` (R,) is int64. `transform` maps (R,...) to (R,...) and may work in place. Only call number
    `call_index` of the layer is changed. If the model joins the output with a tensor of N rows, it raises its own
    error. With N = 1 broadcasting gives the right result.
    """
    name, module = find_layer(unwrap(model), layer)
    n_calls = 0

    def replace_by_variants(module: nn.Module, args: object, result: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls != call_index + 1:
            return None
        path, tensor = find_main_tensor(name, result, output_index)
        return replace_leaf(result, path, transform(tensor.index_select(0, sample_index)))

    with Hooks() as hooks, reentrant_checkpoints_disabled():
        hooks.add_handle(module.register_forward_hook(thread_local_hook(replace_by_variants)))
        yield


MAX_CACHED_BYTES = 2**28  # bytes that are stored, the last outputs first


class PrefixCache:
    """Cache for repeated forward passes of one input, each inside `with cache:`, in one thread and without gradients.

    The first pass stores the outputs of the modules before the layer and of the layer itself, up to its call number
    `call_index`. Later passes reuse them. A module runs again if it is in train mode, is TorchScript, has hooks inside,
    or changes its input in place. So does a module whose output was changed later. If the model draws random numbers,
    nothing is reused.
    """

    def __init__(self, model: nn.Module, layer: str | nn.Module, call_index: int = 0) -> None:
        name, self._layer = find_layer(unwrap(model), layer)
        self.call_index, self._modules = call_index, _find_cacheable_modules(unwrap(model), name)
        self._outputs: dict[tuple[int, int], tuple[Tensor, int]] = {}  # by module and call: an output and its version
        self._is_filled = False

    def __enter__(self) -> Self:
        self._call_counts, self._is_past_layer, self._start_random_states = Counter[int](), False, _read_random_states()
        self._overrides = override_forward(dict.fromkeys(self._modules, self.run_module_or_use_cache))
        self._overrides.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._overrides.__exit__(None, None, None)
        if not self._is_filled:
            is_random = not all(map(torch.equal, self._start_random_states, _read_random_states()))
            self._is_filled = kind is None and self._is_past_layer and not is_random
            free_bytes, outputs = MAX_CACHED_BYTES, self._outputs if self._is_filled else {}
            self._outputs = {}
            for key, (output, version) in reversed(outputs.items()):
                free_bytes -= output.nbytes
                if free_bytes >= 0:
                    self._outputs[key] = output, version

    @property
    def has_cached_outputs(self) -> bool:
        """Whether there are cached outputs for the next forward pass."""
        return bool(self._outputs)

    def run_module_or_use_cache(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a module's forward: return the cached output if there is one. Otherwise run the module."""
        key = id(module), self._call_counts[id(module)]
        self._call_counts[id(module)] += 1
        cached = self._outputs.get(key) if self._is_filled and not self._is_past_layer else None
        if cached and cached[0]._version == cached[1]:
            output: Any = cached[0]
        else:
            inputs = [leaf for _, leaf in iter_leaves((args, kwargs))]
            before = list(map(_get_version_counter, inputs))
            output = type(module).forward(module, *args, **kwargs)
            is_cacheable = isinstance(output, Tensor) and not (
                output.requires_grad or output.is_inference() or describe_unusual_tensor(output)
            )
            is_cacheable = is_cacheable and before == list(map(_get_version_counter, inputs))
            if is_cacheable and not self._is_filled and not self._is_past_layer:
                self._outputs[key] = output, output._version
        self._is_past_layer = self._is_past_layer or (module is self._layer and key[1] == self.call_index)
        return output


def _find_cacheable_modules(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the layer and the preceding modules with cacheable outputs.
    Return [] if the output of the layer itself is not cacheable.
    """
    path, candidates = [model], list[nn.Module]()
    for part in name.split(".") if name else []:
        candidates += path[-1].children()
        path.append(path[-1].get_submodule(part))
    off_path = [m for m in dict.fromkeys(candidates) if m not in path[:-1] and path[-1] not in [*m.modules()][1:]]
    usable = list(filter(_is_cacheable, off_path))
    inside = {part for module in usable for part in [*module.modules()][1:]}
    cacheable = [module for module in usable if module not in inside]
    has_replicas = any(isinstance(part, nn.DataParallel) for part in model.modules())  # replicas would share the shadow
    return cacheable if path[-1] in cacheable and not (has_replicas or has_global_hooks()) else []


def _is_cacheable(module: nn.Module) -> bool:
    """Whether the output of a module can be cached. The module must be in eval mode, without hooks or patched forwards inside."""
    parts = [*module.modules()]
    usual = not any(has_instance_forward(part) or part.training for part in parts)
    heard = any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])
    return usual and not heard


def _get_version_counter(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _read_random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
