"""Layer-wise relevance propagation by zennit, extended to sums, means and activations outside of modules."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from camscope.errors import ModelError
from camscope.explainers.adapters.adapter_explainer import AdapterExplainer, call_with_gradients, check_same_score
from camscope.explainers.adapters.model_copy_for_hooks import (
    ModuleCallRecords,
    RecordedEvaluator,
    clone_for_hooks,
    restart_call_counts,
)
from camscope.explainers.adapters.zennit_rules_for_functions import (
    RelevanceRuleMode,
    has_zennit_rule,
    make_relative_stabilizer,
)
from camscope.explainers.core.base_explainer import register_optional
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.setting_checks import check_number, check_one_of
from camscope.explainers.path.additive_explainer import AdditiveAttribution, AdditiveExplainer
from camscope.pytree import iter_leaves, map_leaves
from camscope.targets import Score, full_precision

Composite = Literal[
    "epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "epsilon_alpha2_beta1_flat", "epsilon_gamma_box"
]
MERGED_NORM_EPS = torch.finfo(torch.float32).tiny  # next to a variance of 1; PyTorch 2.11 rejects 0


class RelevanceRules(NamedTuple):
    """Zennit's composite of rules for modules, and a function mode with the rules for other functions."""

    composite: Any
    function_mode: RelevanceRuleMode


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
        """Compute the relevance of each pixel of one sample. The sum should equal the relevance of the output."""
        model, call_records = evaluator.score.model, cast(RecordedEvaluator, evaluator).call_records
        score, clone = copy.copy(evaluator.score), clone_for_hooks(model, call_records)
        score.model = clone
        merged, unmerged = find_mergeable_norms(model, call_records)
        x = evaluator.x[sample, None]
        self._check_first_layer_runs_first(model, call_records)
        composite, rule_mode = self._build_rules(x, merged)
        sample_index = torch.tensor([sample], device=x.device)
        try:
            with evaluator.track_sample_steps(sample, 1) as advance, composite.context(clone):
                for _, name in merged:  # zennit keeps eps, and the merged norm must be the identity
                    clone.get_submodule(name).eps = MERGED_NORM_EPS  # type: ignore[assignment]  # a module's attributes are of any type
                for module in filter(has_zennit_rule, clone.modules()):
                    rule_mode.skip_functions_inside_module(module)
                value, start, relevance = call_with_gradients(
                    lambda: _propagate_relevance(score, x, sample_index, clone, rule_mode)
                )
                advance(1)
        finally:  # both refer to themselves, so only the garbage collector would free them
            rule_mode.remove_hooks()
            vars(composite).clear()
        if self.mode == "eval":
            check_same_score(evaluator.score, sample, value, evaluator.clean_scores[sample])
        check_finite("the relevance at the input", relevance, self.on_nonfinite)
        names = ", ".join(unmerged)
        notes = (f"batch norms without a linear layer before them pass relevance on unchanged: {names}",)
        return AdditiveAttribution(full_precision(relevance[0]), start, notes=notes if unmerged else ())

    def _build_rules(self, x: Tensor, merged_norms: Sequence[tuple[list[str], str]]) -> RelevanceRules:
        """Build the relevance rules. Modules get zennit's composite. Functions outside of modules get the same rules."""
        from zennit.canonizers import NamedMergeBatchNorm
        from zennit.composites import COMPOSITES as KNOWN

        rounding = torch.finfo(x.dtype).eps
        stabilizer = make_relative_stabilizer(max(self.epsilon, rounding))
        settings: dict[str, Any] = {"epsilon": stabilizer, "stabilizer": stabilizer}
        if self.composite == "epsilon_gamma_box":
            axes = tuple(range(2, x.ndim))
            settings |= {"low": x.amin(axes, keepdim=True), "high": x.amax(axes, keepdim=True)}
        composite = KNOWN[self.composite](**settings, canonizers=[NamedMergeBatchNorm(list(merged_norms))])
        return RelevanceRules(composite, RelevanceRuleMode(stabilizer, make_relative_stabilizer(rounding)))

    def _check_first_layer_runs_first(self, model: nn.Module, call_records: ModuleCallRecords) -> None:
        """Check that the composite applies its rule for the first layer to the layer that runs first.
        Otherwise raise ModelError.
        """
        from zennit.types import Linear

        parts = dict(model.named_modules())
        named = next((name for name, part in parts.items() if isinstance(part, Linear)), None)
        run = next((name for name in call_records.call_counts if isinstance(parts[name], Linear)), None)
        if self.composite.endswith(("_flat", "_box")) and named != run:
            raise ModelError(
                f"composite={self.composite!r} has a rule for the first layer. By name, this is {named!r}, but {run!r} runs "
                f"first. Define the layers in the order of the forward pass, or pass composite='epsilon_plus'"
            )


class Relevance(NamedTuple):
    """The score of one sample, the relevance of the output, and the relevance (1,C,*S) of the input."""

    score: Tensor
    at_output: Tensor
    at_input: Tensor


def _propagate_relevance(
    score: Score, x: Tensor, sample_index: Tensor, clone: nn.Module, rule_mode: RelevanceRuleMode
) -> Relevance | None:
    """Propagate the score back to the input by LRP. Return None if the input gets no gradient."""
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
    return None if grads[0] is None else Relevance(value.detach()[0], start, grads[0].detach())


class MergeableNorms(NamedTuple):
    """Batch norms to merge, each as ([linear layer before it], batch norm), and the names of all other batch norms."""

    pairs: list[tuple[list[str], str]]
    other_names: list[str]


def find_mergeable_norms(model: nn.Module, call_records: ModuleCallRecords) -> MergeableNorms:
    """Find the batch norms that can be merged with a preceding linear layer."""
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
    return MergeableNorms(merged, [name for name in norms if name not in [last for _, last in merged]])
