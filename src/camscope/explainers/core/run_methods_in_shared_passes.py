"""Run several methods in as few passes as possible: on an input tensor, or on an image."""

import platform
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from contextlib import contextmanager
from math import isnan
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from camscope.errors import CamscopeError, InputError, ModelError, TargetError, warn_caller
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.evaluation_context import (
    ModelInfo,
    check_finite,
    check_no_inference_mode_weights,
    evaluation_context,
    has_interacting_samples,
    inspect_model,
)
from camscope.explainers.core.find_constant_scores_and_interacting_samples import find_samples_with_constant_score
from camscope.explainers.core.maps_with_flags import (
    AttributionMaps,
    compute_map_or_raise,
    concatenate_sample_maps,
    determine_statuses,
)
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ExtraInputs, ModelInput
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, ClassScore, Explanation
from camscope.hooks.find_layers import unwrap
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.targets import Score, TargetLike
from camscope.version import __version__

WEIGHTS_CHANGED_NOTE = (
    "the model's weights changed during the call, as if another thread trains it: the map mixes both states"
)
SEPARATE_SAMPLES_NOTE = "the samples of a batch affect one another in this model: each was explained separately"
STATUSES_OF_UNTESTED_SCORES = (STATUS_OK, "flat", "layout_unverified")  # the score may still be constant
MAX_TOP_CLASSES = 5

OnPass = Callable[[Sequence[BaseMethod]], None]  # called with the methods that run next: several if they share a pass
MethodErrors = dict[BaseMethod, CamscopeError]  # collects the errors of methods, which are raised without it


class MethodResult(NamedTuple):
    """The result of one method: facts about the model, and a score and maps for each target. There are no maps after an error."""

    model_info: ModelInfo
    scores: list[Score]
    maps: list[AttributionMaps]


def run_methods(
    explainers: Sequence[BaseMethod],
    x: Tensor,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    on_pass: OnPass | None = None,
    *,
    warn_flagged: bool = True,
    find_constant_scores: bool = True,
    errors: MethodErrors | None = None,
) -> list[MethodResult]:
    """Run several methods on one input x (N,C,*S), and return one result for each method.

    `on_pass` is called before each pass with the methods that share it. `warn_flagged` gives warnings about maps with a
    status other than "ok". `find_constant_scores` tests for this status whether noise changes the score. If `errors` is
    passed, the error of a method is stored there. Otherwise it is raised.
    """
    scores_suffice = all(explainer.needs_only_scores for explainer in explainers)
    model_info = inspect_model(explainers[0].model, scores_suffice=scores_suffice)
    if any(explainer.uses_gradients for explainer in explainers):
        check_no_inference_mode_weights(model_info)
    weights = model_info.read_version_counter_by_parameter_id()
    results: dict[int, MethodResult] = {}
    for indices in group_by_share_key(explainers):
        group = [explainers[t] for t in indices]
        try:
            rows = _run_group(
                group,
                model_info,
                x,
                targets,
                extra_inputs,
                on_pass,
                errors,
                find_constant_scores=find_constant_scores,
            )
        except RuntimeError as error:  # autograd notices some changes of the weights
            if model_info.read_version_counter_by_parameter_id() != weights:
                raise ModelError(
                    f"{WEIGHTS_CHANGED_NOTE}; explain copy.deepcopy(model), or wait until the training stops"
                ) from error
            raise
        results.update(zip(indices, rows, strict=True))
    if model_info.read_version_counter_by_parameter_id() != weights:
        warn_caller(WEIGHTS_CHANGED_NOTE)
        for maps in (maps for result in results.values() for maps in result.maps):
            maps.notes = (*maps.notes, WEIGHTS_CHANGED_NOTE)
    for t, explainer in enumerate(explainers):
        for maps in results[t].maps:
            with _method_error_collected(explainer, errors):
                check_finite(f"the map of {explainer.composed_name}", maps.attribution, explainer.on_nonfinite)
                for status in sorted(set(determine_statuses(maps)) - {STATUS_OK}) if warn_flagged else ():
                    warn_caller(
                        f"{METHODS.replace_names_by_titles(explainer.composed_name)}: {STATUS_MEANINGS[status]}"
                    )
    return [results[t] for t in range(len(explainers))]


