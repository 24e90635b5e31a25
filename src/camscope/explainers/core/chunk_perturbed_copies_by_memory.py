"""Chunks of perturbed copies of an input, as large as memory allows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.hooks.wrap_black_box_function_as_module import is_opaque
from camscope.pytree import iter_leaves

DEFAULT_MEMORY_BUDGET_BYTES = 2**28  # if the device does not report its memory
OPAQUE_ACTIVATION_FACTOR = 16  # assumed bytes of the largest activation per byte of the input
LIVE_TENSORS_PER_PASS = 4  # largest tensors that exist at a time: input, output, a residual, a workspace


@dataclass
class ActivationBytes:
    """Bytes of the largest module output in a forward pass, in the whole model and from one layer on."""

    largest_in_model: int = 1
    largest_behind_layer: int = 1
    sum_of_outputs: int = 1  # over all leaf modules, which a backward pass keeps


@contextmanager
def measure_activation_bytes(
    model: nn.Module, layers: dict[str, nn.Module], x: Tensor | None = None
) -> Iterator[dict[str, ActivationBytes]]:
    """Measure how many bytes the activations of each layer take in a forward pass inside the `with`. Yield bytes by layer name.

    The activations inside TorchScript or a function are not seen. If there is such a module, they are taken to be a
    multiple of the input x (N,C,*S).
    """
    widths = {name: ActivationBytes() for name in layers}
    if x is not None and any(map(is_opaque, model.modules())):
        for width in widths.values():
            width.largest_in_model = OPAQUE_ACTIVATION_FACTOR * x.numel() * x.element_size()
    names = {id(module): name for name, module in layers.items()}
    started_layers: set[str] = set()

    def record_output_size(module: nn.Module, args: object, output: object) -> None:
        started_layers.update(filter(None, [names.get(id(module))]))
        size = max((leaf.numel() * leaf.element_size() for _, leaf in iter_leaves(output)), default=0)
        for name, width in widths.items():
            width.largest_in_model = max(width.largest_in_model, size)
            width.sum_of_outputs += 0 if module._modules else size
            if name in started_layers:
                width.largest_behind_layer = max(width.largest_behind_layer, size)

    with Hooks() as hooks:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which accepts no hooks
                hooks.add_handle(module.register_forward_hook(thread_local_hook(record_output_size)))
        yield widths


def compute_memory_budget_of_pass(device: torch.device, default: int | None = None) -> int:
    """Return how many bytes one forward pass may use: a quarter of the free GPU memory, or a constant on other devices."""
    if device.type == "cuda":
        return max(DEFAULT_MEMORY_BUDGET_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    return default or DEFAULT_MEMORY_BUDGET_BYTES


def count_copies_that_fit_in_memory(bytes_per_copy: int, device: torch.device) -> int:
    """Return the number of copies of a sample that fit into the available memory in one forward pass.

    `bytes_per_copy`: the bytes of the largest tensor of one copy.
    """
    return max(1, compute_memory_budget_of_pass(device) // (LIVE_TENSORS_PER_PASS * bytes_per_copy))


def process_chunks(count: int, chunk_size: int, process_chunk: Callable[[slice], bool | None]) -> int:
    """Process items chunk by chunk. Return how many of the `count` items were processed.

    `process_chunk` is called with one slice after another. If it returns True, the loop ends. If memory runs out, the
    chunk is halved and tried again. So `process_chunk` must not store a part of its result.
    """
    done, chunk_size = 0, max(1, chunk_size)
    while done < count:
        part = slice(done, min(done + chunk_size, count))
        try:
            enough = process_chunk(part)
        except torch.OutOfMemoryError:
            if chunk_size == 1:
                raise
            torch.cuda.empty_cache()
            chunk_size //= 2
            continue
        done = part.stop
        if enough:
            break
    return done


def map_chunks(count: int, chunk_size: int, compute_chunk: Callable[[slice], Tensor]) -> Tensor:
    """Compute `count` values chunk by chunk: call `compute_chunk` with slices. Return the concatenated values (count,)."""
    done: list[Tensor] = []
    process_chunks(count, chunk_size, lambda part: done.append(compute_chunk(part)))
    return torch.cat(done) if done else torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(kw_only=True, eq=False, repr=False)
class BatchedMixin(BaseMethod):
    """A method that shows the model many variants of an image.

    Args:
        batch_size: Variants per pass. None: as many as fit into memory.

    """

    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(None, batch_size=self.batch_size)
