"""Explain tokens and answers of a vision-language model: from images, prompts and targets to explanations."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from camscope.errors import InputError, TargetError, warn_caller
from camscope.explainers.core.evaluation_context import (
    autocast_scope,
    check_finite,
    check_no_inference_mode_weights,
    inference_scope,
    inspect_model,
)
from camscope.explainers.core.maps_with_flags import determine_statuses
from camscope.explainers.core.run_methods_in_shared_passes import MAX_TOP_CLASSES, get_library_versions
from camscope.explainers.vision_language.processor_inputs import Prompt, VisionLanguageInputs, build_inputs
from camscope.explainers.vision_language.text_scores import ScoredAnswer, cached_attributes_restored
from camscope.explanation import STATUS_MEANINGS, STATUS_OK, ClassScore, Explanation
from camscope.hooks.find_layers import unwrap
from camscope.layers.image_token_grids import Views, compose_token_map, select_views
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.targets.token_and_answer import Answer, BaseTextTarget, group_tokens_by_word

if TYPE_CHECKING:
    from camscope.explainers.core.base_method import BaseMethod

TEXT_KEYWORDS = ("prompt", "processor", "processor_kwargs", "views")


class TextOptions(NamedTuple):
    """The arguments of a call that belong to the text: prompts, the processor, and the views that the map shows."""

    prompts: list[Prompt]
    processor: Any
    processor_kwargs: Mapping[str, Any]
    views: Views


def parse_text_options(keywords: Mapping[str, Any], n_images: int) -> TextOptions:
    """Read the keywords `prompt`, `processor`, `processor_kwargs` and `views` of a call for n images."""
    if unknown := sorted(set(keywords) - set(TEXT_KEYWORDS)):
        raise InputError(f"{unknown[0]}: a text target takes the keywords {', '.join(TEXT_KEYWORDS)}")
    processor, prompt = keywords.get("processor"), keywords.get("prompt")
    if processor is None or not hasattr(processor, "tokenizer"):
        raise InputError(
            f"processor={type(processor).__name__}: a text target needs the processor of the model",
            fix="pass processor=AutoProcessor.from_pretrained(...) of transformers",
        )
    if prompt is None:
        raise InputError("a text target needs the prompt", fix='pass prompt="What is this?"')
    is_single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    prompts = [prompt] * n_images if is_single else list(prompt)
    if len(prompts) != n_images:
        raise InputError(
            f"{plural(len(prompts), 'prompt')} for {plural(n_images, 'image')}: give one, or one per image"
        )
    views = keywords.get("views", "all")
    if views not in ("all", "tiles", "overview"):
        raise InputError(f"views={views!r}: expected 'all', 'tiles' or 'overview'")
    return TextOptions(prompts, processor, dict(keywords.get("processor_kwargs") or {}), views)


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
    inputs = build_inputs(
        model, options.processor, images, options.prompts, [row[0] for row in answers], options.processor_kwargs
    )
    with (
        cached_attributes_restored(model),
        inference_scope(info, explainer.mode),
        autocast_scope(explainer.precision, info) as autocast,
        autocast(),
    ):
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
    value, answer = float(token_map.answer.value.detach()), token_map.answer
    is_probability = target.score == "log_probability"
    shapes = " + ".join(f"{grid.tokens.shape[0]}x{grid.tokens.shape[1]}" for grid in grids)
    notes = [*token_map.maps.get_sample_notes(0), *photo.flags]
    if len(token_map.grids) > 1:
        notes.append(f"{plural(len(token_map.grids), 'view')} of the image ({options.views}): the map has their sum")
    if not explainer.class_specific:
        notes.append("the map does not depend on the score")
    tokenizer = options.processor.tokenizer
    label = target.describe(0, str)
    if isinstance(target, Answer) and target.word is not None:
        label = group_tokens_by_word(tokenizer, target.encode(tokenizer).ids)[target.word].text
    return Explanation(
        attribution=placed.attribution,
        method=explainer.composed_name,
        target=answer.token,
        label=label,
        score=value,
        probability=float(torch.tensor(value, dtype=torch.float64, device="cpu").exp()) if is_probability else None,
        top_classes=_collect_top_tokens(answer, tokenizer),
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


def _collect_top_tokens(answer: ScoredAnswer, tokenizer: Any) -> tuple[ClassScore, ...]:
    """Return the likeliest tokens at the position of the first scored token."""
    logits = answer.logits.double()
    best = logits.topk(min(MAX_TOP_CLASSES, len(logits)))
    shares = logits.softmax(0)[best.indices].tolist()
    return tuple(
        ClassScore(token, tokenizer.decode([token]), value, share)
        for token, value, share in zip(best.indices.tolist(), best.values.tolist(), shares, strict=True)
    )
