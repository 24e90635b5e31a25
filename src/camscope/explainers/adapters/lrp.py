"""Layer-wise relevance propagation by zennit, extended to sums, means and activations outside of modules."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from camscope.errors import ModelError
from camscope.explainers.adapters.base import (
    AdapterExplainer,
    ModuleCallRecords,
    RecordedEvaluator,
    call_with_gradients,
    check_same_score,
    clone_for_hooks,
    restart_call_counts,
)
from camscope.explainers.core.base import register_optional
from camscope.explainers.core.evaluation_context import check_finite, check_number, check_one_of
from camscope.explainers.core.pixel_base import PerturbedEvaluator
from camscope.explainers.path.base import AdditiveAttribution, AdditiveExplainer
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
)  # the gradient is the relevance
PASS_THROUGH_FUNCTIONS = ACTIVATIONS | SCALING_FUNCTIONS | {"neg"}
GRADIENT_FUNCTIONS = MAX_FUNCTIONS | DROPOUTS | set(_DATA_MOVEMENT_NAMES.split())
SUM_SIGNS = {"add": 1, "iadd": 1, "radd": 1, "sub": -1, "isub": -1}


class RelevanceRuleMode(BaseFunctionMode):
    """Applies zennit's rules to functions outside of modules with a rule, and counts others in `unsupported_functions`."""

    def __init__(self, stabilizer: Callable[[Tensor], Tensor], exact_stabilizer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stabilizer, self._exact_stabilizer = stabilizer, exact_stabilizer
        self._hooks: list[Any] = []  # the graph holds only weak references to zennit's hooks
        self._ruled_module_depth, self.unsupported_functions = 0, Counter[str]()

    def reset(self) -> None:
        """Reset the counts. Call this method before each pass."""
        self.release_hooks()
        self._ruled_module_depth = 0
        self.unsupported_functions.clear()

    def release_hooks(self) -> None:
        """Remove the hooks and free their tensors. Call this method after the last pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def track_ruled_module(self, module: nn.Module) -> None:
        """Apply no rules inside a module that has its own rule."""
        module.register_forward_pre_hook(self._enter_module, prepend=True)
        module.register_forward_hook(self._leave_module)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._ruled_module_depth += 1
        # zennit would attach its rule to a graph node that does not exist where gradients are disabled
        return None if torch.is_grad_enabled() else map_leaves(args, Tensor.detach)

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        self._ruled_module_depth -= 1

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function, with a rule if there is one, and return its result."""
        name, spelled = function_name(func), getattr(func, "__name__", "")
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
        alive = [tensor for tensor in tensors if tensor.requires_grad]
        if self._ruled_module_depth or not alive or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        ruled_result = self._call_with_rule(name, func, tuple(args), kwargs, alive)
        if ruled_result is not None:
            return args[0].copy_(ruled_result) if _is_in_place(spelled, args, kwargs) else ruled_result
        result = func(*args, **kwargs)
        if name not in GRADIENT_FUNCTIONS and any(leaf.requires_grad for _, leaf in iter_leaves(result)):
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
        """Call a function with its relevance rule. Return None without a call if no rule applies."""
        from zennit.rules import Norm, Pass

        if name in SUM_SIGNS and not kwargs and len(args) == 2:
            return self._add_with_rule(SUM_SIGNS[name], *args)
        if len(differentiable) != 1 or not (args and differentiable[0] is args[0]):
            return None
        if name in PASS_THROUGH_FUNCTIONS:
            return self._run_with_hook(Pass(), _FunctionModule(func, args[1:], kwargs), args[0])
        if name in AVERAGING_FUNCTIONS and not has_negative_weights(kwargs):
            return self._run_with_hook(Norm(self._stabilizer), _FunctionModule(func, args[1:], kwargs), args[0])
        return None

    def _add_with_rule(self, second_sign: int, first: Any, second: Any) -> Tensor | None:
        """Add two values. Each receives relevance in proportion to its contribution, and constants receive none."""
        from zennit.layer import Sum
        from zennit.rules import Norm

        template = first if isinstance(first, Tensor) else second
        a, b = (
            addend if isinstance(addend, Tensor) else torch.full_like(template, addend, requires_grad=False)
            for addend in (first, second)
        )
        if second_sign < 0 and b.requires_grad:
            return None
        both = a.requires_grad and b.requires_grad
        addends = torch.stack(torch.broadcast_tensors(a, b if second_sign > 0 else -b), -1)
        return self._run_with_hook(Norm(self._stabilizer if both else self._exact_stabilizer), Sum(), addends)

    def _run_with_hook(self, hook: Any, module: nn.Module, x: Tensor) -> Tensor:
        hook.register(module)
        self._hooks.append(hook)
        result: Tensor = module(x)
        return result


def _is_in_place(raw_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function call works in place: `x += y`, `x.relu_()`, `F.relu(x, True)`."""
    is_requested = kwargs.get("inplace") is True or (
        raw_name.strip("_") in ACTIVATIONS and any(argument is True for argument in args)
    )
    return is_requested or raw_name.startswith("__i") or (raw_name.endswith("_") and not raw_name.endswith("__"))


class _FunctionModule(nn.Module):
    """A function as a module of its first argument; the other arguments are fixed."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._func, self._args, self._kwargs = func, args, kwargs

    def forward(self, x: Tensor) -> Any:
        """Return func(x, ...)."""
        return self._func(x, *self._args, **self._kwargs)


Composite = Literal[
    "epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "epsilon_alpha2_beta1_flat", "epsilon_gamma_box"
]
MERGED_NORM_EPS = torch.finfo(torch.float32).tiny  # next to a variance of 1; PyTorch 2.11 rejects 0


@register_optional("zennit", "lrp")
class LRP(AdapterExplainer, AdditiveExplainer):
    """R_i = Σ_j a_i w_ij / (z_j ± ε) R_j, from the score back to the pixels (Bach et al. 2015; rules by layer).

    Batch norms are merged with the layer before them. Sums, means and activations outside of modules have rules too; a
    model with anything else, such as attention, raises an error that names it. Biases keep a part of the relevance. A
    note says how much, and `diagnostics` hold `conservation_gap`, the relevance at the pixels minus `output_relevance`,
    that of the output. Use it for maps of single pixels whose sum is known. It needs the package zennit.

    Args:
        composite: Zennit's rules by type of layer. Linear layers use ε. Convolutions use z⁺ ("epsilon_plus"), α=2 β=1
            ("epsilon_alpha2_beta1"), or γ with a box rule for the first layer ("epsilon_gamma_box": minimum and maximum
            of each channel). With "_flat", the first layer distributes evenly.
        epsilon: ε and every other stabilizer, relative to the root mean square of z.

    >>> explanation = LRP(model).explain(image, "nodule")
    >>> explanation.grid, sorted(explanation.diagnostics)
    ((128, 128), ['conservation_gap', 'output_relevance'])

    """

    name, title, paper = "lrp", "LRP", "doi:10.1371/journal.pone.0130140"
    package, extra, forward_passes, backward_passes = "zennit", "lrp", "2", "1"
    alters_input: ClassVar[bool] = False
    evaluator_cls: ClassVar[type[PerturbedEvaluator]] = RecordedEvaluator
    sum_name, sum_text = "conservation", "the output begins with"
    diagnostic_names: ClassVar[tuple[str, str]] = ("conservation_gap", "output_relevance")
    composite: Composite = "epsilon_plus"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("composite", self.composite, *get_args(Composite))
        check_number(low=0, epsilon=self.epsilon)

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Return the relevance of the pixels of one sample, and the relevance of the output."""
        model, call_records = evaluator.score.model, cast(RecordedEvaluator, evaluator).call_records
        score, clone = copy.copy(evaluator.score), clone_for_hooks(model, call_records)
        score.model = clone
        merged, unmerged = find_mergeable_norms(model, call_records)
        x = evaluator.x[sample, None]
        self._check_first_layer(model, call_records)
        composite, rule_mode = self._build_rules(x, merged)
        sample_index = torch.tensor([sample], device=x.device)
        try:
            with evaluator.track_sample_steps(sample, 1) as advance, composite.context(clone):
                for _, name in merged:  # zennit keeps eps, and the merged norm must be the identity
                    clone.get_submodule(name).eps = MERGED_NORM_EPS  # type: ignore[assignment]  # a module's attributes are of any type
                for module in filter(has_zennit_rule, clone.modules()):
                    rule_mode.track_ruled_module(module)
                value, start, relevance = call_with_gradients(
                    lambda: _propagate_relevance(score, x, sample_index, clone, rule_mode)
                )
                advance(1)
        finally:  # both refer to themselves, so only the garbage collector would free them
            rule_mode.release_hooks()
            vars(composite).clear()
        if self.mode == "eval":
            check_same_score(evaluator.score, sample, value, evaluator.clean_scores[sample])
        check_finite("the relevance at the input", relevance, self.on_nonfinite)
        names = ", ".join(unmerged)
        notes = (f"batch norms without a linear layer before them pass relevance on unchanged: {names}",)
        return AdditiveAttribution(full_precision(relevance[0]), start, notes=notes if unmerged else ())

    def _build_rules(self, x: Tensor, merged_norms: Sequence[tuple[list[str], str]]) -> tuple[Any, RelevanceRuleMode]:
        """Return zennit's composite, and the same rules for functions outside of modules."""
        from zennit.canonizers import NamedMergeBatchNorm
        from zennit.composites import COMPOSITES as KNOWN

        rounding = torch.finfo(x.dtype).eps
        stabilizer = make_relative_stabilizer(max(self.epsilon, rounding))
        settings: dict[str, Any] = {"epsilon": stabilizer, "stabilizer": stabilizer}
        if self.composite == "epsilon_gamma_box":
            axes = tuple(range(2, x.ndim))
            settings |= {"low": x.amin(axes, keepdim=True), "high": x.amax(axes, keepdim=True)}
        composite = KNOWN[self.composite](**settings, canonizers=[NamedMergeBatchNorm(list(merged_norms))])
        return composite, RelevanceRuleMode(stabilizer, make_relative_stabilizer(rounding))

    def _check_first_layer(self, model: nn.Module, call_records: ModuleCallRecords) -> None:
        """Raise ModelError unless the first layer by name is also the first layer that runs."""
        from zennit.types import Linear

        parts = dict(model.named_modules())
        named = next((name for name, part in parts.items() if isinstance(part, Linear)), None)
        run = next((name for name in call_records.call_counts if isinstance(parts[name], Linear)), None)
        if self.composite.endswith(("_flat", "_box")) and named != run:
            raise ModelError(
                f"composite={self.composite!r} has a rule for the first layer. By name, this is {named!r}, but {run!r} runs "
                f"first. Define the layers in the order of the forward pass, or pass composite='epsilon_plus'"
            )


def _propagate_relevance(
    score: Score, x: Tensor, sample_index: Tensor, clone: nn.Module, rule_mode: RelevanceRuleMode
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the score, the output relevance and the input relevance, or None without gradients."""
    restart_call_counts(clone)
    rule_mode.reset()
    leaf = x.detach().clone().requires_grad_()
    with rule_mode:
        output = score.forward(leaf.clone(), sample_index)
    torch.set_grad_enabled(True)  # also after a model that disables gradients and does not enable them again
    if rule_mode.unsupported_functions:
        operations = ", ".join(f"{name} ({count} x)" for name, count in sorted(rule_mode.unsupported_functions.items()))
        raise ModelError(
            f"lrp has no rule for these operations of {type(clone).__name__}: {operations}; use another method, such as deeplift"
        )
    if not any(end.requires_grad for _, end in iter_leaves(output)):
        return None
    detached = map_leaves(output, lambda end: end.detach().requires_grad_(end.requires_grad))
    value = score.read_score(detached, 1, sample_index)
    pairs = zip(iter_leaves(output), iter_leaves(detached), strict=True)
    ends = [(end, leaf_end) for (_, end), (_, leaf_end) in pairs if leaf_end.requires_grad]
    leaves = [leaf_end for _, leaf_end in ends]
    slopes: Sequence[Tensor | None] = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    triples = zip(ends, slopes, strict=True)
    relevances = [(end, leaf_end.detach() * slope) for (end, leaf_end), slope in triples if slope is not None]
    outputs, starts = [end for end, _ in relevances], [relevance for _, relevance in relevances]
    with score.forward_context():  # zennit runs layers again in the backward pass
        grads: Sequence[Tensor | None] = torch.autograd.grad(outputs, leaf, starts, allow_unused=True)
    start = torch.stack([full_precision(relevance).sum() for relevance in starts]).sum()
    return None if grads[0] is None else (value.detach()[0], start, grads[0].detach())


def make_relative_stabilizer(epsilon: float) -> Callable[[Tensor], Tensor]:
    """Return a function that moves z away from zero, by a fraction `epsilon` of the root mean square of each row."""

    def stabilize(z: Tensor) -> Tensor:
        rows = z.flatten(1) if z.ndim > 1 else z[..., None]  # a sum over all axes has none
        scale = rows.square().mean(-1).sqrt().view([*z.shape[:1], *[1] * (z.ndim - 1)])
        step = torch.where(scale > 0, epsilon * scale, 1)
        return torch.where(z < 0, z - step, z + step)

    return stabilize


def has_zennit_rule(module: nn.Module) -> bool:
    """Whether zennit has a suitable rule for a module. It has none for attention."""
    from zennit.layer import Sum
    from zennit.types import Activation, AvgPool, BatchNorm, Linear

    has_rule = isinstance(module, (Activation, AvgPool, BatchNorm, Linear, Sum))
    return has_rule and not isinstance(module, nn.MultiheadAttention)


def find_mergeable_norms(
    model: nn.Module, call_records: ModuleCallRecords
) -> tuple[list[tuple[list[str], str]], list[str]]:
    """Return the batch norms to merge, each with the linear layer before it, and the names of the other batch norms."""
    from zennit.types import BatchNorm, Linear

    parts = dict(model.named_modules())
    norms = [name for name in call_records.call_counts if isinstance(parts[name], BatchNorm)]
    merged = []
    for name in norms:
        before, norm = call_records.predecessors.get(name, ""), parts[name]
        once = call_records.call_counts[name] == 1 == call_records.call_counts[before]
        fixed = getattr(norm, "running_mean", None) is not None and norm.weight is not None and not norm.training
        if once and fixed and isinstance(parts[before], Linear):
            merged.append(([before], name))
    return merged, [name for name in norms if name not in [last for _, last in merged]]
