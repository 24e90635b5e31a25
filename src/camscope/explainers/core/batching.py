"""How many altered copies of an input fit into one pass.

Draws: random numbers that a setting fixes, and that nobody else's depend on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from camscope.explainers.core.evaluation_context import check_integer, check_positive_integer
from camscope.explainers.core.method import BaseMethod
from camscope.hooks.base import Hooks, thread_local_hook
from camscope.pytree import iter_leaves

DEFAULT_MEMORY_BUDGET_BYTES = 2**28  # bytes, where a device does not say what it has
LIVE_TENSORS_PER_PASS = (
    4  # tensors as large as the widest one that live at a time: input, output, a residual, a kernel's own
)


@dataclass
class ActivationBytes:
    """Bytes of the widest tensor that any module handed on in a pass: in the whole model, and from one layer on."""

    largest_in_model: int = 1
    largest_behind_layer: int = 1
    sum_of_outputs: int = (
        1  # not of the widest, but of all that modules without parts handed on: what a backward pass keeps
    )


@contextmanager
def measure_activation_bytes(model: nn.Module, layers: dict[str, nn.Module]) -> Iterator[dict[str, ActivationBytes]]:
    """Widths by layer, of the pass inside the `with`."""
    widths = {name: ActivationBytes() for name in layers}
    names = {id(module): name for name, module in layers.items()}
    begun: set[str] = set()

    def note(module: nn.Module, args: object, output: object) -> None:
        begun.update(filter(None, [names.get(id(module))]))
        size = max((leaf.numel() * leaf.element_size() for _, leaf in iter_leaves(output)), default=0)
        for name, width in widths.items():
            width.largest_in_model = max(width.largest_in_model, size)
            width.sum_of_outputs += size if not module._modules else 0
            width.largest_behind_layer = (
                max(width.largest_behind_layer, size) if name in begun else width.largest_behind_layer
            )

    with Hooks() as hooks:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.add_handle(module.register_forward_hook(thread_local_hook(note)))
        yield widths


def count_copies_in_memory(bytes_per_copy: int, device: torch.device) -> int:
    """Copies of one sample whose widest tensor has so many bytes that a pass may hold."""
    budget = DEFAULT_MEMORY_BUDGET_BYTES
    if device.type == "cuda":
        budget = max(DEFAULT_MEMORY_BUDGET_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    return max(1, budget // (LIVE_TENSORS_PER_PASS * bytes_per_copy))


def process_chunks(count: int, chunk_size: int, process_chunk: Callable[[slice], bool | None]) -> int:
    """Call `process_chunk` with one piece after the other until it returns True -> how many of `count` were worked off.

    Where memory ends, pieces are halved and tried again, so `process_chunk` must add what it found only when it has all of it.
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
    """(count,): run(slice) of one piece after the other; see `process_chunks`."""
    done: list[Tensor] = []
    process_chunks(count, chunk_size, lambda part: done.append(compute_chunk(part)))
    return torch.cat(done) if done else torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(kw_only=True, eq=False, repr=False)
class BatchedMixin(BaseMethod):
    """A method that shows the model many versions of an image. `batch_size`: in one pass; None: as many as fit into memory."""

    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(None, batch_size=self.batch_size)


@dataclass(kw_only=True, eq=False, repr=False)
class RandomMixin(BaseMethod):
    """A method that draws. `seed`: of all that is drawn, on the CPU: the same numbers on every device."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(seed=self.seed)

    def generator(self) -> torch.Generator:
        """Where its numbers come from, from the first on."""
        return torch.Generator(device="cpu").manual_seed(self.seed)


def draw_seeds(count: int, generator: torch.Generator) -> list[int]:
    """So many, one for each turn: what a turn draws does not depend on which turns run with it."""
    drawn: list[int] = torch.randint(2**63 - 1, (count,), generator=generator, device="cpu").tolist()
    return drawn


def draw_normal(seeds: Sequence[int], template: Tensor) -> Tensor:
    """(C,*S) -> (R,C,*S): standard normal numbers, each row from a seed of its own."""
    generator = torch.Generator(device="cpu")
    rows = [
        torch.randn(template.shape, generator=generator.manual_seed(one), dtype=torch.float32, device="cpu")
        for one in seeds
    ]
    return torch.stack(rows).to(template)
