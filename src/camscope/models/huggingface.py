"""Load models from Hugging Face repositories and folders, without executing their code."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from camscope.errors import CamscopeError, ModelError, PreprocessError, WeightsError
from camscope.images.preprocess import Preprocess, as_preprocess
from camscope.model_metadata import ModelCard
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    StateDict,
    WeightsSource,
    fixed_seed_scope,
    format_model_source,
    format_names,
    load_state_dict_strictly,
    read_state_dict,
    strip_wrapper_prefix,
)
from camscope.models.huggingface_file_checks import check_settings_file, check_tokenizer_files, check_weight_files
from camscope.models.torchvision_timm import make_weights_unavailable_error
from camscope.optional import require
from camscope.safe_files import check_regular_files
from camscope.untrusted_files import MAX_ERROR_CHARACTERS, read_errors_converted

# what takes an image alone and is no plain classifier: a folder of such a class is loaded as what it is
IMAGE_MODEL_CLASS_SUFFIXES = (
    "ForImageClassificationWithTeacher",
    "ForSemanticSegmentation",
    "ForObjectDetection",
    "VisionModel",
    "VisionModelWithProjection",
)
VISION_TOWER_BY_CLASS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


def load_huggingface_model(name: str, weights: WeightsSource) -> tuple[nn.Module, ModelCard]:
    """Load a Hugging Face model from a repository ("org/name") or a folder.

    `weights` is a checkpoint file, "random" or None for the published weights. The model is a classifier unless
    the configuration names a segmentation model, a detector or a vision encoder. For CLIP and SigLIP it is the vision
    encoder.
    """
    transformers, folder = require("transformers", extra="hub"), Path(name).expanduser()
    try:
        check_regular_files(folder)  # transformers waits for a pipe or a device
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise ModelError(f"hf:{name!r}: {getattr(error, 'strerror', None) or error}") from error
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"hf:{name}: it is not a folder; expected org/name, or a folder with config.json")
    source = str(folder) if folder.is_dir() else name
    files = f"config.json, preprocessor_config.json and model.safetensors of {name!r}"
    check_settings_file(source, "config.json")
    if weights is None:
        check_weight_files(source)
    with _convert_transformers_errors(f"hf:{name}", files, "vision model"), fixed_seed_scope():
        model, has_published_classes = _load_transformers_model(transformers, source, weights)
        class_names = _get_class_names(model) if has_published_classes else None
    preprocess = load_preprocessing(transformers, source)
    return model.float(), ModelCard(format_model_source(f"hf:{name}", weights), preprocess, class_names)


@contextmanager
def _convert_transformers_errors(spec: str, required_files: str, model_kind: str) -> Iterator[None]:
    """Convert errors of transformers in the `with` block to a ModelError or WeightsError.

    The message names the files that the model needs and the expected kind of model.
    """
    try:
        yield
    except (CamscopeError, MemoryError):
        raise
    except (OSError, SafetensorError) as error:
        advice = f"fetch {required_files} and name the folder that holds them: {spec.partition(':')[0]}:FOLDER"
        raise make_weights_unavailable_error(spec, error, advice) from error
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARACTERS]
        raise ModelError(
            f"{spec} is not a {model_kind} that transformers can build from its config.json: {reason}"
        ) from error


def _load_transformers_model(transformers: Any, source: str, weights: WeightsSource) -> tuple[nn.Module, bool]:
    """Load the model. Return it and whether its classes are those of its configuration."""
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    kind = _select_model_class(transformers, config)
    if not isinstance(config, kind.config_class):  # the config of the full model, of which the tower is a part
        config = kind.config_class.from_pretrained(source)
    if weights is None:
        model, report = kind.from_pretrained(source, config=config, use_safetensors=True, output_loading_info=True)
        # extra tensors (a pooler, another head) are harmless, a head without weights is not
        _check_all_weights_loaded({**report, "unexpected_keys": ()}, f"hf:{source}")
        return model, True
    state = None if weights == RANDOM_WEIGHTS else read_state_dict(weights)
    model = kind(config)
    if state is None:
        return model, False
    return _load_checkpoint(model, strip_wrapper_prefix(state, model.state_dict()), weights)


def _select_model_class(transformers: Any, config: Any) -> Any:
    """Return the transformers class to load: the configured one if it takes only images, otherwise a classifier."""
    class_name = next(iter(config.architectures or ()), "")
    class_name = VISION_TOWER_BY_CLASS.get(class_name, class_name)
    if class_name.endswith(IMAGE_MODEL_CLASS_SUFFIXES) and hasattr(transformers, class_name):
        return getattr(transformers, class_name)
    classifiers = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(config) not in classifiers:
        raise ValueError(f"no image model for a {type(config).__name__} with the class {class_name or 'None'}")
    classifier = classifiers[type(config)]
    return classifier[0] if isinstance(classifier, tuple) else classifier


def _load_checkpoint(model: Any, state: StateDict, weights: WeightsSource) -> tuple[nn.Module, bool]:
    """Load a state dict strictly. Return the model and whether it has the classes of its configuration.

    Tensor names of all versions of transformers are accepted.
    """
    config, has_published_classes = model.config, True
    while True:
        fresh, report = type(model).from_pretrained(
            None, config=config, state_dict=dict(state), output_loading_info=True, ignore_mismatched_sizes=True
        )
        mismatched = [(tuple(stored), tuple(expected)) for _, stored, expected in report["mismatched_keys"]]
        classes = {stored[0] for stored, _ in mismatched if stored}
        if (
            not has_published_classes
            or report["missing_keys"]  # a layer of which the file holds only the bias could be far larger than the file
            or len(classes) != 1
            or any(stored[1:] != expected[1:] for stored, expected in mismatched)
        ):
            _check_all_weights_loaded(report, str(weights))
            return fresh, has_published_classes
        config.num_labels, has_published_classes = classes.pop(), False


def _check_all_weights_loaded(loading_report: Mapping[str, Any], source: str) -> None:
    reported = {what: loading_report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")}
    names = {what: sorted(str(k if isinstance(k, str) else k[0]) for k in keys) for what, keys in reported.items()}
    differences = [f"{len(keys)} {what} ({format_names(keys)})" for what, keys in names.items() if keys]
    if differences:
        raise WeightsError(f"{source} does not fit the model: {'; '.join(differences)}; is it only a backbone?")


def load_preprocessing(transformers: Any, source: str) -> Callable[..., Any] | None:
    """Load the preprocessing of a repository or folder. Return None if there is no preprocessing file."""
    file_name = "preprocessor_config.json"
    for name in (file_name, "processor_config.json"):  # new versions of transformers read the second, if it exists
        check_settings_file(source, name)
    with read_errors_converted(f"{source}: no preprocessing can be built from {file_name}", ModelError):
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError):  # no such file, or an unknown processor: an image then needs preprocess=
            return None
        try:
            return Preprocess.from_huggingface(processor)
        except PreprocessError:  # Preprocess cannot express it: use the processor itself
            transform = partial(_compute_pixel_values, processor)
            transform.__name__ = f"of {source}/{file_name}"  # type: ignore[attr-defined]  # errors quote it
            return as_preprocess(transform)


def _compute_pixel_values(processor: Any, image: object) -> object:
    return processor(image, return_tensors="pt")["pixel_values"]


def _get_class_names(model: Any) -> tuple[str, ...] | None:
    names, count = model.config.id2label, model.config.num_labels
    unnamed = [f"LABEL_{i}" for i in range(count)]
    categories = [str(names.get(i, unnamed[i])) for i in range(count)]
    return tuple(categories) if categories != unnamed else None


class ImageTower(nn.Module):
    """The image encoder of a CLIP model, from images (N,C,H,W) to embeddings (N,D)."""

    def __init__(self, full_model: Any) -> None:
        super().__init__()
        self.full_model: Any = full_model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Compute the embeddings (N,D) of images."""
        return _extract_embedding(self.full_model.get_image_features(pixel_values=pixel_values))


