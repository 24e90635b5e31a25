"""Base class of maps from the attention between tokens, and the recorded attentions with their gradients."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from camscope.errors import LayerError, TargetError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.maps_with_flags import (
    AttributionMaps,
    DeferredMap,
    compute_map_or_raise,
    find_samples_below_precision,
)
from camscope.explainers.vision_language.answer_scores_and_gradients import run_model, score_answer
from camscope.explainers.vision_language.processor_inputs import VisionLanguageInputs
from camscope.explainers.vision_language.token_maps import TokenMap
from camscope.hooks.attention_recorder import Attention, AttentionBlockFinder, AttentionRecorder, blocks_skipped
from camscope.hooks.find_layers import unwrap
from camscope.hooks.tap_layer_output_and_gradient import Tap
from camscope.hooks.thread_local_hooks import thread_local_hook
from camscope.layers.infer_layout import infer_layout, infer_vision_language_token_layout
from camscope.layers.judge_layout_from_noise_reactions import LayoutVerdict
from camscope.layers.layout import TOKENS, Layout
from camscope.layers.recorded_grids_and_token_counts import LayoutHints
from camscope.layers.spatial_layers import find_random_masking_reason, record_layout_hints, with_video_token_order
from camscope.layers.verify_layout_by_noise import OutputLocation, build_contradicted_layout_error, probe_layout
from camscope.plurals import plural
from camscope.targets import Score, full_precision

MAX_EXTRA_TOKENS = 9  # tokens that are not on the grid


@dataclass(frozen=True)
class AttentionTrace:
    """The self-attentions between the T tokens of an input x (N,C,*S) on which a score depends, with gradients.

    `gradients` are those of the score at the probabilities (N,heads,T,T), of all blocks or of the last one.
    `output_gradient` (N,heads,T,d) is the gradient at the output of the last attention, if that output was recorded.
    """

    x: Tensor
    score: Score
    layout: Layout
    attentions: Sequence[Attention]
    gradients: Sequence[Tensor]
    output_gradient: Tensor | None
    blocks: AttentionBlockFinder

    @property
    def probabilities(self) -> list[Tensor]:
        """The attention probabilities (N,heads,T,T) of each block."""
        return [attention.probabilities.detach() for attention in self.attentions]

    @cached_property
    def score_token_weights(self) -> Tensor:
        """Equal weights (N,T) for the tokens on which the score depends, such as the class token. They sum to 1."""
        rows = (self.gradients[-1] != 0).any(-1).any(1).to(self.gradients[-1].dtype)
        return rows / rows.sum(1, keepdim=True).clamp(min=1)

    def compute_gradients_as_if_last_block(self, n_blocks: int | None) -> list[Tensor]:
        """Compute the attention gradient (N,heads,T,T) of the last `n_blocks` blocks. Treat each block as the model's last.

        With None, all blocks are used.
        """
        count = min(n_blocks or len(self.attentions), len(self.attentions))
        blocks = self.blocks.find_blocks(self.attentions) if count > 1 else []
        gradients: list[Tensor] = []
        for block, attention in zip(blocks[-count:-1], self.attentions[-count:-1], strict=True):
            with blocks_skipped(blocks, block.output.detach()), Tap(self.score.model, blocks[-1].name) as tap:
                output = tap.run(lambda: self.score.forward(self.x))
                gradient = tap.compute_gradient(self.score.read_score(output, len(self.x)).sum())
            gradients += torch.autograd.grad(block.output, attention.probabilities, gradient, retain_graph=True)
        return [*gradients, self.gradients[-1]]


def record_token_counts(model: nn.Module, scope: ExitStack) -> set[int]:
    """Until `scope` closes, collect how many tokens linear layers and norms return. Return the set that is filled."""
    lengths: set[int] = set()

    def collect_token_counts(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim > 2:
            lengths.update((output.shape[0], output.shape[1], math.prod(output.shape[1:-1])))

    for module in unwrap(model).modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            scope.callback(module.register_forward_hook(thread_local_hook(collect_token_counts)).remove)
    return lengths


class TokenAttentions(NamedTuple):
    """The attentions between image tokens, the layout of these tokens, and notes about attentions that were left out."""

    attentions: list[Attention]
    layout: Layout
    notes: list[str]


def select_token_attentions(
    method_name: str,
    model: nn.Module,
    x: Tensor,
    attentions: Sequence[Attention],
    layout_hints: LayoutHints,
    token_counts: Collection[int],
    layout: str | Layout | None,
) -> TokenAttentions:
    """Select the attentions between the tokens of the image x (N,C,*S). Raise LayerError if the model has no such attention."""
    shapes = [tuple(attention.probabilities.shape) for attention in attentions]
    advice = "Pass a method that looks at a layer, such as gradcam"
    windows = next((shape for shape in shapes if len(shape) > 4 or shape[0] != len(x)), None)
    if windows is not None:
        raise LayerError(
            f"{method_name} needs attention between all tokens of an image, but this model computes attention within windows: "
            f"its shape is {windows} for a batch of {len(x)}. {advice}, and name the layer"
        )
    layouts: dict[int, Layout] = {}
    errors: list[LayerError] = []
    cells = set(map(math.prod, layout_hints.grids))
    for count in dict.fromkeys(shape[-1] for shape in shapes):
        is_grid = not cells.isdisjoint(range(count - MAX_EXTRA_TOKENS, count + 1))
        if (token_counts or cells) and count not in token_counts and not is_grid:
            text = (
                f"{method_name} needs attention between tokens, but an attention between {plural(count, 'item')} is "
                f"between channels or within a patch: no layer has {plural(count, 'token')}. {advice}"
            )
            errors.append(LayerError(text))
            continue
        try:
            shape = len(x), count, 1
            if layout is None and count in layout_hints.image_token_positions:
                layouts[count] = infer_vision_language_token_layout(shape, x.shape, layout_hints)
            else:
                inferred = infer_layout(shape, x.shape, None, layout or TOKENS, layout_hints)
                layouts[count] = inferred if isinstance(layout, Layout) else with_video_token_order(model, inferred)
        except LayerError as error:
            errors.append(LayerError(f"{method_name}, attention between {plural(count, 'token')}: {error}"))
    if not layouts:
        raise errors[0]
    if len(layouts) > 1:
        raise LayerError(
            f"{method_name} needs the same tokens in all blocks, but the number of tokens differs between the blocks: "
            f"{', '.join(map(str, layouts))}. {advice}, and name the layer"
        )
    ((count, image_layout),) = layouts.items()
    selected = [attention for attention in attentions if attention.probabilities.shape[-1] == count]
    other_counts = dict.fromkeys(shape[-1] for shape in shapes if shape[-1] != count)
    notes = [f"attention between {plural(other, 'other token')}, on no grid, was left out" for other in other_counts]
    return TokenAttentions(selected, image_layout, notes)


def is_layout_undecided_by_noise_test(method_name: str, score: Score, x: Tensor, layout: Layout, n_tokens: int) -> bool:
    """Test with noise whether tokens have a layout. Return True if the test gives no clear answer. Raise LayerError if
    the test contradicts the layout.
    """

    def read_values_of_first_attention(run: Callable[[Tensor], object], inputs: Tensor) -> list[Tensor | None]:
        with AttentionRecorder() as recorder:
            recorder.run(lambda: run(inputs))
        for attention in recorder.attentions:
            if attention.probabilities.shape[-1] == n_tokens:
                values = attention.probabilities if attention.value is None else attention.value
                return [values.detach().transpose(1, 2).flatten(2)]
        return [None]

    def run_forward(inputs: Tensor) -> object:
        first = torch.zeros(1, dtype=torch.long, device=x.device)
        return score.forward(inputs, None if len(inputs) == len(x) else first)

    name = f"attention between {plural(n_tokens, 'token')}"
    result = probe_layout(
        score.model, [OutputLocation("", name)], layout, x, run_forward, read_outputs=read_values_of_first_attention
    )[0]
    if result.verdict is LayoutVerdict.CONTRADICTED:
        raise build_contradicted_layout_error(f"{method_name}, {name}", layout, result.reason)
    is_undecided = result.verdict is LayoutVerdict.UNDECIDED
    if is_undecided and (reason := find_random_masking_reason(score.model)):
        raise build_contradicted_layout_error(f"{method_name}, {name}", layout, reason)
    return is_undecided


class AttentionGradients(NamedTuple):
    """The attentions that a score depends on, their gradients, and the gradient at the output of the last one."""

    attentions: list[Attention]
    gradients: list[Tensor]
    output_gradient: Tensor | None


def compute_attention_gradients(
    values: Tensor, attentions: Sequence[Attention], *, all_blocks: bool
) -> AttentionGradients:
    """Compute the gradients of scores (N,) with respect to the last attention that affects them. With `all_blocks`,
    include all earlier attentions.
    """
    for count in range(len(attentions), 0, -1) if values.requires_grad else ():
        used = list(attentions[:count])
        selected = used if all_blocks else used[-1:]
        probabilities, last_output = [attention.probabilities for attention in selected], used[-1].output
        parts = [*probabilities, *([] if last_output is None else [last_output])]
        gradients = torch.autograd.grad(values.sum(), parts, retain_graph=True, allow_unused=True)
        if gradients[len(selected) - 1] is not None:
            pairs = zip(probabilities, gradients, strict=False)
            filled = [torch.zeros_like(part) if gradient is None else gradient for part, gradient in pairs]
            at_output = None if last_output is None or gradients[-1] is None else full_precision(gradients[-1])
            return AttentionGradients(used, filled, at_output)
    raise LayerError(
        "the score does not depend on any self-attention: the model detaches the attention, or the target does not read it"
    )


@dataclass(eq=False, repr=False)
class TokenAttentionExplainer(Explainer):
    """Base class of maps from the attention between tokens. A subclass implements `relevance`.

    A score depends on the tokens whose rows of the last attention have a gradient: the class token, or all tokens if
    they are pooled. The map shows which patches matter for these tokens. All of these tokens count equally.

    Args:
        layout: A Layout of tokens, if the grid is ambiguous.

    """

    _: KW_ONLY
    layout: str | Layout | None = None

    backward_passes: ClassVar[str] = "1"
    needs_all_gradients: ClassVar[bool] = False  # at every block, and not only at the last one
    needs_early_gradients: ClassVar[bool] = False  # of the score if the model ended with a block
    _needs_values: ClassVar[bool] = False  # queries, keys and values of the cells of one grid

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the method accepts an integer input. Always True, because the method never changes the input."""
        return True

    @abstractmethod
    def relevance(self, trace: AttentionTrace) -> Tensor:
        """Compute the relevance of each token (N,T) from the attentions and their gradients."""

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the attribution map (N,*grid) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of several scores from one forward pass."""
        return [
            compute_map_or_raise(entry) for entry in TokenAttentionExplainer.compute_shared_maps([self], x, scores)[0]
        ]

    @property
    def share_key(self) -> Hashable:
        """A key for shared forward passes: methods with equal keys share a pass."""
        return (TokenAttentionExplainer, self.precision, str(self.layout), self.on_nonfinite)

    @staticmethod
    def compute_shared_maps(
        explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score]
    ) -> list[list[AttributionMaps | DeferredMap]]:
        """Compute the maps as rows [method][score]. All maps share one forward pass. Each score has one backward pass."""
        attention_explainers = [explainer for explainer in explainers if isinstance(explainer, TokenAttentionExplainer)]
        first, model = attention_explainers[0], scores[0].model
        all_blocks = any(explainer.needs_all_gradients for explainer in attention_explainers)
        with AttentionRecorder() as recorder:
            blocks = AttentionBlockFinder(model, recorder.attentions)
            with ExitStack() as around:
                if any(explainer.needs_early_gradients for explainer in attention_explainers):
                    around.enter_context(blocks)
                layout_hints, lengths = record_layout_hints(model, around), record_token_counts(model, around)
                output = recorder.run(lambda: scores[0].forward(x))
            values = [score.read_score(output, len(x)) for score in scores]  # all are checked before any backward pass
            check_finite("the score", torch.cat(values), first.on_nonfinite)
            attentions, layout, skipped_notes = select_token_attentions(
                first.name, model, x, recorder.attentions, layout_hints, lengths, first.layout
            )
            rows: list[list[AttributionMaps]] = [[] for _ in attention_explainers]
            for score, value in zip(scores, values, strict=True):
                gradients = compute_attention_gradients(value, attentions, all_blocks=all_blocks)
                trace = AttentionTrace(x, score, layout, *gradients, blocks)
                for gradient in trace.gradients:
                    check_finite("the gradient at an attention", gradient, first.on_nonfinite)
                for row, explainer in zip(rows, attention_explainers, strict=True):
                    row.append(explainer._build_maps(trace, value, skipped_notes))
        count = attentions[0].probabilities.shape[-1]
        unverified = first.layout is None and is_layout_undecided_by_noise_test(first.name, scores[0], x, layout, count)
        return [[replace(maps, layout_unverified=unverified) for maps in row] for row in rows]

    def compute_text_maps(
        self, inputs: VisionLanguageInputs, targets: Sequence[Sequence[Any]], answers: Sequence[Sequence[Any]]
    ) -> list[list[TokenMap]]:
        """Compute the maps [image][target] of text that a vision-language model writes, from its attentions between all tokens.

        There is one forward pass, and one backward pass for each target. Only attentions of the language model count.
        """
        model: Any = unwrap(self.model)
        if inputs.is_encoder_decoder or self.needs_early_gradients or self._needs_values:
            kind = "an encoder-decoder model" if inputs.is_encoder_decoder else "the text of a vision-language model"
            raise TargetError(f"{self.name} cannot explain {kind}", fix="use gradcam, or chefer for a decoder")
        if not all(inputs.grids):
            raise LayerError(
                f"{self.name}: the image tokens of {type(model).__name__} are learned queries without a place on the image",
                fix="use a method of a layer of the vision tower, such as gradcam",
            )
        n_answer_tokens = max(max(answer.scored) + 1 for row in answers for answer in row)
        mask = inputs.image_token_mask
        with AttentionRecorder() as recorder:
            logits = recorder.run(lambda: run_model(model, inputs, n_answer_tokens))
            shape = (len(mask), mask.shape[1], mask.shape[1])
            attentions = [
                attention
                for attention in recorder.attentions
                if (attention.probabilities.shape[0], *attention.probabilities.shape[2:]) == shape
            ][-int(model.config.get_text_config().num_hidden_layers) :]
            if not attentions:
                raise LayerError(
                    f"{self.name}: no attention between the {plural(mask.shape[1], 'token')} of the prompt was recorded",
                    fix='load the model with attn_implementation="sdpa" or "eager"',
                )
            scored = [
                [score_answer(logits[i], target, answer) for target, answer in zip(*row, strict=True)]
                for i, row in enumerate(zip(targets, answers, strict=True))
            ]
            results: list[list[TokenMap]] = [[] for _ in targets]
            for q in range(len(targets[0])):
                values = torch.stack([row[q].value for row in scored])
                check_finite("the score", values, self.on_nonfinite)
                gradients = compute_attention_gradients(values, attentions, all_blocks=self.needs_all_gradients)
                whole = Layout(TOKENS, (mask.shape[1],))
                trace = AttentionTrace(mask, Score(model), whole, *gradients, AttentionBlockFinder(model, []))
                relevance = self.relevance(trace).detach()
                zero = ~trace.score_token_weights.any(1)
                notes = (f"{plural(len(trace.attentions), 'self-attention')} of the language model",)
                for i, grids in enumerate(inputs.grids):
                    maps = AttributionMaps(relevance[i][mask[i]][None], zero_gradient=zero[i : i + 1], notes=notes)
                    results[i].append(TokenMap(maps, grids, scored[i][q]))
        return results

    def _build_maps(self, trace: AttentionTrace, values: Tensor, skipped_notes: Sequence[str]) -> AttributionMaps:
        """Convert the relevance of the tokens to maps with notes and flags. `values` (N,) are the scores."""
        layout, weights, score = trace.layout, trace.score_token_weights, trace.score
        attribution = layout.to_maps(self.relevance(trace).detach()[..., None])[:, 0].clone()
        count, n_tokens = plural(len(trace.attentions), "self-attention"), plural(weights.shape[1], "token")
        sample_notes = tuple((f"the score reads {count} of the tokens",) for count in (weights > 0).sum(1).tolist())
        probabilities, gradient = trace.probabilities[-1], trace.gradients[-1]
        return AttributionMaps(
            attribution,
            layout=layout,
            zero_gradient=~weights.any(1),
            constant_score=find_samples_below_precision(score.machine_epsilon, values, gradient, probabilities),
            notes=(f"{count} between {n_tokens}", *skipped_notes),
            sample_notes=sample_notes,
        )
