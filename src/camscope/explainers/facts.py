"""Facts that go with a map: what the model said of the sample, and under which versions."""

import platform
import re
from typing import Any

import torch

from camscope.explanation import ClassScore
from camscope.targets import Score
from camscope.version import __version__

TOP = 5


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


def _top(score: Score, i: int, chances: list[float | None]) -> tuple[ClassScore, ...]:
    if score.logits is None:
        return ()
    logits = score.logits[i].double().cpu()
    best = logits.topk(min(TOP, len(logits))).indices.tolist()
    return tuple(ClassScore(k, score.name_of(k), float(logits[k]), chances[k]) for k in best)
