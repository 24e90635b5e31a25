"""Dispatch: explanations of one input by one or several methods, with shared passes.

- One call: several methods asked several questions of one input, from as few passes as possible.
- Several methods asked several questions of one image: from the image to the explanations.
- What is asked of an image, in the scene of that image: its places, and what the model makes of others.
- One method's error among several that share a pass: the others go on, where whoever asked them wants that.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
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
    collect_predictions,
    determine_statuses,
    get_library_versions,
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
SEPARATE_SAMPLES_NOTE = "the samples of a batch see one another in this model: each was explained by itself"

OnPass = Callable[[Sequence[BaseMethod]], None]  # told which methods work next: those that share a pass, or one alone


@dataclass(frozen=True)
class MethodResult:
    """What a call gives of one method: the model as it was found, and each question with its maps."""

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
    """[method]: the maps of every question about one input x (N,C,*S). `warn_flagged`: of maps that are flagged.

    Where the samples of a batch see one another in the model, each is explained by itself.
    """
    known = inspect_model(explainers[0].model)
    if any(tool.uses_gradients for tool in explainers):
        check_differentiable(known)
    weights, runs = weight_versions(known.model), dict[int, MethodResult]()
    for numbers in group_by_share_key(explainers):
        company = [explainers[t] for t in numbers]
        try:
            each = _compute_group_results(company, known, x, targets, extra_inputs, on_pass)
        except RuntimeError as error:  # autograd notices some of it
            if weight_versions(known.model) != weights:
                raise ModelError(
                    f"{WEIGHTS_CHANGED_NOTE}; explain copy.deepcopy(model), or wait for the other thread"
                ) from error
            raise
        runs.update({t: MethodResult(known, *answer) for t, answer in zip(numbers, each, strict=True)})
    changed = weight_versions(known.model) != weights
    if changed:
        warn_caller(WEIGHTS_CHANGED_NOTE)
        for one in (one for each in runs.values() for one in each.maps):
            one.notes = (*one.notes, WEIGHTS_CHANGED_NOTE)
    for t, tool in enumerate(explainers):
        for one in runs[t].maps:
            check_finite(f"the map of {tool.full_name}", one.attribution, tool.on_nonfinite)
            for status in sorted(
                {status for status in determine_statuses(one) if status != STATUS_OK} if warn_flagged else ()
            ):
                warn_caller(f"{tool.full_name}: {STATUS_MEANINGS[status]}")
    return [runs[t] for t in range(len(explainers))]


def _compute_group_results(
    explainers: Sequence[BaseMethod],
    model_info: ModelInfo,
    x: Tensor,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs,
    on_pass: OnPass | None,
) -> list[tuple[list[Score], list[AttributionMaps]]]:
    """[method]: scores and maps of the methods of one company."""
    first, copies = explainers[0], any(hasattr(tool, "batch_size") for tool in explainers)
    if has_interacting_samples(model_info, first, x, extra_inputs):
        rows = range(len(x))
        questions = [[select_sample_target(target, row, len(x)) for target in targets] for row in rows]
        parts = [
            _compute_group_results(
                explainers,
                model_info,
                x[row : row + 1],
                questions[row],
                extra_inputs.select_rows([row], len(x)),
                on_pass,
            )
            for row in rows
        ]
        return [_join_samples([part[t] for part in parts]) for t in range(len(explainers))]
    with evaluation_context(model_info, first, x, extra_inputs, runs_copies=copies) as asked:
        scores = [asked.create_score(first.resolve_target(target)) for target in targets]
        several = compute_group_maps(explainers, asked.x, scores, on_pass)
        weights = weights_key(model_info.model)
        for tool, each in zip(explainers, several, strict=True):
            for score, maps in zip(scores, each, strict=True):
                flag_constant_scores(tool, asked.x, score, maps, weights)
        return [(scores, maps) for maps in several]


def select_sample_target(target: TargetLike, sample: int, n_samples: int) -> TargetLike:
    """One sample's question, of those of a batch."""
    single = isinstance(target, str) or getattr(target, "ndim", 1) == 0  # a number in an array has an axis less
    if callable(target) or not isinstance(target, Sized) or single:
        return target
    if len(target) != n_samples:
        raise TargetError(f"{plural(len(target), 'target')} for a batch of {n_samples}: give one, or one per sample")
    return cast(TargetLike, target[sample : sample + 1])