@contextmanager
def _method_error_collected(explainer: BaseMethod, errors: MethodErrors | None) -> Iterator[None]:
    """Store a camscope error raised inside the `with` as the error of this method. If `errors` is None, raise it."""
    try:
        yield
    except CamscopeError as error:
        if errors is None:
            raise
        errors.setdefault(explainer, error)


def _run_group(
    explainers: Sequence[BaseMethod],
    model_info: ModelInfo,
    x: Tensor,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs,
    on_pass: OnPass | None,
    errors: MethodErrors | None,
    *,
    find_constant_scores: bool,
) -> list[MethodResult]:
    """Run methods that share passes on one input. If samples of the batch affect one another, run each sample separately."""
    main, runs_copies = explainers[0], any(hasattr(explainer, "batch_size") for explainer in explainers)
    if has_interacting_samples(model_info, main, x, extra_inputs):
        samples = []
        for i in range(len(x)):
            sample_targets = [select_sample_target(target, i, len(x)) for target in targets]
            extra = extra_inputs.select_rows([i], len(x))
            sample = x[i : i + 1]
            samples.append(
                _run_group(
                    explainers,
                    model_info,
                    sample,
                    sample_targets,
                    extra,
                    on_pass,
                    errors,
                    find_constant_scores=find_constant_scores,
                )
            )
        return [_join_sample_results(parts) for parts in zip(*samples, strict=True)]
    with evaluation_context(model_info, main, x, extra_inputs, runs_copies=runs_copies) as context:
        optional = not any(explainer.needs_target for explainer in explainers)
        scores = [context.create_score(main.resolve_target(target), optional_target=optional) for target in targets]
        rows = compute_group_maps(explainers, context.x, scores, on_pass, errors)
        for explainer, row in zip(explainers, rows, strict=True):
            for score, maps in zip(scores, row, strict=False) if find_constant_scores else ():  # no maps after an error
                flag_constant_scores(explainer, context.x, score, maps, model_info)
        return [MethodResult(model_info, scores, row) for row in rows]


def flag_constant_scores(
    explainer: BaseMethod, x: Tensor, score: Score, maps: AttributionMaps, model_info: ModelInfo
) -> None:
    """Test whether noise in place of x (N,C,*S) leaves the score unchanged. If so, set the flag `constant_score` of the maps.

    Gradients at a layer do not show this, because the layer itself may be constant. Methods that alter the input know
    it already. Controls get no flag, because their maps do not explain a score. The test takes one forward pass without
    hooks, once for each model, weights, input size and class.
    """
    is_known = getattr(explainer, "alters_input", False) and maps.constant_score is not None
    if explainer.control or is_known or score.values is None or not score.has_target(0):
        return
    rows = [n for n, status in enumerate(determine_statuses(maps)) if status in STATUSES_OF_UNTESTED_SCORES]
    if not rows:
        return
    uses_rival_scores = not getattr(explainer, "has_custom_backward", False) and (
        getattr(explainer, "runs_model", False) or getattr(explainer, "differentiated_score_key", "score") != "score"
    )  # the map uses more than the score of its class: probabilities, or scores of rival classes
    weights_key = hash(frozenset(model_info.read_version_counter_by_parameter_id().items()))
    constant = find_samples_with_constant_score(x, score, rows, weights_key, include_probabilities=uses_rival_scores)
    if constant is not None and maps.constant_score is not None:
        constant = constant | maps.constant_score.to(constant.device)
    maps.constant_score = maps.constant_score if constant is None else constant


