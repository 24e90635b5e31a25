"""Facts that go with a map: what the model said of the sample, and under which versions."""

import hashlib
import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from camscope.explanation import ClassScore
from camscope.targets import Score
from camscope.version import __version__

TOP = 5
WORD = re.compile(r"[\w+-]{1,40}")  # of a setting: no path, and no name of a file


def answered(score: Score, i: int) -> dict[str, Any]:
    """Question and answer of sample i, as an Explanation has them: target, label, score, probability, top."""
    index, values, chances = score.class_of(i), score.values, score.chances(i)
    return {
        "target": index,
        "label": score.label_of(i),
        "score": float(values[i]) if values is not None else float("nan"),
        "probability": None if index is None else chances[index],
        "top": _top(score, i, chances),
    }


def versions() -> dict[str, str]:
    """What the numbers depend on beside the model."""
    return {"camscope": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def in_words(value: object) -> str:
    """As an object calls itself, without where it lies in memory: the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def is_plain(value: Any) -> bool:
    """Whether a setting is a number or a single word, or some of them."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return (
        value is None or isinstance(value, bool | int | float) or bool(isinstance(value, str) and WORD.fullmatch(value))
    )


def discreet(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for those who may know no file: of what is not plain, as the path of an image, its kind and a digest."""
    return {name: value if is_plain(value) else _digested(value) for name, value in parameters.items()}


def _digested(value: Any) -> str:
    return f"{type(value).__name__} {hashlib.sha256(in_words(value).encode()).hexdigest()[:8]}"


def _top(score: Score, i: int, chances: list[float | None]) -> tuple[ClassScore, ...]:
    if score.logits is None:
        return ()
    logits = score.logits[i].double().cpu()
    best = logits.topk(min(TOP, len(logits))).indices.tolist()
    return tuple(ClassScore(k, score.name_of(k), float(logits[k]), chances[k]) for k in best)