def _join_samples(
    parts: Sequence[tuple[list[Score], list[AttributionMaps]]],
) -> tuple[list[Score], list[AttributionMaps]]:
    """Scores and maps of samples that were explained one by one, as those of their batch."""
    scores = [Score.concatenate(each) for each in zip(*(part[0] for part in parts), strict=True)]
    return scores, [
        stack_samples(each, SEPARATE_SAMPLES_NOTE) for each in zip(*(part[1] for part in parts), strict=True)
    ]


def group_by_share_key(explainers: Sequence[BaseMethod]) -> list[list[int]]:
    """The numbers of the methods of each company: of those that can share passes."""
    found: dict[Hashable, list[int]] = {}
    for t, tool in enumerate(explainers):
        found.setdefault((tool.mode, *tool.call_settings.values(), tool.share_key), []).append(t)
    return list(found.values())


def compute_group_maps(
    explainers: Sequence[BaseMethod], x: Tensor, scores: Sequence[Score], on_pass: OnPass | None = None
) -> list[list[AttributionMaps]]:
    """[method][score] of one company: what its shared passes give, then what takes passes of its own.

    What a module keeps on itself is of the last input that it saw: methods that run only the rest of the model, behind a
    layer, come before those that show the model other inputs.
    """
    if on_pass is not None:
        on_pass(explainers)
    rows, done = explainers[0].compute_shared_maps(explainers, x, scores), dict[int, list[AttributionMaps]]()
    for t in sorted(range(len(explainers)), key=lambda t: not explainers[t].runs_partial_forward):
        done[t] = []
        for one in rows[t]:
            if callable(one) and on_pass is not None:
                on_pass([explainers[t]])
            done[t].append(one() if callable(one) else one)
    return [done[t] for t in range(len(explainers))]


def explain_grid(
    explainers: Sequence[BaseMethod],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    on_pass: OnPass | None = None,
) -> list[list[Explanation]]:
    """[method][target]: what several methods say of one image of one model, from as few passes as possible.

    `on_pass`: told which methods work next, for a progress bar or a clock.
    """
    if not explainers or not targets:
        raise TargetError("no targets, or no methods: pass one at least of each, e.g. targets [281, 285] or [None]")
    check_compatible_explainers(explainers)
    item = explainers[0].prepare_input(image)
    runs = run_methods(
        explainers,
        item.x[None],
        [bind_targets(explainers[0], [one], [item], extra_inputs) for one in targets],
        extra_inputs,
        on_pass,
    )
    digits = compute_model_digest(runs[0].model_info.model)
    return [
        [build_explanations(tool, [item], made, which, digits)[0] for which in range(len(targets))]
        for tool, made in zip(explainers, runs, strict=True)
    ]


def check_compatible_explainers(explainers: Sequence[BaseMethod]) -> None:
    """An InputError unless all are of one model, and see and name the same things."""
    first = explainers[0]
    for tool in explainers[1:]:
        if unwrap(tool.model) is not unwrap(first.model):
            raise InputError(f"{first!r} and {tool!r} are not of one model: explain each by itself")
        for setting in ("preprocess", "class_names"):
            if getattr(tool, setting) != getattr(first, setting):
                raise InputError(f"{first!r} and {tool!r} have another {setting}: explain each by itself")


