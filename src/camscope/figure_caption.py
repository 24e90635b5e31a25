"""Write the caption of a figure for print: method, layer, target, scale, interpolation, model and versions."""

import math
from collections.abc import Sequence
from typing import Any

from camscope.render.color_bar import format_range_number

SCALE_TEXTS = {
    "max": "divided by its maximum",
    "robust": "divided by the 99.5 % quantile of its magnitudes",
    "symmetric": "divided by its largest magnitude",
}
INTERPOLATION_TEXTS = {
    "smooth": "interpolated by a cubic without overshoot between",
    "bilinear": "interpolated linearly between",
    "cells": "drawn as",
}


def describe_map(explanation: Any) -> str:
    """Describe a map of an `Explanation`: its method, layer and target. Numbers have three digits."""
    layer = "" if explanation.layer is None else f" at {explanation.layer}"
    if math.isnan(explanation.score):
        return f"{explanation.method_title}{layer}, {explanation.label}"
    score = f"score {explanation.score:.3g}"
    if explanation.probability is not None:
        score = f"p={explanation.probability:.2f}, {score}"
    return f"{explanation.method_title}{layer} for {explanation.label} ({score})"


def build_figure_caption(
    explanations: Sequence[Any],
    scales: Sequence[Any],
    ranges: Sequence[tuple[float, float]],
    *,
    colormap: str,
    interpolation: str,
    first_letter: str = "",
) -> str:
    """Return the caption of a figure with one or several maps.

    Args:
        explanations: The `Explanation` of each map.
        scales: The color scale of each map, without "auto".
        ranges: The values at the ends of each color bar.
        colormap: Names of the color maps.
        interpolation: One of INTERPOLATIONS.
        first_letter: The letter of the first map, if the panels have letters.

    Returns:
        One paragraph.

    """
    sentences = []
    if len(explanations) == 1 and not first_letter:
        sentences.append(f"{describe_map(explanations[0])}.")
    else:
        names = [
            f"{chr(ord(first_letter or 'a') + n)}, {describe_map(item)}" if first_letter else describe_map(item)
            for n, item in enumerate(explanations)
        ]
        photo = "a, image; " if first_letter == "b" else ""
        sentences.append(f"{photo}{'; '.join(names)}.")
    scale_texts = dict.fromkeys(map(_describe_scale, scales))
    bars = ", ".join(dict.fromkeys(_describe_range(*ends) for ends in ranges))
    sentences.append(f"Colors ({colormap}): each map {' or '.join(scale_texts)}; raw values {bars}.")
    grids = dict.fromkeys("x".join(map(str, item.grid)) for item in explanations)
    sentences.append(f"Maps are {INTERPOLATION_TEXTS[interpolation]} {' or '.join(grids)} cells.")
    flags = dict.fromkeys(item.warning_text for item in explanations if item.warning_text is not None)
    if flags:
        sentences.append(f"Flagged: {'; '.join(flags)}.")
    digests = dict.fromkeys(item.model for item in explanations if item.model)
    if digests:
        sentences.append(f"Digest of the weights: {', '.join(digests)}.")
    versions = [f"{name} {version}" for name, version in explanations[0].versions.items() if name != "python"]
    if versions:
        sentences.append(f"Software: {', '.join(versions)}.")
    return " ".join(" ".join(sentences).split())


def _describe_scale(scale: Any) -> str:
    if isinstance(scale, str) or scale is None:
        return SCALE_TEXTS[scale or "max"]
    return f"on the scale {scale[0]:.3g} to {scale[1]:.3g}"


def _describe_range(low: float, high: float) -> str:
    return f"{format_range_number(low, low, high)} to {format_range_number(high, low, high)}"
