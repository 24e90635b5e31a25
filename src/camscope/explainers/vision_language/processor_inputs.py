"""The inputs of a vision-language model for images, prompts and answers, and where its image tokens lie."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from camscope.errors import GeometryError, InputError, ModelError
from camscope.explainers.core.evaluation_context import get_device_and_dtype
from camscope.hooks.vision_language_tokens import read_image_token_id
from camscope.images.photo_reader import Photo, read_photo
from camscope.layers.image_token_grids import (
    FAMILIES,
    FAMILIES_OF_LEARNED_QUERIES,
    FAMILIES_OF_MERGED_PATCHES,
    FAMILIES_OF_PACKED_TILES,
    FAMILIES_OF_SQUARE_TILES,
    FAMILIES_WITH_MEAN_TOKEN,
    TokenGrid,
    build_packed_tile_grids,
    build_square_tile_grids,
    build_whole_image_grid,
)
from camscope.layers.tile_boxes_of_processor import PixelArray, Tile, measure_tiles
from camscope.plurals import plural
from camscope.targets.token_and_answer import ScoredTokens

Prompt = str | Sequence[Mapping[str, Any]]
NOT_FOR_THE_MODEL = ("labels", "rows", "cols", "num_patches", "num_image_patches", "num_soft_tokens_per_image")
FAMILIES_WHOSE_PROCESSOR_ADDS_THE_IMAGE = ("blip_2", "florence2", "paligemma")
TOKEN_TYPE_KEYS = ("token_type_ids", "mm_token_type_ids")  # 0: text, except after the prompt of PaliGemma
TYPE_OF_ANSWER_TOKENS = {"paligemma": 1}  # by family; otherwise 0


@dataclass(frozen=True)
class PromptInputs:
    """The inputs of the model for N images with prompts and answers.

    `first_answer_position` is the position whose output predicts the first token of the answer.
    """

    model_inputs: dict[str, Any]
    first_answer_position: int
    is_encoder_decoder: bool


@dataclass(frozen=True)
class VisionLanguageInputs(PromptInputs):
    """The inputs of the model, and where its image tokens lie. `grids` and `tiles` are one list for each image."""

    photos: list[Photo]
    grids: list[list[TokenGrid]]
    tiles: list[list[Tile]]
    image_token_mask: Tensor
    notes: tuple[str, ...] = field(default=())


class ImageTokens(NamedTuple):
    """The grids of an image's tokens in the prompt, and the tiles that the vision tower receives."""

    grids: list[TokenGrid]
    tiles: list[Tile]


def get_family(model: nn.Module) -> str:
    """Return the family of a vision-language model, such as "llava". Raise ModelError for a family without a known layout."""
    config = getattr(model, "config", None)
    family = str(getattr(config, "model_type", "")).replace("-", "_")
    if family not in FAMILIES:
        kind = f"{type(model).__name__} ({family})" if family else type(model).__name__
        raise ModelError(
            f"where the image tokens of {kind} lie on the image is not known; supported are {', '.join(FAMILIES)}"
        )
    if read_image_token_id(config) is None:
        raise ModelError(f"the config of {type(model).__name__} has no image_token_id")
    return family


def build_inputs(
    model: nn.Module,
    processor: Any,
    images: Sequence[Any],
    prompts: Sequence[Prompt],
    answers: Sequence[ScoredTokens],
    processor_kwargs: Mapping[str, Any],
) -> VisionLanguageInputs:
    """Run the processor on images and prompts, append the answers, and find where the image tokens lie."""
    family, photos = get_family(model), [read_photo(image) for image in images]
    texts = [_render_prompt(processor, prompt, family) for prompt in prompts]
    pixels = [photo.pixels for photo in photos]
    batch, inputs = _process_and_append_answers(model, processor, pixels, texts, answers, processor_kwargs)
    token, ids = read_image_token_id(model.config), batch["input_ids"]
    counts = (ids == token).sum(1).tolist()
    if 0 in counts:
        raise InputError(
            "the prompt has no image token after the processor has run", fix="use the model's own processor"
        )
    images_tokens = [
        locate_image_tokens(model, family, processor, photo.pixels, text, count, processor_kwargs)
        for photo, text, count in zip(photos, texts, counts, strict=True)
    ]
    _check_equal_tiles(batch, [tokens.tiles for tokens in images_tokens], family)
    image_token_mask = (ids if inputs.is_encoder_decoder else inputs.model_inputs["input_ids"].cpu()) == token
    if not inputs.is_encoder_decoder:
        image_token_mask[:, ids.shape[1] :] = False
    return VisionLanguageInputs(
        inputs.model_inputs,
        inputs.first_answer_position,
        inputs.is_encoder_decoder,
        photos,
        [tokens.grids for tokens in images_tokens],
        [tokens.tiles for tokens in images_tokens],
        image_token_mask.to(get_device_and_dtype(model)[0]),
    )


