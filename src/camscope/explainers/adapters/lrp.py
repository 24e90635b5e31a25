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
    ModuleCallRecords,
    call_with_gradients,
    check_same_score,
    clone_for_hooks,
    module_calls_recorded,
    reset_repeated_modules,
)
from camscope.explainers.core.base import register_optional
from camscope.explainers.core.evaluation_context import check_finite, check_number, check_one_of
from camscope.explainers.core.maps import AttributionMaps
from camscope.explainers.core.pixel_base import PerturbedEvaluator, PixelExplainer, format_completeness_gap, track_steps
from camscope.hooks.function_mode import (
    ACTIVATIONS,
    AVERAGING_FUNCTIONS,
    DROPOUTS,
    MAX_FUNCTIONS,
    SCALING_FUNCTIONS,
    BaseFunctionMode,
    function_name,
    has_negative_weights,
)
from camscope.pytree import iter_leaves, map_leaves
from camscope.targets import Score, full_precision

_DATA_MOVEMENT_NAMES = (
    "view view_as reshape reshape_as flatten unflatten permute transpose swapaxes movedim moveaxis t get squeeze unsqueeze "
    "contiguous clone cat concat concatenate stack split tensor_split chunk unbind getitem narrow select index_select "
    "expand expand_as repeat roll flip rot90 pad channel_shuffle pixel_shuffle pixel_unshuffle "
    "to float double half bfloat16 type type_as cpu cuda requires_grad retain_grad"
)
LRP_SCALING_FUNCTIONS = SCALING_FUNCTIONS | {"neg"}
LRP_PASS_THROUGH_FUNCTIONS = (
    MAX_FUNCTIONS | DROPOUTS | set(_DATA_MOVEMENT_NAMES.split())
)  # to other places: there the gradient is the relevance
SUM_SIGNS = {"add": 1, "iadd": 1, "radd": 1, "sub": -1, "isub": -1}


class ZennitRules:
    """A module's own rule by zennit: `run_with_edit` hands relevance on, `shared_tensors` by what each input adds."""

    def __init__(self, stabilizer: Callable[[Tensor], Tensor], exact_stabilizer: Callable[[Tensor], Tensor]) -> None:
        from zennit.rules import Norm, Pass

        self._hook_factories = {
            "passed": lambda: Pass(),
            "shared": lambda: Norm(stabilizer),
            "exact": lambda: Norm(exact_stabilizer),
        }
        self._hooks: list[Any] = []  # zennit's hooks are known to a graph by weak references

    def run_with_rule(self, rule: str, module: nn.Module, x: Tensor) -> Tensor:
        """The module's output, through which relevance goes back by a rule."""
        hook = self._hook_factories[rule]()
        hook.register(module)
        self._hooks.append(hook)
        result: Tensor = module(x)
        return result

    def release_hooks(self) -> None:
        """Let go of what the rules keep of a pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class RelevanceRuleMode(BaseFunctionMode):
    """Inside the `with`, what runs in no module with a rule has one of its own, or is counted in `unsupported_functions`."""

    def __init__(self, rules: ZennitRules) -> None:
        super().__init__()
        self._rules, self._ruled_module_depth, self.unsupported_functions = rules, 0, Counter[str]()

    def reset(self) -> None:
        """Before a pass."""
        self.release_hooks()
        self._ruled_module_depth = 0
        self.unsupported_functions.clear()

    def release_hooks(self) -> None:
        """After the last pass."""
        self._rules.release_hooks()

    def track_ruled_module(self, module: nn.Module) -> None:
        """What runs in this module has its rule."""
        module.register_forward_pre_hook(self._enter_module, prepend=True)
        module.register_forward_hook(self._leave_module)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._ruled_module_depth += 1
        # zennit looks at what is given, and would hang its rule on a step that is not there where gradients are off
        return None if torch.is_grad_enabled() else map_leaves(args, Tensor.detach)

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        self._ruled_module_depth -= 1

    def intercept_call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the function returns."""
        name, spelled = function_name(func), getattr(func, "__name__", "")
        alive = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.requires_grad]
        if self._ruled_module_depth or not alive or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        found = self._call_with_rule(name, func, tuple(args), kwargs, alive)
        if found is not None:
            return args[0].copy_(found) if _is_in_place(spelled, args, kwargs) else found
        result = func(*args, **kwargs)
        if name not in LRP_PASS_THROUGH_FUNCTIONS and any(leaf.requires_grad for _, leaf in iter_leaves(result)):
            self.unsupported_functions[name] += 1
        return result

    def _call_with_rule(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        differentiable: list[Tensor],
    ) -> Tensor | None:
        """The result where relevance has a way back; None where it is the gradient's, or there is none."""
        if name in SUM_SIGNS and not kwargs and len(args) == 2:
            return self._add_with_rule(SUM_SIGNS[name], *args)
        if len(differentiable) != 1 or not (args and differentiable[0] is args[0]):
            return None
        if name in ACTIVATIONS or name in LRP_SCALING_FUNCTIONS:
            return self._rules.run_with_rule("passed", _FunctionModule(func, args[1:], kwargs), args[0])
        if name in AVERAGING_FUNCTIONS and not has_negative_weights(kwargs):
            return self._rules.run_with_rule("shared", _FunctionModule(func, args[1:], kwargs), args[0])
        return None

    def _add_with_rule(self, second_sign: int, first: Any, second: Any) -> Tensor | None:
        """A sum of two, of which each has the share that it adds; a constant's share is nobody's."""
        from zennit.layer import Sum

        known = first if isinstance(first, Tensor) else second
        a, b = (
            one if isinstance(one, Tensor) else torch.full_like(known, one, requires_grad=False)
            for one in (first, second)
        )
        if second_sign < 0 and b.requires_grad:
            return None
        both = a.requires_grad and b.requires_grad
        addends = torch.stack(torch.broadcast_tensors(a, b if second_sign > 0 else -b), -1)
        return self._rules.run_with_rule("shared" if both else "exact", Sum(), addends)


