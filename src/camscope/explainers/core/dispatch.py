"""Dispatch: run one or several methods on one input and several targets, in as few model passes as possible.

- `run_methods`: from an input tensor to raw maps.
- `explain_grid`: from an image to explanations.
- `explain_grid_or_errors`: the same, with the error of a method in place of its explanations.
"""

from collections.abc import Callable, Hashable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.errors import CamscopeError, InputError, ModelError, TargetError, warn_caller
from camscope.explainers.core.constant_scores import flag_constant_scores
from camscope.explainers.core.evaluation_context import (
    ModelInfo,
    check_differentiable,
    check_finite,
    evaluation_context,
    has_interacting_samples,
    inspect_model,
    weight_versions,
    weights_key,
)
from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ExtraInputs, ModelInput
from camscope.explainers.core.maps import (
    AttributionMaps,
    DeferredMap,
    collect_predictions,
    determine_statuses,
    get_library_versions,
    resolve_map,
    stack_samples,
)
from camscope.explainers.core.method import BaseMethod
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, Explanation
from camscope.hooks.base import unwrap
from camscope.model_card import compute_model_digest, get_card
from camscope.plurals import plural
from camscope.targets import ImageContext, Score, Target, TargetLike, image_embedding

WEIGHTS_CHANGED_NOTE = (
    "the model's weights changed during the call, as where another thread trains it: the map mixes both models"
)
SEPARATE_SAMPLES_NOTE = "the samples of a batch affect one another in this model: each was explained separately"

OnPass = Callable[[Sequence[BaseMethod]], None]  # called with the methods that run next: several if they share a pass


@dataclass(frozen=True)
class MethodResult:
    """The result of one method: the model that was explained, and the score and the maps of each target."""

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
) -> list[MethodResult]:
    """Return the result of each method for one input x (N,C,*S); raise the first error of a method.

    If the samples of a batch affect one another in the model, each sample is explained separately. `on_pass` is called
    before each pass with the methods that share it. `warn_flagged`: warn about maps with a status other than "ok".
    """
    results = _run_methods(explainers, x, targets, extra_inputs, on_pass, warn_flagged=warn_flagged, keep_errors=False)
    return [result for result in results if isinstance(result, MethodResult)]


def _run_methods(
    explainers: Sequence[BaseMethod],
    x: Tensor,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs,
    on_pass: OnPass | None,
    *,
    warn_flagged: bool,
    keep_errors: bool,
) -> list[MethodResult | CamscopeError]:
    """Return the result of each method, or, with `keep_errors`, the error that its own map met with."""
    model_info = inspect_model(explainers[0].model)
    if any(explainer.uses_gradients for explainer in explainers):
        check_differentiable(model_info)
    weights = weight_versions(model_info.model)
    results: dict[int, MethodResult | CamscopeError] = {}
    for indices in group_by_share_key(explainers):
        group = [explainers[t] for t in indices]
        try:
            rows = _compute_group_results(group, model_info, x, targets, extra_inputs, on_pass, keep_errors=keep_errors)
        except RuntimeError as error:  # autograd notices some changes of the weights
            if weight_versions(model_info.model) != weights:
                raise ModelError(
                    f"{WEIGHTS_CHANGED_NOTE}; explain copy.deepcopy(model), or wait for the other thread"
                ) from error
            raise
        results |= {
            t: row if isinstance(row, CamscopeError) else MethodResult(model_info, *row)
            for t, row in zip(indices, rows, strict=True)
        }
    if weight_versions(model_info.model) != weights:
        warn_caller(WEIGHTS_CHANGED_NOTE)
        for result in results.values():
            for maps in result.maps if isinstance(result, MethodResult) else ():
                maps.notes = (*maps.notes, WEIGHTS_CHANGED_NOTE)
    for t, explainer in enumerate(explainers):
        try:
            _check_result(explainer, results[t], warn_flagged=warn_flagged)
        except CamscopeError as error:
            if not keep_errors:
                raise
            results[t] = error
    return [results[t] for t in range(len(explainers))]