def select_sample_target(target: TargetLike, sample: int, n_samples: int) -> TargetLike:
    """Select the target of one sample from the targets of a batch. If all samples have the same target, return it unchanged."""
    is_single = isinstance(target, str) or getattr(target, "ndim", 1) == 0  # a number in an array has an axis less
    if callable(target) or not isinstance(target, Sized) or is_single:
        return target
    if len(target) != n_samples:
        raise TargetError(f"{plural(len(target), 'target')} for a batch of {n_samples}: give one, or one per sample")
    return cast(TargetLike, target[sample : sample + 1])


def _join_sample_results(parts: Sequence[MethodResult]) -> MethodResult:
    """Join results that were computed one sample at a time. If any sample has an error, the joined result has no maps."""
    scores = [Score.concatenate(samples) for samples in zip(*(part.scores for part in parts), strict=True)]
    by_target = zip(*(part.maps for part in parts), strict=False)
    return MethodResult(
        parts[0].model_info, scores, [concatenate_sample_maps(samples, SEPARATE_SAMPLES_NOTE) for samples in by_target]
    )


def group_by_share_key(explainers: Sequence[BaseMethod]) -> list[list[int]]:
    """Group methods that can share passes. Each group is a list of indices of methods."""
    groups: dict[Hashable, list[int]] = {}
    for t, explainer in enumerate(explainers):
        groups.setdefault((explainer.mode, *explainer.forward_options.values(), explainer.share_key), []).append(t)
    return list(groups.values())


def compute_group_maps(
    explainers: Sequence[BaseMethod],
    x: Tensor,
    scores: Sequence[Score],
    on_pass: OnPass | None = None,
    errors: MethodErrors | None = None,
) -> list[list[AttributionMaps]]:
    """Compute the maps of a group of methods that share passes, as rows [method][score].

    Methods that run only the layers behind the explained one come first. Methods that run other inputs come later,
    because a module may keep state of its last input.
    """
    if on_pass is not None:
        on_pass(explainers)
    shared = explainers[0].compute_shared_maps(explainers, x, scores)
    rows: list[list[AttributionMaps]] = [[] for _ in explainers]
    for t in sorted(range(len(explainers)), key=lambda t: not explainers[t].runs_partial_forward):
        with _method_error_collected(explainers[t], errors):
            maps = []
            for entry in shared[t]:
                if callable(entry) and on_pass is not None:
                    on_pass([explainers[t]])
                maps.append(compute_map_or_raise(entry))
            rows[t] = maps
    return rows


def explain_grid(
    explainers: Sequence[BaseMethod],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    on_pass: OnPass | None = None,
    errors: MethodErrors | None = None,
) -> list[list[Explanation]]:
    """Explain one image by several methods for several targets. Return rows [method][target] of explanations."""
    if not explainers or not targets:
        raise TargetError(
            "no targets or no methods: pass at least one method and one target, e.g. targets [281, 285] or [None]"
        )
    check_compatible_explainers(explainers)
    main = explainers[0]
    item = main.prepare_input(image)
    bound = [main.prepare_each_target_for_its_image([target], [item], extra_inputs) for target in targets]
    results = run_methods(explainers, item.x[None], bound, extra_inputs, on_pass, errors=errors)
    digest = compute_model_digest(unwrap(main.model))
    return [
        [build_explanations(explainer, [item], result, q, digest)[0] for q in range(len(result.maps))]
        for explainer, result in zip(explainers, results, strict=True)
    ]


def check_compatible_explainers(explainers: Sequence[BaseMethod]) -> None:
    """Raise InputError if the explainers have different models, preprocessings or class names."""
    main = explainers[0]
    for explainer in explainers[1:]:
        if unwrap(explainer.model) is not unwrap(main.model):
            raise InputError(f"{main!r} and {explainer!r} have different models: explain each separately")
        for setting in ("preprocess", "class_names"):
            if getattr(explainer, setting) != getattr(main, setting):
                raise InputError(f"{main!r} and {explainer!r} have different {setting}: explain each separately")


