"""Explain tokens and answers of a vision-language model: from images, prompts and targets to explanations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from camscope.errors import InputError, TargetError, warn_caller
from camscope.explainers.core.evaluation_context import (
    ModelInfo,
    autocast_scope,
    check_finite,
    check_no_inference_mode_weights,
    inference_scope,
    inspect_model,
)
from camscope.explainers.core.maps_with_flags import determine_statuses
from camscope.explainers.core.run_methods_in_shared_passes import get_library_versions
from camscope.explainers.vision_language.answer_scores_and_gradients import cached_attributes_restored, describe_answer
from camscope.explainers.vision_language.explain_changed_images import explain_changed_images
from camscope.explainers.vision_language.processor_inputs import VisionLanguageInputs, build_inputs
from camscope.explainers.vision_language.text_options import TextOptions
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, Explanation
from camscope.hooks.find_layers import unwrap
from camscope.layers.image_token_grids import compose_token_map, select_views
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.targets.token_and_answer import Answer, BaseTextTarget, group_tokens_by_word

if TYPE_CHECKING:
    from camscope.explainers.core.base_method import BaseMethod


def explain_texts(
    explainer: "BaseMethod", images: Sequence[Any], targets: Sequence[Sequence[BaseTextTarget]], options: TextOptions
) -> list[list[Explanation]]:
    """Explain targets [image][target] from one forward pass. All targets of one image share one answer."""
    if not images:
        raise InputError("the batch is empty")
    tokenizer = options.processor.tokenizer
    answers = [[target.encode(tokenizer) for target in row] for row in targets]
    for row in answers:
        if any(answer.ids != row[0].ids for answer in row):
            raise TargetError("the targets of one pass belong to different answers: explain them one after the other")
    info = inspect_model(explainer.model)
    check_no_inference_mode_weights(info)
    model: Any = unwrap(explainer.model)
    if explainer.needs_only_scores:
        with _run_unchanged(explainer, model, info):
            return explain_changed_images(explainer, images, targets, answers, options)
    inputs = build_inputs(
        model, options.processor, images, options.prompts, [row[0] for row in answers], options.processor_kwargs
    )
    with _run_unchanged(explainer, model, info):
        maps = explainer.compute_text_maps(inputs, targets, answers)
    digest, results = compute_model_digest(model), list[list[Explanation]]()
    for i, row in enumerate(maps):
        results.append(
            [
                _build_explanation(explainer, inputs, i, targets[i][q], token_map, options, digest)
                for q, token_map in enumerate(row)
            ]
        )
    return results


@contextmanager
def _run_unchanged(explainer: "BaseMethod", model: Any, info: ModelInfo) -> Iterator[None]:
    """Run the model in eval mode or as it is, with the explainer's precision. Restore its state and random numbers at the end."""
    with (
        cached_attributes_restored(model),
        inference_scope(info, explainer.mode),
        autocast_scope(explainer.precision, info) as autocast,
        autocast(),
    ):
        yield


def explain_words(explainer: "BaseMethod", image: Any, answer: str | Answer, options: TextOptions) -> list[Explanation]:
    """Return one explanation for each word of an answer, from one forward pass. The label of each is the word."""
    answer = Answer(answer) if isinstance(answer, str) else answer
    tokenizer = options.processor.tokenizer
    words = group_tokens_by_word(tokenizer, answer.encode(tokenizer).ids)
    targets = [Answer(answer.text, answer.score, word=number) for number in range(len(words))]
    return explain_texts(explainer, [image], [targets], options)[0]


def _build_explanation(
    explainer: "BaseMethod",
    inputs: VisionLanguageInputs,
    sample: int,
    target: BaseTextTarget,
    token_map: Any,
    options: TextOptions,
    digest: str,
) -> Explanation:
    photo, grids = inputs.photos[sample], select_views(token_map.grids, options.views)
    size = (photo.pixels.shape[0], photo.pixels.shape[1])
    check_finite(f"the map of {explainer.composed_name}", token_map.maps.attribution, explainer.on_nonfinite)
    (status,) = determine_statuses(token_map.maps)
    if status != STATUS_OK:
        warn_caller(f"{METHODS.replace_names_by_titles(explainer.composed_name)}: {STATUS_MEANINGS[status]}")
    placed = compose_token_map(token_map.maps.attribution[0].cpu().numpy(), grids, size)
    shapes = " + ".join(f"{grid.tokens.shape[0]}x{grid.tokens.shape[1]}" for grid in grids)
    notes = [*token_map.maps.get_sample_notes(0), *photo.flags]
    if len(token_map.grids) > 1:
        notes.append(f"{plural(len(token_map.grids), 'view')} of the image ({options.views}): the map has their sum")
    if not explainer.class_specific:
        notes.append("the map does not depend on the score")
    return Explanation(
        attribution=placed.attribution,
        method=explainer.composed_name,
        **describe_answer(target, token_map.answer, options.processor.tokenizer),
        layer=token_map.maps.layer,
        layout=f"image tokens {shapes}",
        input_size=placed.placement.input_size,
        placement=placed.placement,
        status=status,
        notes=tuple(notes),
        name=photo.name,
        parameters={**explainer.parameters, "prompt": str(options.prompts[sample]), "views": options.views},
        versions=get_library_versions(),
        model=digest,
        image=photo.pixels,
    )