def _check_result(explainer: BaseMethod, result: MethodResult | CamscopeError, *, warn_flagged: bool) -> None:
    """Raise NonFiniteError for a map with NaN or infinity, and warn about each status other than "ok"."""
    for maps in result.maps if isinstance(result, MethodResult) else ():
        check_finite(f"the map of {explainer.full_name}", maps.attribution, explainer.on_nonfinite)
        if warn_flagged:
            for status in sorted(set(determine_statuses(maps)) - {STATUS_OK}):
                warn_caller(f"{explainer.full_name}: {STATUS_MEANINGS[status]}")


def _compute_group_results(
    explainers: Sequence[BaseMethod],
    model_info: ModelInfo,
    x: Tensor,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs,
    on_pass: OnPass | None,
    *,
    keep_errors: bool,
) -> list[tuple[list[Score], list[AttributionMaps]] | CamscopeError]:
    """Return scores and maps, or the error, of each method of a group that shares passes."""
    first, runs_copies = explainers[0], any(hasattr(explainer, "batch_size") for explainer in explainers)
    if has_interacting_samples(model_info, first, x, extra_inputs):
        samples = [
            _compute_group_results(
                explainers,
                model_info,
                x[row : row + 1],
                [select_sample_target(target, row, len(x)) for target in targets],
                extra_inputs.select_rows([row], len(x)),
                on_pass,
                keep_errors=keep_errors,
            )
            for row in range(len(x))
        ]
        return [_join_samples(parts) for parts in zip(*samples, strict=True)]
    with evaluation_context(model_info, first, x, extra_inputs, runs_copies=runs_copies) as context:
        scores = [context.create_score(first.resolve_target(target)) for target in targets]
        rows = _compute_group_rows(explainers, context.x, scores, on_pass, keep_errors=keep_errors)
        key = weights_key(model_info.model)
        for explainer, row in zip(explainers, rows, strict=True):
            for score, maps in zip(scores, row, strict=True) if isinstance(row, list) else ():
                flag_constant_scores(explainer, context.x, score, maps, key)
        return [(scores, row) if isinstance(row, list) else row for row in rows]


def select_sample_target(target: TargetLike, sample: int, n_samples: int) -> TargetLike:
    """Return the target of one sample, from the targets of a batch."""
    is_single = isinstance(target, str) or getattr(target, "ndim", 1) == 0  # a number in an array has an axis less
    if callable(target) or not isinstance(target, Sized) or is_single:
        return target
    if len(target) != n_samples:
        raise TargetError(f"{plural(len(target), 'target')} for a batch of {n_samples}: give one, or one per sample")
    return cast(TargetLike, target[sample : sample + 1])


def _join_samples(
    parts: Sequence[tuple[list[Score], list[AttributionMaps]] | CamscopeError],
) -> tuple[list[Score], list[AttributionMaps]] | CamscopeError:
    """Join scores and maps of samples that were explained one by one; the first error if there is one."""
    error = next((part for part in parts if isinstance(part, CamscopeError)), None)
    if error is not None:
        return error
    results = [part for part in parts if not isinstance(part, CamscopeError)]
    scores = [Score.concatenate(samples) for samples in zip(*(result[0] for result in results), strict=True)]
    maps = [
        stack_samples(samples, SEPARATE_SAMPLES_NOTE)
        for samples in zip(*(result[1] for result in results), strict=True)
    ]
    return scores, maps


def group_by_share_key(explainers: Sequence[BaseMethod]) -> list[list[int]]:
    """Return groups of indices: the methods of a group can share passes."""
    groups: dict[Hashable, list[int]] = {}
    for t, explainer in enumerate(explainers):
        groups.setdefault((explainer.mode, *explainer.call_settings.values(), explainer.share_key), []).append(t)
    return list(groups.values())


