"""Facts that go with a map: what the model said of the sample, and under which versions."""

import hashlib
import platform
import re
from collections.abc import Mapping
from math import isnan
from typing import Any

import torch
from torch import Tensor

from camscope.explanation import ClassScore
from camscope.targets import Score
from camscope.version import __version__

TOP = 5
WORD = re.compile(r"[\w+-]{1,40}")  # of a setting: no path, and no name of a file


def answered(score: Score, samples: int) -> list[dict[str, Any]]:
    """Question and answer of each sample, as an Explanation has them: target, label, score, probability, top."""
    values = [float("nan")] * samples if score.values is None else score.values.tolist()
    chances, asked = score.chances(), [score.class_of(i) for i in range(samples)]
    tops = _tops(score, samples, chances)
    return [
        {
            "target": index,
            "label": score.label_of(i),
            "score": values[i],
            "probability": None if index is None or chances is None else _known(float(chances[i, index])),
            "top": tops[i],
        }
        for i, index in enumerate(asked)
    ]


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


def _tops(score: Score, samples: int, chances: Tensor | None) -> list[tuple[ClassScore, ...]]:
    """[sample]: the leading classes; read off all samples at once, as a tensor's single values are slow to read."""
    if score.logits is None:
        return [()] * samples
    best = score.logits.double().topk(min(TOP, score.logits.shape[1]), 1)
    shares = torch.full_like(best.values, torch.nan) if chances is None else chances.gather(1, best.indices)
    each = zip(*(part.tolist() for part in (best.indices, best.values, shares)), strict=True)
    return [
        tuple(ClassScore(k, score.name_of(k), value, _known(share)) for k, value, share in zip(*row, strict=True))
        for row in each
    ]


def _known(chance: float) -> float | None:
    return None if isnan(chance) else chance
