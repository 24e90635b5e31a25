"""Layer-wise relevance propagation, by zennit: the score goes back through the model, layer by layer, in shares.

Relevance through what a model does outside of modules: sums, means and activations get the rules of zennit's modules.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from camscope.errors import ModelError
from camscope.explainers.adapters.base import (
    AdapterExplainer,
    Seen,
    expect_the_same_score,
    kept_on,
    observed,
    rewind,
    twin_of,
)
from camscope.explainers.core.base import register_with
from camscope.explainers.core.evaluation_context import checked_finite, expect_number, expect_one_of
from camscope.explainers.core.maps import Maps
from camscope.explainers.core.pixel_base import PixelExplainer, Runs, counted, gap_in_words
from camscope.hooks.function_mode import ACTIVATIONS, AVERAGES, DROPOUTS, MAXIMA, SCALINGS, Calls, name_of, negates
from camscope.pytree import leaves, mapped
from camscope.targets import Score, full_precision

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


Composite = Literal[
    "epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "epsilon_alpha2_beta1_flat", "epsilon_gamma_box"
]
COMPOSITES = (
    "epsilon_plus",
    "epsilon_plus_flat",
    "epsilon_alpha2_beta1",
    "epsilon_alpha2_beta1_flat",
    "epsilon_gamma_box",
)
FIRST = ("epsilon_plus_flat", "epsilon_alpha2_beta1_flat", "epsilon_gamma_box")  # with a rule for the first layer alone


NO_EPS = torch.finfo(
    torch.float32
).tiny  # of a batch norm: beside a variance of 1 it is nothing, and PyTorch 2.11 refuses 0


@register_with("zennit", "lrp")
class LRP(AdapterExplainer, PixelExplainer):
    """R_i = Σ_j a_i w_ij / (z_j ± ε) R_j, from the score back to the pixels (Bach et al. 2015; rules by layer).

    `composite`: zennit's rules by kind of layer: linear ones ε, convolutions z⁺ ("epsilon_plus"), α=2 β=1
    ("epsilon_alpha2_beta1") or γ with a box for the first ("epsilon_gamma_box": the least and largest value of each
    channel); "_flat": the first layer shares evenly. `epsilon`: ε and every other stabiliser, of the root of the mean
    square of z, so that no unit matters. Batch norms are merged with the layer before them. Sums, means and activations
    outside of modules have rules, too; a model with anything else, such as attention, is refused by name. Biases keep a
    part of the relevance: a note says how much, and `measures` do: `conservation_gap`, what arrives at the pixels less
    `output_relevance`, what the output begins with.
    """

    name, paper = "lrp", "doi:10.1371/journal.pone.0130140"
    forwards: ClassVar[str] = "2"
    alters_input: ClassVar[bool] = False
    backwards: ClassVar[str] = "1"
    package: ClassVar[str] = "zennit"
    extra: ClassVar[str] = "lrp"
    composite: Composite = "epsilon_plus"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_one_of("composite", self.composite, *COMPOSITES)
        expect_number(low=0, epsilon=self.epsilon)

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The relevance that arrives at the pixels, and how far it is from being all that the output began with."""
        with observed(score.model) as seen:
            runs = Runs(self, x, score)
        made, notes, begun = [], [], []
        with counted(self.title, len(x), self.progress) as advance:
            for sample in range(len(x)):
                relevance, start, said = self._relevance(runs, seen, sample)
                checked_finite("the relevance at the input", relevance, self.on_nonfinite)
                made.append(relevance)
                notes.append(said)
                begun.append(start)
                advance(1)
        values, starts = torch.stack(made), torch.stack(begun)
        return Maps(
            self.over_channels(values),
            zero_gradient=~values.flatten(1).any(1),
            own=tuple(notes),
            measures={"conservation_gap": values.double().flatten(1).sum(1) - starts, "output_relevance": starts},
        )

    def _relevance(self, runs: Runs, seen: Seen, sample: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """(C,*S), what the output begins with (), and what is to be said of one sample's."""
        score, twin = copy.copy(runs.score), twin_of(runs.score.model, seen)
        score.model = twin
        merged, left = norms(runs.score.model, seen)
        x = runs.x[sample, None]
        self._expect_first(runs.score.model, seen)
        composite, routed = self._rules(x, merged)
        owners = torch.tensor([sample], device=x.device)
        with closing(composite, routed), composite.context(twin):
            for _, name in merged:  # what is left of it hands its input on, but for this: zennit keeps it
                twin.get_submodule(name).eps = NO_EPS  # type: ignore[assignment]  # a module's attributes are of any type
            for module in twin.modules():
                if has_rule(module):
                    routed.watch(module)
            value, start, relevance = kept_on(lambda: _back(score, x, owners, twin, routed))
        if self.mode == "eval":
            expect_the_same_score(runs.score, sample, value, runs.values[sample])
        found = full_precision(relevance[0])
        words = gap_in_words(self.parts("shares"), float(found.double().sum()), "the output begins with", float(start))
        kept = f"batch norms behind no linear layer hand relevance on as it is: {', '.join(left)}"
        return found, start.double(), (f"conservation: {words}", *([kept] if left else []))

    def _rules(self, x: Tensor, merged: Sequence[tuple[list[str], str]]) -> tuple[Any, Routed]:
        """Zennit's composite, and the same rules for what is no module."""
        from zennit.canonizers import NamedMergeBatchNorm
        from zennit.composites import COMPOSITES as KNOWN

        rounding = torch.finfo(x.dtype).eps
        stabilizer = relative(max(self.epsilon, rounding))
        settings: dict[str, Any] = {"epsilon": stabilizer, "stabilizer": stabilizer}
        if self.composite == "epsilon_gamma_box":
            axes = tuple(range(2, x.ndim))
            settings |= {"low": x.amin(axes, keepdim=True), "high": x.amax(axes, keepdim=True)}
        composite = KNOWN[self.composite](**settings, canonizers=[NamedMergeBatchNorm(list(merged))])
        return composite, Routed(Rules(stabilizer, relative(rounding)))

    def _expect_first(self, model: nn.Module, seen: Seen) -> None:
        """Zennit takes for the first layer the first that the model names."""
        from zennit.types import Linear

        parts = dict(model.named_modules())
        named = next((name for name, part in parts.items() if isinstance(part, Linear)), None)
        run = next((name for name in seen.calls if isinstance(parts[name], Linear)), None)
        if self.composite in FIRST and named != run:
            raise ModelError(
                f"composite={self.composite!r} has a rule for the first layer, which for zennit is {named!r}, and {run!r} runs "
                f"first: name the layers in their order, or pass composite='epsilon_plus'"
            )


@contextmanager
def closing(composite: Any, routed: Routed) -> Iterator[None]:
    """Both hold themselves by their own methods: without this, what a call made would wait for the garbage collector."""
    try:
        yield
    finally:
        routed.close()
        vars(composite).clear()


def _back(
    score: Score, x: Tensor, owners: Tensor, twin: nn.Module, routed: Routed
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The score, the relevance that the output begins with, and the input's (1,C,*S); None where gradients are off.

    It begins with output ∘ ∂score/∂output: a class's logit, or both of a difference, one of them with its sign turned.
    """
    rewind(twin)
    routed.begin()
    leaf = x.detach().clone().requires_grad_()
    with routed:
        output = score.forward(leaf.clone(), owners)
    torch.set_grad_enabled(True)  # even where the model switches it off and never back on
    if routed.without:
        said = ", ".join(f"{name} ({count} x)" for name, count in sorted(routed.without.items()))
        raise ModelError(
            f"lrp has no rule for a part of {type(twin).__name__}: {said}; pass deeplift, or another method"
        )
    if not any(end.requires_grad for _, end in leaves(output)):
        return None
    asked = mapped(output, lambda end: end.detach().requires_grad_(end.requires_grad))
    value = score.read(asked, 1, owners)
    ends = [(end, one) for (_, end), (_, one) in zip(leaves(output), leaves(asked), strict=True) if one.requires_grad]
    slopes: Sequence[Tensor | None] = torch.autograd.grad(value.sum(), [one for _, one in ends], allow_unused=True)
    begun = [(end, one.detach() * slope) for (end, one), slope in zip(ends, slopes, strict=True) if slope is not None]
    with score.around():  # zennit runs layers again on the way back
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            [end for end, _ in begun], leaf, [one for _, one in begun], allow_unused=True
        )
    start = torch.stack([full_precision(one).sum() for _, one in begun]).sum()
    return None if grads[0] is None else (value.detach()[0], start, grads[0].detach())


def relative(epsilon: float) -> Callable[[Tensor], Tensor]:
    """A stabiliser: z a little further from 0, by a share of the root of each row's mean square; 1 where all are 0."""

    def stabilised(z: Tensor) -> Tensor:
        scale = z.flatten(1).square().mean(1).sqrt().view(-1, *[1] * (z.ndim - 1))
        step = torch.where(scale > 0, epsilon * scale, 1)
        return torch.where(z < 0, z - step, z + step)

    return stabilised


def has_rule(module: nn.Module) -> bool:
    """Whether zennit has a rule for such a module; for attention its rule for elementwise functions would do."""
    from zennit.layer import Sum
    from zennit.types import Activation, AvgPool, BatchNorm, Linear

    kinds = (Activation, AvgPool, BatchNorm, Linear, Sum)
    return isinstance(module, kinds) and not isinstance(module, nn.MultiheadAttention)


def norms(model: nn.Module, seen: Seen) -> tuple[list[tuple[list[str], str]], list[str]]:
    """Batch norms that take a linear layer's output, each ran once, with that layer; the names of the others."""
    from zennit.types import BatchNorm, Linear

    parts = dict(model.named_modules())
    every = [name for name in seen.calls if isinstance(parts[name], BatchNorm)]
    merged = []
    for name in every:
        before, norm = seen.followed.get(name, ""), parts[name]
        once = seen.calls[name] == 1 == seen.calls[before]
        fixed = getattr(norm, "running_mean", None) is not None and norm.weight is not None and not norm.training
        if once and fixed and isinstance(parts[before], Linear):
            merged.append(([before], name))
    return merged, [name for name in every if name not in [last for _, last in merged]]