def load_clip_model(name: str, weights: WeightsSource) -> tuple[nn.Module, ModelCard]:
    """Load the image encoder of a CLIP or SigLIP model from a repository ("org/name") or a folder.

    `TextSimilarity` uses the text encoder of the same model.
    """
    transformers, folder = require("transformers", extra="hub"), Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    check_settings_file(source, "config.json")
    check_tokenizer_files(source)
    if weights is None:
        check_weight_files(source)
    with _convert_transformers_errors(f"clip:{name}", f"the files of {name!r}", "model of images and texts"):
        with fixed_seed_scope():
            full_model = _load_image_and_text_model(transformers, source, weights)
        tokens = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tower = ImageTower(full_model.float())
    preprocess = load_preprocessing(transformers, source)
    return tower, ModelCard(
        format_model_source(f"clip:{name}", weights), preprocess, embed_text=_create_text_encoder(full_model, tokens)
    )


def _load_image_and_text_model(transformers: Any, source: str, weights: WeightsSource) -> Any:
    if weights is None:
        model = transformers.AutoModel.from_pretrained(source, trust_remote_code=False, use_safetensors=True)
    else:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        if weights != RANDOM_WEIGHTS:
            load_state_dict_strictly(model, read_state_dict(weights), weights)
    if not all(hasattr(model, f"get_{what}_features") for what in ("image", "text")):
        raise ModelError(
            f"{type(model).__name__} has no image and text encoders; load a classifier with load_model('hf:{source}')"
        )
    return model


def _create_text_encoder(full_model: Any, tokenizer: Any) -> Callable[[str], Tensor]:
    # SigLIP was trained on texts padded to one length
    has_fixed_length = "siglip" in str(getattr(full_model.config, "model_type", ""))

    def encode(text: str) -> Tensor:
        """Compute the embedding (D,) of a text."""
        padding = "max_length" if has_fixed_length else True
        inputs = tokenizer([text], return_tensors="pt", padding=padding, truncation=True)
        device = next(full_model.parameters()).device
        with torch.no_grad():
            output = full_model.get_text_features(**{key: value.to(device) for key, value in inputs.items()})
        return _extract_embedding(output)[0]

    return encode


def _extract_embedding(output: Any) -> Tensor:
    """Return the embedding from the output of a transformers model, which is a tensor or a structure."""
    embedding: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return embedding
