"""AdapterExplainer: what every method shares that another package computes.

Twin: a copy of a model's modules with the same weights, for packages that hang things on modules and change them.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from camscope.errors import MissingExtraError, ModelError
from camscope.explainers.core.pixel_base import MultiPassExplainer
from camscope.hooks.base import Hooks, thread_local_hook
from camscope.hooks.gradients import GradientScope, run_with_gradients
from camscope.plurals import plural
from camscope.pytree import iter_leaves
from camscope.targets import Score

T = TypeVar("T")


@dataclass(kw_only=True, eq=False, repr=False)
class AdapterExplainer(MultiPassExplainer):
    """A map that a package of an extra computes. MissingExtraError where it is not installed."""

    package: ClassVar[str]
    extra: ClassVar[str]

    def __post_init__(self) -> None:
        if find_spec(self.package) is None:
            raise MissingExtraError(self.package, self.extra)
        super().__post_init__()


def call_with_gradients(computation: Callable[[], T | None]) -> T:
    """What `computation` finds, a package's own forward and backward passes, with gradients on: see `run_with_gradients`."""

    def inside(staying: GradientScope) -> T | None:
        with staying:
            return computation()

    return run_with_gradients(inside)


def check_same_score(score: Score, sample: int, actual: Tensor, expected: Tensor) -> None:
    """A ModelError where the copy of a model that a package works on has another answer than the model itself."""
    scale = expected.abs() if score.logits is None else torch.maximum(expected.abs(), score.logits[sample].abs().amax())
    if bool((actual - expected).abs() > 0.02 * scale):
        raise ModelError(
            f"{type(score.model).__name__} gives {float(expected):.4g}, and a copy of it with the same weights and other "
            f"hooks {float(actual):.4g}: it keeps something outside of its modules, draws at random, or uses a module only "
            f"for what it changes in place; write x = module(x)"
        )


MAX_COPY_ATTEMPTS = 100  # at a copy, while other threads change what is copied


@dataclass
class ModuleCallRecords:
    """What a pass showed of modules without parts: how often each ran, in which order, and who took whose output."""

    call_counts: Counter[str] = field(default_factory=Counter)
    predecessors: dict[str, str] = field(default_factory=dict)  # the name of a module -> that of the one before it

    @property
    def repeated_modules(self) -> list[str]:
        """Those that ran more than once."""
        return [name for name, count in self.call_counts.items() if count > 1]


@contextmanager
def module_calls_recorded(model: nn.Module) -> Iterator[ModuleCallRecords]:
    """What the pass inside the `with` shows."""
    seen, made = ModuleCallRecords(), dict[int, tuple[weakref.ref[Tensor], str]]()
    names = {id(module): name for name, module in model.named_modules() if not module._modules}

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        name = names[id(module)]
        seen.call_counts[name] += 1
        for given in args[:1]:
            known = made.get(id(given))
            if known is not None and known[0]() is given:
                seen.predecessors[name] = known[1]

    def end(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            made[id(output)] = weakref.ref(output), names[id(module)]

    with Hooks() as hooks:
        for module in model.modules():
            if id(module) in names:
                hooks.add_handle(module.register_forward_pre_hook(thread_local_hook(begin)))
                hooks.add_handle(module.register_forward_hook(thread_local_hook(end)))
        yield seen


class RepeatedModule(nn.Module):
    """A module that ran several times in a pass, as so many modules: each has one call, and hooks of its own."""

    def __init__(self, copies: Sequence[nn.Module]) -> None:
        super().__init__()
        self.copies, self.next_call = nn.ModuleList(copies), 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the part whose turn it is returns."""
        if self.next_call >= len(self.copies):
            raise ModelError(
                f"{type(self.copies[0]).__name__} ran {plural(len(self.copies), 'time')} in the first pass, and "
                "more often in another"
            )
        self.next_call += 1
        return self.copies[self.next_call - 1](*args, **kwargs)


def clone_for_hooks(model: nn.Module, call_records: ModuleCallRecords) -> nn.Module:
    """A copy of the modules and of what they keep; the numbers are shared, until they are replaced.

    A hook, an attribute or a parameter set on it is not the model's, whatever becomes of the call, and no other thread
    meets it. A module that ran several times is several, see `RepeatedModule`.
    """
    for _ in range(MAX_COPY_ATTEMPTS):
        try:
            return _build_clone(model, call_records)
        except (TypeError, RuntimeError, AttributeError) as error:
            reason = error
            if "during iteration" not in str(error):  # else another thread sets or takes away a hook meanwhile
                break
    raise ModelError(
        f"{type(model).__name__} cannot be copied ({reason}), and hooks of another package are not set on the model itself"
    ) from reason


def _build_clone(model: nn.Module, call_records: ModuleCallRecords) -> nn.Module:
    shared = {
        id(value): _alias_without_gradient(value) for part in model.modules() for _, value in iter_leaves(vars(part))
    }
    twin = _copy_with_training_flags(model, shared)
    for name in call_records.repeated_modules:
        part = model.get_submodule(name)
        copies = [_copy_with_training_flags(part, shared) for _ in range(call_records.call_counts[name])]
        _replace_module(twin, twin.get_submodule(name), RepeatedModule(copies).train(part.training))
    return twin


def _copy_with_training_flags(model: nn.Module, shared_tensors: dict[int, Tensor]) -> nn.Module:
    """A deep copy in the modes that this thread sees: those of a thread inside `evaluation_mode` are not on the modules."""
    twin = copy.deepcopy(model, dict[int, Any](shared_tensors))
    for part, original in zip(twin.modules(), model.modules(), strict=False):
        if hasattr(original, "training"):  # frozen TorchScript has none
            part.training = original.training
    return twin


def reset_repeated_modules(clone: nn.Module) -> None:
    """Call it before each pass."""
    for part in clone.modules():
        if isinstance(part, RepeatedModule):
            part.next_call = 0


def _replace_module(model: nn.Module, module: nn.Module, replacement: nn.Module) -> None:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is module and parent is not replacement:
                parent._modules[key] = replacement


def _alias_without_gradient(value: Tensor) -> Tensor:
    """The same numbers under another name, whose gradient nobody takes."""
    alias = value.detach()
    return nn.Parameter(alias, requires_grad=False) if isinstance(value, nn.Parameter) else alias
