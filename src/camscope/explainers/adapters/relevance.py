"""Relevance through what a model does outside of modules: sums, means and activations get the rules of zennit's modules."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camscope.hooks.calls import Calls, name_of
from camscope.hooks.vocabulary import ACTIVATIONS, AVERAGES, DROPOUTS, MAXIMA, SCALINGS, negates
from camscope.structure import leaves, mapped

_MOVES = (
    "view view_as reshape reshape_as flatten unflatten permute transpose swapaxes movedim moveaxis t get squeeze unsqueeze "
    "contiguous clone cat concat concatenate stack split tensor_split chunk unbind getitem narrow select index_select "
    "expand expand_as repeat roll flip rot90 pad channel_shuffle pixel_shuffle pixel_unshuffle "
    "to float double half bfloat16 type type_as cpu cuda requires_grad retain_grad"
)
SCALES = SCALINGS | {"neg"}
MOVES = MAXIMA | DROPOUTS | set(_MOVES.split())  # to other places: there the gradient is the relevance
SUMS = {"add": 1, "iadd": 1, "radd": 1, "sub": -1, "isub": -1}


class Rules:
    """A module's own rule by zennit: `passed` hands relevance on, `shared` by what each input adds."""

    def __init__(self, stabilizer: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor]) -> None:
        from zennit.rules import Norm, Pass

        self._kinds = {"passed": lambda: Pass(), "shared": lambda: Norm(stabilizer), "exact": lambda: Norm(exact)}
        self._kept: list[Any] = []  # zennit's hooks are known to a graph by weak references

    def run(self, kind: str, module: nn.Module, x: Tensor) -> Tensor:
        """The module's output, through which relevance goes back by a rule."""
        hook = self._kinds[kind]()
        hook.register(module)
        self._kept.append(hook)
        result: Tensor = module(x)
        return result

    def close(self) -> None:
        """Let go of what the rules keep of a pass."""
        for hook in self._kept:
            hook.remove()
        self._kept.clear()


class Routed(Calls):
    """Inside the `with`, what runs in no module with a rule has one of its own, or is counted in `without`."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self._rules, self._inside, self.without = rules, 0, Counter[str]()

    def begin(self) -> None:
        """Before a pass."""
        self.close()
        self._inside = 0
        self.without.clear()

    def close(self) -> None:
        """After the last pass."""
        self._rules.close()

    def watch(self, module: nn.Module) -> None:
        """What runs in this module has its rule."""
        module.register_forward_pre_hook(self._enter, prepend=True)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._inside += 1
        # zennit looks at what is given, and would hang its rule on a step that is not there where gradients are off
        return None if torch.is_grad_enabled() else mapped(args, Tensor.detach)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._inside -= 1

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns."""
        name, spelled = name_of(func), getattr(func, "__name__", "")
        alive = [one for one in (*args, *named.values()) if isinstance(one, Tensor) and one.requires_grad]
        if self._inside or not alive or not torch.is_grad_enabled():
            return func(*args, **named)
        found = self._ruled(name, func, tuple(args), named, alive)
        if found is not None:
            return args[0].copy_(found) if _in_place(spelled, args, named) else found
        result = func(*args, **named)
        if name not in MOVES and any(leaf.requires_grad for _, leaf in leaves(result)):
            self.without[name] += 1
        return result

    def _ruled(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any], alive: list[Tensor]
    ) -> Tensor | None:
        """The result where relevance has a way back; None where it is the gradient's, or there is none."""
        if name in SUMS and not given and len(args) == 2:
            return self._sum(SUMS[name], *args)
        if len(alive) != 1 or not (args and alive[0] is args[0]):
            return None
        if name in ACTIVATIONS or name in SCALES:
            return self._rules.run("passed", _Call(func, args[1:], given), args[0])
        if name in AVERAGES and not negates(given):
            return self._rules.run("shared", _Call(func, args[1:], given), args[0])
        return None

    def _sum(self, sign: int, first: Any, second: Any) -> Tensor | None:
        """A sum of two, of which each has the share that it adds; a constant's share is nobody's."""
        from zennit.layer import Sum

        known = first if isinstance(first, Tensor) else second
        a, b = (
            one if isinstance(one, Tensor) else torch.full_like(known, one, requires_grad=False)
            for one in (first, second)
        )
        if sign < 0 and b.requires_grad:
            return None
        both = a.requires_grad and b.requires_grad
        addends = torch.stack(torch.broadcast_tensors(a, b if sign > 0 else -b), -1)
        return self._rules.run("shared" if both else "exact", Sum(), addends)


def _in_place(spelled: str, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether a function called so writes its result over its first argument: x += y, x.relu_(), F.relu(x, True)."""
    asked = given.get("inplace") is True or (spelled.strip("_") in ACTIVATIONS and any(one is True for one in args))
    return asked or spelled.startswith("__i") or (spelled.endswith("_") and not spelled.endswith("__"))


class _Call(nn.Module):
    """A function as a module: on its first argument, with the others as they are."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> None:
        super().__init__()
        self._func, self._args, self._given = func, args, given

    def forward(self, x: Tensor) -> Any:
        """func(x, …)"""
        return self._func(x, *self._args, **self._given)