def compute_group_maps(
    explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score], on_pass: OnPass | None = None
) -> list[list[AttributionMaps]]:
    """Return the maps [method][score] of a group that shares passes; raise the first error of a method.

    A module may keep state of its last input. Methods that run only the layers behind the explained one therefore come
    before those that show the model other inputs.
    """
    rows = _compute_group_rows(explainers, x, scores, on_pass, keep_errors=False)
    return [row for row in rows if isinstance(row, list)]


def _compute_group_rows(
    explainers: Sequence[BaseMethod],
    x: Tensor,
    scores: Sequence[Score],
    on_pass: OnPass | None,
    *,
    keep_errors: bool,
) -> list[list[AttributionMaps] | CamscopeError]:
    if on_pass is not None:
        on_pass(explainers)
    shared = explainers[0].compute_shared_maps(explainers, x, scores)
    rows: dict[int, list[AttributionMaps] | CamscopeError] = {}
    for t in sorted(range(len(explainers)), key=lambda t: not explainers[t].runs_partial_forward):
        try:
            rows[t] = [_finish_map(entry, explainers[t], on_pass) for entry in shared[t]]
        except CamscopeError as error:
            if not keep_errors:
                raise
            rows[t] = error
    return [rows[t] for t in range(len(explainers))]


def _finish_map(
    entry: AttributionMaps | DeferredMap | CamscopeError, explainer: BaseMethod, on_pass: OnPass | None
) -> AttributionMaps:
    if callable(entry) and on_pass is not None:
        on_pass([explainer])
    return resolve_map(entry)


def explain_grid(
    explainers: Sequence[BaseMethod],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    on_pass: OnPass | None = None,
) -> list[list[Explanation]]:
    """Return the explanations [method][target] of one image by methods of one model; raise the first error of a method.

    `on_pass` is called before each pass with the methods that share it, for a progress bar or a timer.
    """
    rows = _explain_grid(explainers, image, targets, extra_inputs, on_pass, keep_errors=False)
    return [row for row in rows if isinstance(row, list)]


def explain_grid_or_errors(
    explainers: Sequence[BaseMethod],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    on_pass: OnPass | None = None,
) -> list[list[Explanation] | CamscopeError]:
    """Return for each method its explanations, or the error of its own map; see `explain_grid`.

    An error in a pass that several methods share is raised, because it cannot be attributed to one method.
    """
    return _explain_grid(explainers, image, targets, extra_inputs, on_pass, keep_errors=True)


def _explain_grid(
    explainers: Sequence[BaseMethod],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs,
    on_pass: OnPass | None,
    *,
    keep_errors: bool,
) -> list[list[Explanation] | CamscopeError]:
    if not explainers or not targets:
        raise TargetError("no targets or no methods: pass at least one of each, e.g. targets [281, 285] or [None]")
    check_compatible_explainers(explainers)
    model_input = explainers[0].prepare_input(image)
    results = _run_methods(
        explainers,
        model_input.x[None],
        [bind_targets(explainers[0], [target], [model_input], extra_inputs) for target in targets],
        extra_inputs,
        on_pass,
        warn_flagged=True,
        keep_errors=keep_errors,
    )
    digest = compute_model_digest(inspect_model(explainers[0].model).model)
    return [
        result
        if isinstance(result, CamscopeError)
        else [build_explanations(explainer, [model_input], result, q, digest)[0] for q in range(len(targets))]
        for explainer, result in zip(explainers, results, strict=True)
    ]


def check_compatible_explainers(explainers: Sequence[BaseMethod]) -> None:
    """Raise InputError unless all explainers have the same model, preprocessing and class names."""
    first = explainers[0]
    for explainer in explainers[1:]:
        if unwrap(explainer.model) is not unwrap(first.model):
            raise InputError(f"{first!r} and {explainer!r} are not of one model: explain each separately")
        for setting in ("preprocess", "class_names"):
            if getattr(explainer, setting) != getattr(first, setting):
                raise InputError(f"{first!r} and {explainer!r} have different {setting}: explain each separately")


