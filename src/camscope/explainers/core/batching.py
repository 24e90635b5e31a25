"""How many altered copies of an input fit into one pass.

Draws: random numbers that a setting fixes, and that nobody else's depend on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from camscope.explainers.core.evaluation_context import expect_count, expect_whole
from camscope.explainers.core.method import Method
from camscope.hooks.base import Hooks, here_only
from camscope.pytree import leaves

BUDGET = 2**28  # bytes, where a device does not say what it has
LIVE = 4  # tensors as large as the widest one that live at a time: input, output, a residual, a kernel's own


@dataclass
class Widths:
    """Bytes of the widest tensor that any module handed on in a pass: in the whole model, and from one layer on."""

    whole: int = 1
    rest: int = 1
    total: int = 1  # not of the widest, but of all that modules without parts handed on: what a backward pass keeps


@contextmanager
def measured(model: nn.Module, layers: dict[str, nn.Module]) -> Iterator[dict[str, Widths]]:
    """Widths by layer, of the pass inside the `with`."""
    widths = {name: Widths() for name in layers}
    names = {id(module): name for name, module in layers.items()}
    begun: set[str] = set()

    def note(module: nn.Module, args: object, output: object) -> None:
        begun.update(filter(None, [names.get(id(module))]))
        size = max((leaf.numel() * leaf.element_size() for _, leaf in leaves(output)), default=0)
        for name, width in widths.items():
            width.whole = max(width.whole, size)
            width.total += size if not module._modules else 0
            width.rest = max(width.rest, size) if name in begun else width.rest

    with Hooks() as hooks:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.hold(module.register_forward_hook(here_only(note)))
        yield widths


def copies_within_memory(width: int, device: torch.device) -> int:
    """Copies of one sample whose widest tensor has so many bytes that a pass may hold."""
    budget = BUDGET
    if device.type == "cuda":
        budget = max(BUDGET, torch.cuda.mem_get_info(device)[0] // 4)
    return max(1, budget // (LIVE * width))


def in_turns(count: int, size: int, work: Callable[[slice], bool | None]) -> int:
    """Call `work` with one piece after the other until it returns True -> how many of `count` were worked off.

    Where memory ends, pieces are halved and tried again, so `work` must add what it found only when it has all of it.
    """
    done, size = 0, max(1, size)
    while done < count:
        part = slice(done, min(done + size, count))
        try:
            enough = work(part)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            torch.cuda.empty_cache()
            size //= 2
            continue
        done = part.stop
        if enough:
            break
    return done


def in_chunks(count: int, size: int, run: Callable[[slice], Tensor]) -> Tensor:
    """(count,): run(slice) of one piece after the other; see `in_turns`."""
    done: list[Tensor] = []
    in_turns(count, size, lambda part: done.append(run(part)))
    return torch.cat(done) if done else torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(kw_only=True, eq=False, repr=False)
class InPasses(Method):
    """A method that shows the model many versions of an image. `batch_size`: in one pass; None: as many as fit into memory."""

    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(None, batch_size=self.batch_size)


@dataclass(kw_only=True, eq=False, repr=False)
class Seeded(Method):
    """A method that draws. `seed`: of all that is drawn, on the CPU: the same numbers on every device."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_whole(seed=self.seed)

    def drawing(self) -> torch.Generator:
        """Where its numbers come from, from the first on."""
        return torch.Generator(device="cpu").manual_seed(self.seed)


def seeds(count: int, generator: torch.Generator) -> list[int]:
    """So many, one for each turn: what a turn draws does not depend on which turns run with it."""
    drawn: list[int] = torch.randint(2**63 - 1, (count,), generator=generator, device="cpu").tolist()
    return drawn


def normal(seeds: Sequence[int], like: Tensor) -> Tensor:
    """(C,*S) -> (R,C,*S): standard normal numbers, each row from a seed of its own."""
    generator = torch.Generator(device="cpu")
    rows = [
        torch.randn(like.shape, generator=generator.manual_seed(one), dtype=torch.float32, device="cpu")
        for one in seeds
    ]
    return torch.stack(rows).to(like)