def build_inputs_of_changed_images(
    model: nn.Module,
    processor: Any,
    images: Sequence[PixelArray],
    prompt: Prompt,
    answer: ScoredTokens,
    processor_kwargs: Mapping[str, Any],
) -> PromptInputs:
    """Run the processor on images (H,W,3) of equal size with one prompt and one answer. Image tokens are not located."""
    texts = [_render_prompt(processor, prompt, get_family(model))] * len(images)
    return _process_and_append_answers(model, processor, images, texts, [answer] * len(images), processor_kwargs)[1]


def _process_and_append_answers(
    model: Any,
    processor: Any,
    images: Sequence[PixelArray],
    texts: Sequence[str],
    answers: Sequence[ScoredTokens],
    processor_kwargs: Mapping[str, Any],
) -> tuple[dict[str, Any], PromptInputs]:
    """Return what the processor returns for images and texts, and the inputs of the model with the answers."""
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    side = "right" if is_encoder_decoder else "left"  # an encoder counts positions from its first token
    padding = {"padding": True, "padding_side": side} if len(images) > 1 else {}
    batch = _run_processor(processor, images, texts, {**padding, **processor_kwargs})
    mask = batch.get("attention_mask")
    if mask is not None and not is_encoder_decoder and not bool((mask[:, -1] != 0).all()):
        raise InputError("the prompts are padded on the right", fix="pass processor_kwargs={'padding_side': 'left'}")
    inputs = _append_answers(model, get_family(model), batch, [answer.ids for answer in answers], is_encoder_decoder)
    first = 0 if is_encoder_decoder else batch["input_ids"].shape[1] - 1
    return batch, PromptInputs(_move_to_model(model, inputs), first, is_encoder_decoder)


def locate_image_tokens(
    model: Any,
    family: str,
    processor: Any,
    pixels: PixelArray,
    text: str,
    n_tokens: int,
    processor_kwargs: Mapping[str, Any],
) -> ImageTokens:
    """Find where the image tokens of one image lie. The processor shows it with an image of coordinates."""
    size = (pixels.shape[0], pixels.shape[1])
    name = type(model).__name__
    try:
        if family in FAMILIES_OF_MERGED_PATCHES or family == "gemma4":
            single = _run_processor(processor, [pixels], [text], processor_kwargs)
            return ImageTokens(build_whole_image_grid(n_tokens, _read_patch_grid(model, single, n_tokens), size), [])

        def read_tiles(values: PixelArray) -> Any:
            tiles = _run_processor(processor, [values], [text], processor_kwargs)["pixel_values"]
            return tiles.flatten(0, -4).double().numpy()

        tiles = measure_tiles(read_tiles, size)
        if family in FAMILIES_OF_LEARNED_QUERIES:
            return ImageTokens([], tiles)
        if family in FAMILIES_OF_SQUARE_TILES:
            has_class_token = getattr(model.config, "vision_feature_select_strategy", "default") == "full"
            return ImageTokens(build_square_tile_grids(n_tokens, tiles, int(has_class_token)), tiles)
        if family in FAMILIES_WITH_MEAN_TOKEN:
            return ImageTokens(build_square_tile_grids(n_tokens, tiles, 1), tiles)
        if family in FAMILIES_OF_PACKED_TILES:
            vision = model.config.vision_config
            side = vision.image_size // vision.patch_size

            def pack(centers: Any) -> Any:
                return _pack_coordinates(model, torch.from_numpy(centers), size)

            return ImageTokens(build_packed_tile_grids(n_tokens, tiles, side, pack), tiles)
    except GeometryError as error:
        raise GeometryError(f"the image tokens of {name} cannot be placed on the image: {error}") from error
    raise ModelError(f"the image tokens of {name} cannot be placed on the image")