def build_explanations(
    explainer: BaseMethod, inputs: Sequence[ModelInput], result: MethodResult, target_index: int, model_digest: str
) -> list[Explanation]:
    """Build one explanation per sample for one target."""
    score, maps = result.scores[target_index].to_cpu(), result.maps[target_index]
    attributions = maps.attribution.cpu().numpy()
    standard_errors = None if maps.standard_error is None else maps.standard_error.cpu().numpy()
    diagnostics = {name: values.tolist() for name, values in maps.diagnostics.items()}
    statuses, predictions = determine_statuses(maps), _collect_predictions(score, len(inputs))
    parameters, versions = explainer.parameters, get_library_versions()
    return [
        Explanation(
            attribution=attributions[i].copy(),
            standard_error=None if standard_errors is None else standard_errors[i].copy(),
            method=explainer.composed_name,
            **predictions[i],
            layer=maps.layer,
            layout=str(maps.layout) if maps.layout else None,
            input_size=tuple(item.x.shape[1:]),
            placement=item.placement,
            status=statuses[i],
            notes=_collect_notes(
                explainer, maps.get_sample_notes(i), item, result.model_info, has_target=score.has_target(i)
            ),
            name=item.name,
            diagnostics={name: values[i] for name, values in diagnostics.items()},
            parameters=parameters if item.image is None else {**parameters, "preprocess": repr(explainer.preprocess)},
            versions=versions,
            model=model_digest,
            image=item.image,
            model_input_image=item.model_input_image,
            affine=item.affine,
            scan_steps=item.scan_steps,
        )
        for i, item in enumerate(inputs)
    ]


def _collect_notes(
    explainer: BaseMethod,
    map_notes: tuple[str, ...],
    model_input: ModelInput,
    model_info: ModelInfo,
    *,
    has_target: bool,
) -> tuple[str, ...]:
    """Collect the notes of an explanation on its map, its input, its target and its model."""
    notes, model_name = [*map_notes, *model_input.flags], type(explainer.model).__name__
    if not has_target:
        notes.append("no target was used: the map does not depend on the output, which has no class scores")
    elif not explainer.class_specific:
        notes.append("the map does not depend on the score")
    if model_info.model is not explainer.model:
        notes.append(f"the eager model inside {model_name} was explained")
    elif model_info.is_compiled:
        notes.append(f"{model_name} is compiled, or a part of it: its eager form was explained")
    if model_input.placement is None:
        notes.append(
            "placement unknown: the preprocessing has no known geometry on this image; the map is drawn on the model's input"
        )
    return tuple(notes)


def _collect_predictions(score: Score, n_samples: int) -> list[dict[str, Any]]:
    """Return, for each sample, those fields of `Explanation` that describe the target and the prediction."""
    values = [float("nan")] * n_samples if score.values is None else score.values.tolist()
    probabilities, class_indices = score.probabilities(), [score.class_index(i) for i in range(n_samples)]
    tops = _collect_top_classes(score, n_samples, probabilities)
    return [
        {
            "target": index,
            "label": score.describe(i),
            "score": values[i],
            "probability": None if index is None or probabilities is None else _nan_to_none(probabilities[i, index]),
            "top_classes": tops[i],
        }
        for i, index in enumerate(class_indices)
    ]


def _collect_top_classes(score: Score, n_samples: int, probabilities: Tensor | None) -> list[tuple[ClassScore, ...]]:
    """Return the classes with the highest scores for each sample. Return empty tuples without class scores."""
    if score.logits is None:
        return [()] * n_samples
    best = score.logits.double().topk(min(MAX_TOP_CLASSES, score.logits.shape[1]), 1)
    shares = torch.full_like(best.values, torch.nan) if probabilities is None else probabilities.gather(1, best.indices)
    columns = zip(*(part.tolist() for part in (best.indices, best.values, shares)), strict=True)
    return [
        tuple(
            ClassScore(k, score.class_name(k), value, _nan_to_none(share)) for k, value, share in zip(*row, strict=True)
        )
        for row in columns
    ]


def _nan_to_none(probability: Tensor | float) -> float | None:
    return None if isnan(probability) else float(probability)


def get_library_versions() -> dict[str, str]:
    """Return the versions of camscope, torch and Python."""
    return {"camscope": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
