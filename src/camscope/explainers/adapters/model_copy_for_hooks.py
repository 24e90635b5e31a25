"""Copy a model so that another package can hook it. A module that is called several times gets one copy for each call."""

import copy
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from camscope.errors import ModelError
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.plurals import plural
from camscope.pytree import iter_leaves

MAX_COPY_ATTEMPTS = 100  # while other threads change the modules


@dataclass
class ModuleCallRecords:
    """The calls of leaf modules in one pass: the number of calls of each module, and the module that computed the input."""

    call_counts: Counter[str] = field(default_factory=Counter)
    predecessors: dict[str, str] = field(default_factory=dict)  # name of a module -> name of the module before it


class RecordedEvaluator(PerturbedEvaluator):
    """A `PerturbedEvaluator` that also records the module calls of its first pass."""

    def __post_init__(self) -> None:
        with module_calls_recorded(self.score.model) as self.call_records:
            super().__post_init__()


@contextmanager
def module_calls_recorded(model: nn.Module) -> Iterator[ModuleCallRecords]:
    """Record the calls of leaf modules in the forward pass inside the `with`."""
    records, producers = ModuleCallRecords(), dict[int, tuple[weakref.ref[Tensor], str]]()
    names = {id(module): name for name, module in model.named_modules() if not module._modules}

    def record_call(module: nn.Module, args: tuple[Any, ...]) -> None:
        name = names[id(module)]
        records.call_counts[name] += 1
        producer = producers.get(id(args[0])) if args else None
        if producer is not None and producer[0]() is args[0]:
            records.predecessors[name] = producer[1]

    def record_output_producer(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            producers[id(output)] = weakref.ref(output), names[id(module)]

    with Hooks() as hooks:
        for module in model.modules():
            if id(module) in names:
                hooks.add_handle(module.register_forward_pre_hook(thread_local_hook(record_call)))
                hooks.add_handle(module.register_forward_hook(thread_local_hook(record_output_producer)))
        yield records


class RepeatedModule(nn.Module):
    """A module that runs several times per pass. Each call uses its own copy of the module, with its own hooks."""

    def __init__(self, copies: Sequence[nn.Module]) -> None:
        super().__init__()
        self.copies, self.next_call = nn.ModuleList(copies), 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the copy of the module that belongs to the current call of the pass. Return the output."""
        if self.next_call >= len(self.copies):
            raise ModelError(
                f"{type(self.copies[0]).__name__} ran {plural(len(self.copies), 'time')} in the first pass, but "
                "more often in a later pass"
            )
        self.next_call += 1
        return self.copies[self.next_call - 1](*args, **kwargs)


def clone_for_hooks(model: nn.Module, call_records: ModuleCallRecords) -> nn.Module:
    """Copy a model, so that another package can set hooks on the copy. The copy shares the weights with the model.

    A module that ran several times becomes a `RepeatedModule`.
    """
    for _ in range(MAX_COPY_ATTEMPTS):
        try:
            return _build_clone(model, call_records)
        except (TypeError, RuntimeError, AttributeError) as error:
            reason = error
            if "during iteration" not in str(error):  # otherwise another thread set or removed a hook meanwhile
                break
    raise ModelError(
        f"{type(model).__name__} cannot be copied ({reason}), and this method sets hooks only on a copy"
    ) from reason


def _build_clone(model: nn.Module, call_records: ModuleCallRecords) -> nn.Module:
    """Copy the modules of a model but share its tensors. A module that ran several times has a copy per call."""
    shared = {}
    for leaf in (leaf for part in model.modules() for _, leaf in iter_leaves(vars(part))):
        alias = leaf.detach()
        shared[id(leaf)] = nn.Parameter(alias, requires_grad=False) if isinstance(leaf, nn.Parameter) else alias
    clone = _copy_with_training_flags(model, shared)
    for name, count in call_records.call_counts.items():
        if count > 1:
            part, module = model.get_submodule(name), clone.get_submodule(name)
            copies = [_copy_with_training_flags(part, shared) for _ in range(count)]
            replacement = RepeatedModule(copies).train(part.training)
            for parent, key, child in list(iter_parent_name_and_child(clone)):
                if child is module:
                    parent._modules[key] = replacement
    return clone


def iter_parent_name_and_child(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
    """Yield each child module in a model, as (parent, name in the parent, child)."""
    for parent in model.modules():
        for key, child in parent._modules.items():
            yield parent, key, child


def _copy_with_training_flags(model: nn.Module, shared_tensors: dict[int, Tensor]) -> nn.Module:
    """Copy a model deeply. The copy gets the `training` flags that this thread sees in the model."""
    clone = copy.deepcopy(model, dict[int, Any](shared_tensors))
    for part, original in zip(clone.modules(), model.modules(), strict=False):
        if hasattr(original, "training"):  # frozen TorchScript has none
            part.training = original.training
    return clone


def restart_call_counts(clone: nn.Module) -> None:
    """Make each `RepeatedModule` start again with its first copy. Call this function before each pass."""
    for part in clone.modules():
        if isinstance(part, RepeatedModule):
            part.next_call = 0