def _run_processor(
    processor: Any, images: Sequence[PixelArray], texts: Sequence[str], processor_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Call the processor. Return its tensors by name."""
    from PIL import Image

    pictures = [[Image.fromarray(image)] for image in images]
    batch = dict(processor(images=pictures, text=list(texts), return_tensors="pt", **processor_kwargs))
    if "input_ids" not in batch or "pixel_values" not in batch:
        raise InputError(f"{type(processor).__name__} returned {sorted(batch)}; expected input_ids and pixel_values")
    return {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}


def _render_prompt(processor: Any, prompt: Prompt, family: str) -> str:
    """Return the text that the processor takes. A chat, or a question without image token, goes through the chat template."""
    names = [getattr(processor, name, None) for name in ("image_token", "boi_token")]
    markers = [str(getattr(name, "content", name)) for name in names if name is not None]
    if isinstance(prompt, str):
        adds_image = family in FAMILIES_WHOSE_PROCESSOR_ADDS_THE_IMAGE or not markers
        if any(marker in prompt for marker in markers):
            return prompt
        if not getattr(processor, "chat_template", None):
            if not adds_image:
                raise InputError(f"the prompt has no place for the image: {prompt!r}", fix=f"add {markers[-1]} to it")
            return prompt
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    return str(processor.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False))


def _append_answers(
    model: Any, family: str, batch: Mapping[str, Any], answers: Sequence[Sequence[int]], is_encoder_decoder: bool
) -> dict[str, Any]:
    """Append the tokens of each answer to the prompts. Shorter answers are padded, and the padding is masked."""
    inputs, ids = dict(batch), batch["input_ids"]
    longest = max(map(len, answers))
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    tokens = torch.tensor(
        [[*answer, *[pad] * (longest - len(answer))] for answer in answers], dtype=torch.long, device="cpu"
    ).reshape(len(answers), longest)
    if is_encoder_decoder:
        start = getattr(model.config, "decoder_start_token_id", None)
        start = model.generation_config.decoder_start_token_id if start is None else start
        start = model.config.get_text_config().decoder_start_token_id if start is None else start
        inputs["decoder_input_ids"] = torch.cat([torch.full((len(answers), 1), start, device="cpu"), tokens], 1)
        return inputs
    if longest == 0:
        return inputs
    attention = batch.get("attention_mask")
    attention = torch.ones_like(ids) if attention is None else attention
    lengths = torch.tensor([[len(answer)] for answer in answers], device="cpu")
    present = (torch.arange(longest, device="cpu")[None] < lengths).to(attention.dtype)
    inputs["input_ids"] = torch.cat([ids, tokens], 1)
    inputs["attention_mask"] = torch.cat([attention, present], 1)
    for key in TOKEN_TYPE_KEYS:
        if key in inputs:
            kinds = torch.full_like(tokens, TYPE_OF_ANSWER_TOKENS.get(family, 0), dtype=inputs[key].dtype)
            inputs[key] = torch.cat([inputs[key], kinds], 1)
    return inputs


def _move_to_model(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    device, dtype = get_device_and_dtype(model)
    moved: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
        moved[name] = value
    return moved


def _check_equal_tiles(batch: Mapping[str, Any], tiles: Sequence[Sequence[Tile]], family: str) -> None:
    """Raise InputError if the processor pads the tiles of a batch to a common size: cells would then lie elsewhere."""
    pixel_values = batch["pixel_values"]
    sizes = {tile.size for image in tiles for tile in image}
    if tiles[0] and sizes != {tuple(pixel_values.shape[-2:])}:
        raise InputError(f"the images of a batch have tiles of different sizes for {family}: explain them one by one")


def _read_patch_grid(model: Any, batch: Mapping[str, Any], n_tokens: int) -> tuple[int, int]:
    """Return the grid (h,w) of the image tokens of a model that takes the image at its own proportions."""
    if "image_grid_thw" in batch:
        if len(batch["image_grid_thw"]) != 1:
            raise GeometryError(f"the prompt has {plural(len(batch['image_grid_thw']), 'image')}; expected one")
        merge = int(model.config.vision_config.spatial_merge_size)
        _, rows, columns = batch["image_grid_thw"][0].tolist()
        return int(rows) // merge, int(columns) // merge
    columns, rows = (int(count) + 1 for count in batch["image_position_ids"].flatten(0, -2).amax(0))
    pool = math.isqrt(max(1, rows * columns // n_tokens))
    return rows // pool, columns // pool


def _pack_coordinates(model: Any, centers: Tensor, image_size: tuple[int, int]) -> Any:
    """Let the model pack the coordinates (M,cells,2) of its cells as it packs their features. A separator gets NaN."""
    options = {}
    if (ratio := getattr(model.config, "vision_aspect_ratio", None)) is not None:
        options["vision_aspect_ratio"] = ratio
    if (strategy := getattr(model.config, "vision_feature_select_strategy", None)) and not options:
        options["vision_feature_select_strategy"] = strategy
    newline = torch.full((2,), math.nan, dtype=centers.dtype, device="cpu")
    sizes = torch.tensor([image_size], device="cpu")
    packed, _ = model.model.pack_image_features([centers], sizes, image_newline=newline, **options)
    return packed[0].numpy()
