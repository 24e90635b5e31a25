"""The keywords of a call that explains text: prompts, the processor, and the views that the map shows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from camscope.errors import InputError
from camscope.explainers.vision_language.processor_inputs import Prompt
from camscope.layers.image_token_grids import Views
from camscope.plurals import plural

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