def build_explanations(
    explainer: BaseMethod, inputs: Sequence[ModelInput], result: MethodResult, target_index: int, model_digest: str
) -> list[Explanation]:
    """[sample]: what a call found of one of its questions. What is on a GPU is fetched once, not for each sample."""
    score, maps = result.scores[target_index].to_cpu(), result.maps[target_index]
    heat, error = (
        maps.attribution.cpu().numpy(),
        None if maps.standard_error is None else maps.standard_error.cpu().numpy(),
    )
    measures = {name: values.tolist() for name, values in maps.diagnostics.items()}
    status, settings, under, said = (
        determine_statuses(maps),
        explainer.parameters,
        get_library_versions(),
        collect_predictions(score, len(inputs)),
    )
    return [
        Explanation(
            attribution=heat[i].copy(),
            standard_error=None if error is None else error[i].copy(),
            method=explainer.full_name,
            **said[i],
            layer=maps.layer,
            layout=str(maps.layout) if maps.layout else None,
            input_size=tuple(item.x.shape[1:]),
            placement=item.placement,
            status=status[i],
            notes=_collect_notes(explainer, maps.get_sample_notes(i), item, result.model_info),
            name=item.name,
            diagnostics={name: values[i] for name, values in measures.items()},
            parameters=settings if item.image is None else {**settings, "preprocess": repr(explainer.preprocess)},
            versions=under,
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
    """What is asked of several inputs, each question in the scene of its own image; one where all are the same."""
    seen = [
        target.bind(_build_image_context(explainer, item, extra_inputs.select_rows([i], len(inputs))))
        if isinstance(target, Target)
        else target
        for i, (target, item) in enumerate(zip(targets, inputs, strict=True))
    ]
    return seen[0] if all(one is seen[0] for one in seen) else cast(TargetLike, seen)


def _build_image_context(explainer: BaseMethod, model_input: ModelInput, extra_inputs: ExtraInputs) -> ImageContext:
    place = model_input.placement
    card = get_card(unwrap(explainer.model))
    return ImageContext(
        input_size=tuple(model_input.x.shape[1:]),
        image_size=place.image_size if place else None,
        to_input=place.to_input if place else _raise_unknown_geometry,
        to_image=place.to_image if place else _raise_unknown_geometry,
        embed_image=partial(_embed_image, explainer, extra_inputs=extra_inputs),
        embed_text=card.embed_text if card else None,
    )


def _embed_image(explainer: BaseMethod, image: Any, extra_inputs: ExtraInputs) -> Tensor:
    """(D,): what the model makes of another image, beside the same companions."""
    with evaluation_context(
        inspect_model(explainer.model), explainer, explainer.prepare_input(image).x[None], extra_inputs
    ) as asked:
        return image_embedding(asked.create_score().forward(asked.x))[0].detach()


def _raise_unknown_geometry(points: ArrayLike) -> NDArray[Any]:
    raise TargetError("the preprocessing has no known geometry: a place on the image cannot be found on the input")


ErrorsByMethodId = dict[int, CamscopeError | None]

_active_error_collection: ContextVar[ErrorsByMethodId | None] = ContextVar("_asked", default=None)


@contextmanager
def collect_errors(methods: Sequence[object]) -> Iterator[ErrorsByMethodId]:
    """Inside, none of these raises what its own map meets with: at the end it is here, by the method's id."""
    errors: ErrorsByMethodId = {id(method): None for method in methods}
    token = _active_error_collection.set(errors)
    try:
        yield errors
    finally:
        _active_error_collection.reset(token)


def run_or_record(method: object, compute_maps: Callable[[], AttributionMaps], x: Tensor) -> AttributionMaps:
    """What `compute_maps` makes of x (N,C,*S); of an excused method in error, maps (N,2) that mean nothing."""
    try:
        return compute_maps()
    except CamscopeError as error:
        errors = _active_error_collection.get()
        if errors is None or id(method) not in errors:
            raise
        errors[id(method)] = error
        return AttributionMaps(x.new_tensor([[0.0, 1.0]]).expand(len(x), 2))
