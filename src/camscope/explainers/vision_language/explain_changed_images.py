"""Explain text with methods that need only scores: they change the image, and the processor and the model read it again."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.vision_language.answer_scores_and_gradients import (
    describe_answer,
    run_model,
    score_answer,
)
from camscope.explainers.vision_language.processor_inputs import build_inputs_of_changed_images
from camscope.explainers.vision_language.text_options import TextOptions
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.hooks.find_layers import unwrap
from camscope.hooks.wrap_black_box_function_as_module import ScoreFunction
from camscope.images.photo_reader import Photo, read_photo
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.targets.token_and_answer import BaseTextTarget, ScoredTokens

if TYPE_CHECKING:
    from camscope.explainers.core.base_method import BaseMethod

MAX_PIXEL = 255


def explain_changed_images(
    explainer: "BaseMethod",
    images: Sequence[Any],
    targets: Sequence[Sequence[BaseTextTarget]],
    answers: Sequence[Sequence[ScoredTokens]],
    options: TextOptions,
) -> list[list[Explanation]]:
    """Explain targets [image][target]. The map lies on the pixels of the image, however the processor cuts it into tiles.

    The caller puts the model in eval mode, and restores its state.
    """
    if "model" not in explainer.setting_names:
        raise TargetError(f"{explainer.composed_name} cannot explain the text of a vision-language model")
    digest = compute_model_digest(unwrap(explainer.model))
    return [
        [
            _explain_target(explainer, read_photo(image), i, target, answer, options, digest)
            for target, answer in zip(targets[i], answers[i], strict=True)
        ]
        for i, image in enumerate(images)
    ]


def _explain_target(
    explainer: "BaseMethod",
    photo: Photo,
    sample: int,
    target: BaseTextTarget,
    answer: ScoredTokens,
    options: TextOptions,
    digest: str,
) -> Explanation:
    model: Any = unwrap(explainer.model)
    mean, std = read_normalization(options.processor)
    read_answers = partial(_read_answers, model, target, answer, options, options.prompts[sample])

    def score_images(x: Tensor) -> Tensor:
        """Return the scores (N,1) of normalized images (N,3,H,W)."""
        pixels = ((x.cpu() * std + mean) * MAX_PIXEL).round().clamp(0, MAX_PIXEL).byte()
        return torch.stack([scored.value for scored in read_answers(pixels)])[:, None]

    x = (torch.from_numpy(photo.pixels).permute(2, 0, 1).float() / MAX_PIXEL - mean) / std
    changed: Any = explainer.with_settings(model=ScoreFunction(score_images, identity=digest))
    explanation: Explanation = changed.explain(x, select_first_column)
    (scored,) = read_answers(torch.from_numpy(photo.pixels).permute(2, 0, 1)[None])
    size = (photo.pixels.shape[0], photo.pixels.shape[1])
    return replace(
        explanation,
        **describe_answer(target, scored, options.processor.tokenizer),
        placement=Placement.identity(size),
        notes=(*explanation.notes, *photo.flags),
        name=photo.name,
        parameters={**explanation.parameters, "prompt": str(options.prompts[sample])},
        model=digest,
        image=photo.pixels,
    )


def select_first_column(scores: Tensor) -> Tensor:
    """Return the only score of each image."""
    return scores[:, 0]


def _read_answers(
    model: Any, target: BaseTextTarget, answer: ScoredTokens, options: TextOptions, prompt: Any, pixels: Tensor
) -> list[Any]:
    """Return the scored answers of images (N,3,H,W) of bytes, from one forward pass."""
    images = [image.permute(1, 2, 0).contiguous().numpy() for image in pixels]
    inputs = build_inputs_of_changed_images(model, options.processor, images, prompt, answer, options.processor_kwargs)
    with torch.no_grad():
        logits = run_model(model, inputs, max(answer.scored) + 1)
    return [score_answer(logits[i], target, answer) for i in range(len(images))]


def read_normalization(processor: Any) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (3,1,1) of the processor's images, so that zero is the mean color. Default: gray."""
    images = getattr(processor, "image_processor", None)
    values = [getattr(images, name, None) for name in ("image_mean", "image_std")]
    if not all(isinstance(value, list | tuple) and len(value) == 3 for value in values):
        values = [[0.5] * 3, [0.5] * 3]
    mean, std = (torch.tensor(value, dtype=torch.float32, device="cpu").view(3, 1, 1) for value in values)
    return mean, std