def _is_in_place(raw_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function called so writes its result over its first argument: x += y, x.relu_(), F.relu(x, True)."""
    asked = kwargs.get("inplace") is True or (raw_name.strip("_") in ACTIVATIONS and any(one is True for one in args))
    return asked or raw_name.startswith("__i") or (raw_name.endswith("_") and not raw_name.endswith("__"))


class _FunctionModule(nn.Module):
    """A function as a module: on its first argument, with the others as they are."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._func, self._args, self._kwargs = func, args, kwargs

    def forward(self, x: Tensor) -> Any:
        """func(x, …)"""
        return self._func(x, *self._args, **self._kwargs)


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
FIRST_LAYER_COMPOSITES = (
    "epsilon_plus_flat",
    "epsilon_alpha2_beta1_flat",
    "epsilon_gamma_box",
)  # with a rule for the first layer alone


@register_optional("zennit", "lrp")
class LRP(AdapterExplainer, PixelExplainer):
    """R_i = Σ_j a_i w_ij / (z_j ± ε) R_j, from the score back to the pixels (Bach et al. 2015; rules by layer).

    `composite`: zennit's rules by kind of layer: linear ones ε, convolutions z⁺ ("epsilon_plus"), α=2 β=1
    ("epsilon_alpha2_beta1") or γ with a box for the first ("epsilon_gamma_box": the least and largest value of each
    channel); "_flat": the first layer shares evenly. `epsilon`: ε and every other stabiliser, of the root of the mean
    square of z, so that no unit matters. Batch norms are merged with the layer before them. Sums, means and activations
    outside of modules have rules, too; a model with anything else, such as attention, is refused by name. Biases keep a
    part of the relevance: a note says how much, and `diagnostics` do: `conservation_gap`, what arrives at the pixels less
    `output_relevance`, what the output begins with.
    """

    name, title, paper = "lrp", "LRP", "doi:10.1371/journal.pone.0130140"
    forward_passes: ClassVar[str] = "2"
    alters_input: ClassVar[bool] = False
    backward_passes: ClassVar[str] = "1"
    package: ClassVar[str] = "zennit"
    extra: ClassVar[str] = "lrp"
    composite: Composite = "epsilon_plus"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("composite", self.composite, *COMPOSITES)
        check_number(low=0, epsilon=self.epsilon)

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """The relevance that arrives at the pixels, and how far it is from being all that the output began with."""
        with module_calls_recorded(score.model) as seen:
            runs = PerturbedEvaluator(self, x, score)
        made, notes, begun = [], [], []
        with track_steps(self.full_name, len(x), self.progress) as advance:
            for sample in range(len(x)):
                relevance, start, said = self._compute_relevance(runs, seen, sample)
                check_finite("the relevance at the input", relevance, self.on_nonfinite)
                made.append(relevance)
                notes.append(said)
                begun.append(start)
                advance(1)
        values, starts = torch.stack(made), torch.stack(begun)
        return AttributionMaps(
            self.reduce_channels(values),
            zero_gradient=~values.flatten(1).any(1),
            sample_notes=tuple(notes),
            diagnostics={"conservation_gap": values.double().flatten(1).sum(1) - starts, "output_relevance": starts},
        )

    def _compute_relevance(
        self, evaluator: PerturbedEvaluator, call_records: ModuleCallRecords, sample: int
    ) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """(C,*S), what the output begins with (), and what is to be said of one sample's."""
        score, twin = copy.copy(evaluator.score), clone_for_hooks(evaluator.score.model, call_records)
        score.model = twin
        merged, left = find_mergeable_norms(evaluator.score.model, call_records)
        x = evaluator.x[sample, None]
        self._check_first_layer(evaluator.score.model, call_records)
        composite, routed = self._build_rules(x, merged)
        owners = torch.tensor([sample], device=x.device)
        with released_on_exit(composite, routed), composite.context(twin):
            for _, name in merged:  # what is left of it hands its input on, but for this: zennit keeps it
                twin.get_submodule(name).eps = 0.0  # type: ignore[assignment]  # a module's attributes are of any type
            for module in twin.modules():
                if has_zennit_rule(module):
                    routed.track_ruled_module(module)
            value, start, relevance = call_with_gradients(lambda: _propagate_relevance(score, x, owners, twin, routed))
        if self.mode == "eval":
            check_same_score(evaluator.score, sample, value, evaluator.clean_scores[sample])
        found = full_precision(relevance[0])
        words = format_completeness_gap(
            self.describe_summands("shares"), float(found.double().sum()), "the output begins with", float(start)
        )
        kept = f"batch norms behind no linear layer hand relevance on as it is: {', '.join(left)}"
        return found, start.double(), (f"conservation: {words}", *([kept] if left else []))

    def _build_rules(self, x: Tensor, merged_norms: Sequence[tuple[list[str], str]]) -> tuple[Any, RelevanceRuleMode]:
        """Zennit's composite, and the same rules for what is no module."""
        from zennit.canonizers import NamedMergeBatchNorm
        from zennit.composites import COMPOSITES as KNOWN

        rounding = torch.finfo(x.dtype).eps
        stabilizer = make_relative_stabilizer(max(self.epsilon, rounding))
        settings: dict[str, Any] = {"epsilon": stabilizer, "stabilizer": stabilizer}
        if self.composite == "epsilon_gamma_box":
            axes = tuple(range(2, x.ndim))
            settings |= {"low": x.amin(axes, keepdim=True), "high": x.amax(axes, keepdim=True)}
        composite = KNOWN[self.composite](**settings, canonizers=[NamedMergeBatchNorm(list(merged_norms))])
        return composite, RelevanceRuleMode(ZennitRules(stabilizer, make_relative_stabilizer(rounding)))

    def _check_first_layer(self, model: nn.Module, call_records: ModuleCallRecords) -> None:
        """Zennit takes for the first layer the first that the model names."""
        from zennit.types import Linear

        parts = dict(model.named_modules())
        named = next((name for name, part in parts.items() if isinstance(part, Linear)), None)
        run = next((name for name in call_records.call_counts if isinstance(parts[name], Linear)), None)
        if self.composite in FIRST_LAYER_COMPOSITES and named != run:
            raise ModelError(
                f"composite={self.composite!r} has a rule for the first layer, which for zennit is {named!r}, and {run!r} runs "
                f"first: name the layers in their order, or pass composite='epsilon_plus'"
            )


@contextmanager
def released_on_exit(composite: Any, rule_mode: RelevanceRuleMode) -> Iterator[None]:
    """Both hold themselves by their own methods: without this, what a call made would wait for the garbage collector."""
    try:
        yield
    finally:
        rule_mode.release_hooks()
        vars(composite).clear()


def _propagate_relevance(
    score: Score, x: Tensor, sample_index: Tensor, clone: nn.Module, rule_mode: RelevanceRuleMode
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The score, the relevance that the output begins with, and the input's (1,C,*S); None where gradients are off.

    It begins with output ∘ ∂score/∂output: a class's logit, or both of a difference, one of them with its sign turned.
    """
    reset_repeated_modules(clone)
    rule_mode.reset()
    leaf = x.detach().clone().requires_grad_()
    with rule_mode:
        output = score.forward(leaf.clone(), sample_index)
    torch.set_grad_enabled(True)  # even where the model switches it off and never back on
    if rule_mode.unsupported_functions:
        said = ", ".join(f"{name} ({count} x)" for name, count in sorted(rule_mode.unsupported_functions.items()))
        raise ModelError(
            f"lrp has no rule for a part of {type(clone).__name__}: {said}; pass deeplift, or another method"
        )
    if not any(end.requires_grad for _, end in iter_leaves(output)):
        return None
    asked = map_leaves(output, lambda end: end.detach().requires_grad_(end.requires_grad))
    value = score.read_score(asked, 1, sample_index)
    ends = [
        (end, one)
        for (_, end), (_, one) in zip(iter_leaves(output), iter_leaves(asked), strict=True)
        if one.requires_grad
    ]
    slopes: Sequence[Tensor | None] = torch.autograd.grad(value.sum(), [one for _, one in ends], allow_unused=True)
    begun = [(end, one.detach() * slope) for (end, one), slope in zip(ends, slopes, strict=True) if slope is not None]
    with score.forward_context():  # zennit runs layers again on the way back
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            [end for end, _ in begun], leaf, [one for _, one in begun], allow_unused=True
        )
    start = torch.stack([full_precision(one).sum() for _, one in begun]).sum()
    return None if grads[0] is None else (value.detach()[0], start, grads[0].detach())


def make_relative_stabilizer(epsilon: float) -> Callable[[Tensor], Tensor]:
    """A stabiliser: z a little further from 0, by a share of the root of each row's mean square; 1 where all are 0."""

    def stabilised(z: Tensor) -> Tensor:
        scale = z.flatten(1).square().mean(1).sqrt().view(-1, *[1] * (z.ndim - 1))
        step = torch.where(scale > 0, epsilon * scale, 1)
        return torch.where(z < 0, z - step, z + step)

    return stabilised


def has_zennit_rule(module: nn.Module) -> bool:
    """Whether zennit has a rule for such a module; for attention its rule for elementwise functions would do."""
    from zennit.layer import Sum
    from zennit.types import Activation, AvgPool, BatchNorm, Linear

    kinds = (Activation, AvgPool, BatchNorm, Linear, Sum)
    return isinstance(module, kinds) and not isinstance(module, nn.MultiheadAttention)


def find_mergeable_norms(
    model: nn.Module, call_records: ModuleCallRecords
) -> tuple[list[tuple[list[str], str]], list[str]]:
    """Batch norms that take a linear layer's output, each ran once, with that layer; the names of the others."""
    from zennit.types import BatchNorm, Linear

    parts = dict(model.named_modules())
    every = [name for name in call_records.call_counts if isinstance(parts[name], BatchNorm)]
    merged = []
    for name in every:
        before, norm = call_records.predecessors.get(name, ""), parts[name]
        once = call_records.call_counts[name] == 1 == call_records.call_counts[before]
        fixed = getattr(norm, "running_mean", None) is not None and norm.weight is not None and not norm.training
        if once and fixed and isinstance(parts[before], Linear):
            merged.append(([before], name))
    return merged, [name for name in every if name not in [last for _, last in merged]]