def build_explanations(
    explainer: BaseMethod, inputs: Sequence[ModelInput], result: MethodResult, target_index: int, model_digest: str
) -> list[Explanation]:
    """Return the explanation of each sample for one target. Maps on a GPU are copied once, not for each sample."""
    score, maps = result.scores[target_index].to_cpu(), result.maps[target_index]
    attributions = maps.attribution.cpu().numpy()
    standard_errors = None if maps.standard_error is None else maps.standard_error.cpu().numpy()
    diagnostics = {name: values.tolist() for name, values in maps.diagnostics.items()}
    statuses, predictions = determine_statuses(maps), collect_predictions(score, len(inputs))
    parameters, versions = explainer.parameters, get_library_versions()
    return [
        Explanation(
            attribution=attributions[i].copy(),
            standard_error=None if standard_errors is None else standard_errors[i].copy(),
            method=explainer.full_name,
            **predictions[i],
            layer=maps.layer,
            layout=str(maps.layout) if maps.layout else None,
            input_size=tuple(item.x.shape[1:]),
            placement=item.placement,
            status=statuses[i],
            notes=_collect_notes(explainer, maps.get_sample_notes(i), item, result.model_info),
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
    explainer: BaseMethod, map_notes: tuple[str, ...], model_input: ModelInput, model_info: ModelInfo
) -> tuple[str, ...]:
    notes = [*map_notes, *model_input.flags]
    if not explainer.class_specific:
        notes.append("the map does not depend on the score")
    if model_info.model is not explainer.model:
        notes.append(f"the eager model inside {type(explainer.model).__name__} was explained")
    elif model_info.is_compiled:
        notes.append(f"{type(explainer.model).__name__} is compiled, or a part of it: its eager form was explained")
    if model_input.placement is None:
        notes.append(
            "placement unknown: the preprocessing has no known geometry on this image; the map is drawn on the model's input"
        )
    return tuple(notes)


def bind_targets(
    explainer: BaseMethod, targets: Sequence[TargetLike], inputs: Sequence[ModelInput], extra_inputs: ExtraInputs
) -> TargetLike:
    """Bind each target to its own image, and return one target if all are the same, else a list."""
    bound = [
        target.bind(_build_image_context(explainer, item, extra_inputs.select_rows([i], len(inputs))))
        if isinstance(target, Target)
        else target
        for i, (target, item) in enumerate(zip(targets, inputs, strict=True))
    ]
    return bound[0] if all(target is bound[0] for target in bound) else cast(TargetLike, bound)


def _build_image_context(explainer: BaseMethod, model_input: ModelInput, extra_inputs: ExtraInputs) -> ImageContext:
    placement = model_input.placement
    card = get_card(unwrap(explainer.model))
    return ImageContext(
        input_size=tuple(model_input.x.shape[1:]),
        image_size=placement.image_size if placement else None,
        to_input=placement.to_input if placement else _raise_unknown_geometry,
        to_image=placement.to_image if placement else _raise_unknown_geometry,
        embed_image=partial(_embed_image, explainer, extra_inputs=extra_inputs),
        embed_text=card.embed_text if card else None,
    )


def _embed_image(explainer: BaseMethod, image: Any, extra_inputs: ExtraInputs) -> Tensor:
    """Return the embedding (D,) of another image, with the same extra inputs."""
    with evaluation_context(
        inspect_model(explainer.model), explainer, explainer.prepare_input(image).x[None], extra_inputs
    ) as context:
        return image_embedding(context.create_score().forward(context.x))[0].detach()


def _raise_unknown_geometry(points: ArrayLike) -> NDArray[Any]:
    raise TargetError(
        "the preprocessing has no known geometry: a point of the image cannot be located on the model's input"
    )
