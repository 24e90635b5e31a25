"""Check the files of a Hugging Face folder before transformers reads the folder. Errors name the damaged file."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from camscope.atomic_writes_and_folder_locks import check_regular_file, read_bytes
from camscope.errors import ModelError, WeightsError
from camscope.read_untrusted_files import read_errors_converted

WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json", "added_tokens.json"),
)
MAX_SETTINGS_BYTES = 2**26  # of a JSON file; a large tokenizer has half of that
MAX_COUNTS = {"layers": 1000, "depth": 1000, "num_": 2**24}  # by part of a setting's name


def check_settings_file(source: str, name: str) -> None:
    """Raise ModelError if a settings file, such as config.json, is not a JSON object or declares too many layers or classes."""
    _check_json_file(Path(source, name), _reject_excessive_counts)


def check_tokenizer_files(source: str) -> None:
    """Raise ModelError if a JSON file of the tokenizer does not hold a JSON object."""
    for name in TOKENIZER_FILES:
        _check_json_file(Path(source, name))


def check_weight_files(source: str) -> None:
    """Raise WeightsError for a damaged model.safetensors. If this file is missing, check the index file and the listed files."""
    index_path, names = Path(source, WEIGHTS_INDEX_FILE), [WEIGHTS_FILE]
    if not Path(source, WEIGHTS_FILE).is_file():
        if not index_path.is_file():  # a repository, or transformers reports what is missing
            return
        with read_errors_converted(f"{index_path} cannot be used", WeightsError, wrap_camscope_errors=True):
            names = _list_shards(_read_json_object(index_path))
    for path in (Path(source, name) for name in names):
        with read_errors_converted(f"{index_path} lists {path.name:.80}", WeightsError):
            check_regular_file(path)
        try:
            with safe_open(path, "pt"):  # compares the sizes of its header with the size of the file
                pass
        except SafetensorError as error:
            raise WeightsError(f"{path} is not a complete safetensors file: {error}") from error


def _list_shards(index: dict[str, Any]) -> list[str]:
    """Return the names of the weight files that an index file lists."""
    files = index.get("weight_map")
    if not files or not isinstance(files, dict) or not isinstance(index.get("metadata"), dict):
        raise WeightsError("expected the objects metadata and weight_map, from tensor names to file names")
    if other := [name for name in files.values() if not isinstance(name, str) or not name or name != Path(name).name]:
        raise WeightsError(
            f"weight_map names the file {other[0]!r:.40}; expected the name of a file in the same folder"
        )
    return sorted(set(files.values()))


def _check_json_file(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> None:
    if path.is_file():  # a repository has none, and transformers reports what is missing
        with read_errors_converted(f"{path} cannot be used", ModelError, wrap_camscope_errors=True):
            _read_json_object(path, object_hook)


def _read_json_object(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    content = json.loads(read_bytes(path, MAX_SETTINGS_BYTES), object_hook=object_hook)
    if not isinstance(content, dict):
        raise ModelError(f"the file contains {content!r:.40}; expected a JSON object")
    return content


def _reject_excessive_counts(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings unchanged. Raise ModelError for settings that declare too many layers or classes."""
    for key, value in settings.items():
        limit = next((limit for part, limit in MAX_COUNTS.items() if part in key), math.inf)
        for count in value if isinstance(value, list) else [value]:
            if isinstance(count, int | float) and count > limit:
                raise ModelError(f"{key} is {count:.6g}; the limit is {limit}")
    return settings
