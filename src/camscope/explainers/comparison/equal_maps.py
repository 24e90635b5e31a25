"""Find explanations whose displayed maps are equal, describe them, and correlate displayed maps."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from camscope.errors import InputError
from camscope.explanation import Explanation, FloatArray
from camscope.geometry import Placement

MAX_HEATMAP_DIFFERENCE = 1e-4  # relative to the maximum
KNOWN_IDENTITIES = {  # what makes the formulas of methods equal
    "the gradient there is one number per channel, as before global pooling": (
        "gradcam",
        "xgradcam",
        "hirescam",
        "cam",
    ),
    "nothing there is negative": ("layercam", "gradcam-elementwise"),
}


def find_equal_maps(explanations: Sequence[Explanation]) -> list[tuple[Explanation, ...]]:
    """Group the explanations with equal displayed maps. Leave out maps without positive values."""
    groups: list[list[Explanation]] = []
    for explanation in explanations:
        heatmap = explanation.heatmap("grid")
        if not heatmap.any():
            continue
        for group in groups:
            first = group[0].heatmap("grid")
            if first.shape == heatmap.shape and np.abs(first - heatmap).max() <= MAX_HEATMAP_DIFFERENCE:
                group.append(explanation)
                break
        else:
            groups.append([explanation])
    return [tuple(group) for group in groups if len(group) > 1]


def correlate_maps(explanations: Sequence[Explanation], kind: Literal["pearson", "spearman"] = "pearson") -> FloatArray:
    """Compute the correlations (M,M) between the displayed maps of M explanations. For a constant map they are NaN."""
    if kind not in ("pearson", "spearman"):
        raise InputError(f"kind={kind!r}: expected 'pearson' or 'spearman'")
    finest_grid = np.max([explanation.grid for explanation in explanations], axis=0)
    placement = Placement.identity(finest_grid.tolist())
    heatmaps = (explanation.heatmap("grid").astype(np.float64) for explanation in explanations)
    rows = np.stack([placement.project(heatmap)[0].ravel() for heatmap in heatmaps])
    if kind == "spearman":
        rows = np.stack([_rank_values(row) for row in rows])
    centered = rows - rows.mean(1, keepdims=True)
    norms = np.linalg.norm(centered, axis=1)
    is_valid = norms > 1e-12 * np.abs(rows).max(1)  # a constant map leaves only rounding
    scaled = centered / np.where(is_valid, norms, np.nan)[:, None]
    return np.asarray((scaled @ scaled.T).clip(-1, 1))


def _rank_values(values: FloatArray) -> FloatArray:
    """Compute the rank of each value (M,). Equal values get their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[which])


def describe_equal_maps(
    groups: Sequence[tuple[Explanation, ...]], method_labels: Mapping[int, str], n_targets: int
) -> tuple[str, ...]:
    """Return one sentence for each group of equal maps. It names the methods of the group and the reason.

    `method_labels` are the labels of the methods, by `id` of the explanation.
    """
    classes_by_text: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        layers = {explanation.layer for explanation in group}
        names = [method_labels[id(explanation)] for explanation in group]
        names = [f"'{name}'" if "," in name else name for name in names]
        if len(layers) > 1:
            names = [f"{name} at {explanation.layer}" for name, explanation in zip(names, group, strict=True)]
        where = f" at {group[0].layer}" if len(layers) == 1 and group[0].layer else ""
        text = f"{_join_names(names)} are one map{where}", _explain_equality(group, layers)
        classes_by_text.setdefault(text, []).append(group[0].label)
    sentences = []
    for (statement, reason), classes in classes_by_text.items():
        which = " for every class" if len(classes) == n_targets else f" for {_join_names(classes)}"
        sentences.append(f"{statement}{which if n_targets > 1 else ''}: {reason}")
    return tuple(sentences)


def _explain_equality(group: Sequence[Explanation], layers: set[str | None]) -> str:
    """Return why the maps of a group are equal: the formulas agree under a condition, or only these maps agree."""
    for condition, methods in KNOWN_IDENTITIES.items():
        if len(layers) == 1 and all(explanation.method in methods for explanation in group):
            return f"their formulas are one if {condition}"
    return "the maps are the same here"


def _join_names(names: Sequence[str]) -> str:
    """Join names with commas and a final "and": `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
