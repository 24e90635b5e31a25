"""Image classifiers of Hugging Face repositories and folders. Nothing of their code is executed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from camscope.cards import ModelCard
from camscope.errors import CamscopeError, ModelError, PreprocessError, WeightsError
from camscope.images.preprocess import Preprocess, as_preprocess
from camscope.models.checkpoint import RANDOM, State, Weights, aligned, described, read_state, same_numbers
from camscope.models.fetch import package, unavailable


def huggingface_model(name: str, weights: Weights) -> tuple[nn.Module, ModelCard]:
    """The classifier of "org/name" or of a folder, with its published weights, those of a file, or none ("random")."""
    transformers = package("transformers")
    folder = Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    try:
        with same_numbers():
            model, usual = _loaded(transformers, source, weights)
    except CamscopeError:
        raise
    except (OSError, SafetensorError) as error:
        files = f"config.json, preprocessor_config.json and model.safetensors of {name!r}"
        raise unavailable(
            f"hf:{name}", error, f"fetch {files} and name the folder that holds them: hf:FOLDER"
        ) from error
    except (ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"hf:{name} is no image classifier that transformers can build: {error}") from error
    card = ModelCard(
        described(f"hf:{name}", weights), preprocessing_of(transformers, source), _categories(model) if usual else None
    )
    return model.float(), card


def _loaded(transformers: Any, source: str, weights: Weights) -> tuple[nn.Module, bool]:
    """The model, and whether its classes are those of its configuration."""
    classifier = transformers.AutoModelForImageClassification
    if weights is None:
        model, report = classifier.from_pretrained(
            source, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
        # a backbone's surplus (a pooler, another head) is no harm; a head without weights is
        _expect_whole({**report, "unexpected_keys": ()}, f"hf:{source}")
        return model, True
    state = None if weights == RANDOM else read_state(weights)
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    model = classifier.from_config(config, trust_remote_code=False)
    return (model, False) if state is None else _fitted(model, aligned(state, model.state_dict()), weights)


def _fitted(model: Any, state: State, weights: Weights) -> tuple[nn.Module, bool]:
    """The file's tensors under whatever names transformers gave them over the years, strictly."""
    config, usual = model.config, True
    while True:
        fresh, report = type(model).from_pretrained(
            None, config=config, state_dict=dict(state), output_loading_info=True, ignore_mismatched_sizes=True
        )
        classes = {stored[0] for _, stored, _ in report["mismatched_keys"] if len(stored)}
        heads = all(tuple(stored[1:]) == tuple(own[1:]) for _, stored, own in report["mismatched_keys"])
        if not usual or not heads or len(classes) != 1:
            _expect_whole(report, str(weights))
            return fresh, usual
        config.num_labels, usual = classes.pop(), False


def _expect_whole(report: Mapping[str, Any], source: str) -> None:
    wrong = []
    for what in ("missing", "unexpected", "mismatched"):
        names = sorted(str(key if isinstance(key, str) else key[0]) for key in report[f"{what}_keys"])
        if names:
            wrong.append(f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
    if wrong:
        raise WeightsError(f"{source} is not the whole of this classifier: {'; '.join(wrong)}; is it only a backbone?")


def preprocessing_of(transformers: Any, source: str) -> Callable[..., Any] | None:
    """That of the repository or folder, if it names one."""
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):  # no preprocessor_config.json: an image then asks for preprocess=
        return None
    try:
        return Preprocess.from_huggingface(processor)
    except PreprocessError:  # Preprocess has no exact words for it: the processor's own way
        return as_preprocess(partial(_pixel_values, processor))


def _pixel_values(processor: Any, image: object) -> object:
    return processor(image, return_tensors="pt")["pixel_values"]


def _categories(model: Any) -> tuple[str, ...] | None:
    names, count = model.config.id2label, model.config.num_labels
    unnamed = [f"LABEL_{i}" for i in range(count)]
    categories = [str(names.get(i, unnamed[i])) for i in range(count)]
    return tuple(categories) if categories != unnamed else None
