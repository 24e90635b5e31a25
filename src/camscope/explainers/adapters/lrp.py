"""Layer-wise relevance propagation, by zennit: the score goes back through the model, layer by layer, in shares."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from camscope.errors import ModelError
from camscope.explainers.adapters.base import AdapterExplainer, expect_the_same_score, kept_on
from camscope.explainers.adapters.relevance import Routed, Rules
from camscope.explainers.adapters.twin import Seen, observed, rewind, twin_of
from camscope.explainers.base import register_with
from camscope.explainers.gaps import gap_in_words
from camscope.explainers.maps import Maps
from camscope.explainers.pixels import PixelExplainer
from camscope.explainers.runs import Runs, counted
from camscope.explainers.scope import checked_finite, expect_number, expect_one_of
from camscope.structure import leaves, mapped
from camscope.targets import Score, full_precision

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
                twin.get_submodule(name).eps = 0.0  # type: ignore[assignment]  # a module's attributes are of any type
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
