"""Load classifiers and other image models from Hugging Face repositories or folders. No code of theirs is executed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from camscope.atomic_writes_and_folder_locks import check_regular_files
from camscope.errors import CamscopeError, ModelError, PreprocessError, WeightsError
from camscope.images.preprocess import Preprocess, as_preprocess
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    BuiltModel,
    StateDict,
    WeightsSource,
    fixed_seed_scope,
    format_first_names,
    format_model_source,
    read_state_dict,
    strip_wrapper_prefix,
)
from camscope.models.huggingface_file_damage import check_settings_file, check_weight_files
from camscope.models.torchvision_timm import make_weights_unavailable_error
from camscope.optional_packages import require
from camscope.read_untrusted_files import MAX_ERROR_CHARACTERS, read_errors_converted

# what takes an image alone and is no plain classifier: a folder of such a class is loaded as what it is
IMAGE_MODEL_CLASS_SUFFIXES = (
    "ForImageClassificationWithTeacher",
    "ForSemanticSegmentation",
    "ForVideoClassification",
    "ForObjectDetection",
    "VisionModel",
    "VisionModelWithProjection",
)
VISION_ENCODER_BY_CLASS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


def load_huggingface_model_and_metadata(name: str, weights: WeightsSource) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load a Hugging Face model. The source is a repository ("org/name") or a folder.

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
        raise ModelError(f"hf:{name} is not a folder: expected org/name, or a folder with config.json")
    source = str(folder) if folder.is_dir() else name
    files = f"config.json, preprocessor_config.json and model.safetensors of {name!r}"
    check_settings_file(source, "config.json")
    if weights is None:
        check_weight_files(source)
    with transformers_errors_converted(f"hf:{name}", files, "vision model"), fixed_seed_scope():
        model, has_published_classes = _load_transformers_model(transformers, source, weights)
        class_names = _get_class_names(model) if has_published_classes else None
    preprocess = load_preprocessing(transformers, source)
    return model.float(), LoadedModelMetadata(format_model_source(f"hf:{name}", weights), preprocess, class_names)


@contextmanager
def transformers_errors_converted(spec: str, required_files: str, model_kind: str) -> Iterator[None]:
    """Convert errors that transformers raises inside the `with` to a ModelError or WeightsError.

    The message names the files that the model needs, or the expected kind of model.
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


def _load_transformers_model(transformers: Any, source: str, weights: WeightsSource) -> BuiltModel:
    """Load a transformers model from a repository or folder."""
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    kind = _select_model_class(transformers, config)
    if not isinstance(config, kind.config_class):  # the config of the full model, of which the vision encoder is a part
        config = kind.config_class.from_pretrained(source)
    if weights is None:
        model, report = kind.from_pretrained(source, config=config, use_safetensors=True, output_loading_info=True)
        # extra tensors (a pooler, another head) are harmless, a head without weights is not
        _check_all_weights_loaded({**report, "unexpected_keys": ()}, f"hf:{source}")
        return BuiltModel(model, has_published_classes=True)
    state = None if weights == RANDOM_WEIGHTS else read_state_dict(weights)
    model = kind(config)
    if state is None:
        return BuiltModel(model, has_published_classes=False)
    return _load_checkpoint(model, strip_wrapper_prefix(state, model.state_dict()), weights)


def _select_model_class(transformers: Any, config: Any) -> Any:
    """Return the transformers class to load. If the configured class needs more than images, return a classifier."""
    class_name = next(iter(config.architectures or ()), "")
    class_name = VISION_ENCODER_BY_CLASS.get(class_name, class_name)
    if class_name.endswith(IMAGE_MODEL_CLASS_SUFFIXES) and hasattr(transformers, class_name):
        return getattr(transformers, class_name)
    classifiers = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(config) not in classifiers:
        raise ValueError(f"no image model for a {type(config).__name__} with the class {class_name or 'None'}")
    classifier = classifiers[type(config)]
    return classifier[0] if isinstance(classifier, tuple) else classifier


def _load_checkpoint(model: Any, state: StateDict, weights: WeightsSource) -> BuiltModel:
    """Load a state dict into a transformers model. All tensors must match.

    A last layer with another number of classes replaces that of the model. Tensor names of all versions of transformers
    are accepted.
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
            return BuiltModel(fresh, has_published_classes)
        config.num_labels, has_published_classes = classes.pop(), False


def _check_all_weights_loaded(loading_report: Mapping[str, Any], source: str) -> None:
    reported = {what: loading_report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")}
    names = {what: sorted(str(k if isinstance(k, str) else k[0]) for k in keys) for what, keys in reported.items()}
    differences = [f"{len(keys)} {what} ({format_first_names(keys)})" for what, keys in names.items() if keys]
    if differences:
        raise WeightsError(f"{source} does not fit the model: {'; '.join(differences)}; is it only a backbone?")


def load_preprocessing(transformers: Any, source: str) -> Callable[..., Any] | None:
    """Load the preprocessing from a repository or folder. Return None for a source without a preprocessing file."""
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
