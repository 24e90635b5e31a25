"""How near `ScoreCAM(n_channels=n)` comes to the full map, by what the n channels are chosen by: a Markdown table.

python -m benchmarks.score_cam_top models.py:resnet18 layer4 photos/*.jpg
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from camscope.explainers import ScoreCAM
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.models import load_model

SIZES = (16, 32, 64, 128)
Seen = tuple[LayerFeatures, Tensor]

CRITERIA: dict[str, Callable[[LayerFeatures], Tensor]] = {
    "standard deviation": lambda f: f.activation.flatten(2).std(-1, correction=0),
    "largest activation": lambda f: f.activation.flatten(2).amax(-1),
    "mean size (as `n_channels=` does)": lambda f: f.activation.flatten(2).abs().mean(-1),
    "size of the Grad-CAM weight": lambda f: f.gradient.flatten(2).mean(-1).abs(),
    "size of the Grad-CAM weight times the mean activation": lambda f: (
        f.gradient.flatten(2).mean(-1) * f.activation.flatten(2).mean(-1)
    ).abs(),
}


class Watched(ScoreCAM):
    """Score-CAM that keeps what it saw: the full map's weights contain every smaller choice's."""

    needs_gradient = True
    seen: list[Seen]

    def channel_weights(self, features: LayerFeatures) -> Tensor:
        """(N,K,1)"""
        weights = super().channel_weights(features)
        self.seen = [(features, weights)]
        return weights


def correlations(features: LayerFeatures, weights: Tensor) -> dict[tuple[str, int], float]:
    """Pearson correlation over the cells of one sample, by criterion and number of channels."""
    full = summed(features, weights)
    found = {}
    for name, criterion in CRITERIA.items():
        order = criterion(features)[0].argsort(descending=True)
        for size in SIZES:
            chosen = torch.zeros_like(weights)
            chosen[0, order[:size]] = weights[0, order[:size]]
            pair = torch.stack([full, summed(features, chosen / chosen.sum())])
            found[name, size] = float(torch.corrcoef(pair)[0, 1])
    return found


def summed(features: LayerFeatures, weights: Tensor) -> Tensor:
    """(cells,): the first sample's map."""
    return (weights * features.activation.flatten(2)).sum(1)[0].relu()


def table(found: Sequence[dict[tuple[str, int], float]]) -> str:
    """Mean and least correlation over the images."""
    lines = ["| channels chosen by | " + " | ".join(f"top {size}" for size in SIZES) + " |", "| --- " * 5 + "|"]
    for name in CRITERIA:
        values = [[one[name, size] for one in found] for size in SIZES]
        lines.append(f"| {name} | " + " | ".join(f"{sum(v) / len(v):.3f} ({min(v):.3f})" for v in values) + " |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("layer")
    parser.add_argument("images", nargs="+", type=Path)
    given = parser.parse_args()
    tool = Watched(load_model(given.model), given.layer, preprocess="imagenet")
    found = []
    for image in given.images:
        tool.explain(image)
        found.append(correlations(*tool.seen[0]))
    print(f"Pearson correlation with the full map, mean (least) of {len(found)} images:\n\n{table(found)}")


if __name__ == "__main__":
    main()
