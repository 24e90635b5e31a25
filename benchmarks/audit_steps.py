"""Do fewer steps of integrated gradients change what an audit compares?

    python -m benchmarks.audit_steps DATA [--images 4] [--size 112] [--write]

On chest X-rays and photographs: Spearman's correlation of maps of few steps with those of 50, and the robustness metrics
of both. DATA holds `models.py`, `chest_xray` and `photos`.
"""

import argparse
import json
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from camscope import IntegratedGradients
from camscope.errors import UndefinedError
from camscope.metrics import METRICS
from camscope.metrics.explain_changed_inputs import clean_maps_and_predictions_shared
from camscope.metrics.map_similarity import SIMILARITIES

RESULTS: Final = Path(__file__).with_name("results") / "audit_steps.json"
STEPS: Final = (4, 8, 16, 50)
COMPARED: Final = ("stability", "acquisition-stability", "max-sensitivity", "random-logit")
SOURCES: Final = {"chest X-rays": ("chest_xray", "chest_xray/images"), "photographs": ("resnet18", "photos")}


def load(data: Path, folder: str, size: int, count: int, models: Any) -> torch.Tensor:
    """The first images of a folder as the model's input."""
    from PIL import Image

    _, mean, std = models.IMAGENET
    files = sorted(path for path in (data / folder).rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    pixels = [np.array(Image.open(path).convert("RGB").resize((size, size))) for path in files[:count]]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def value(name: str, tool: IntegratedGradients, x: torch.Tensor, target: int) -> float:
    """A metric of one image, NaN where no changed image leaves the prediction stable."""
    try:
        return float(METRICS[name](tool, x, target))
    except UndefinedError:
        return float("nan")


def row(net: torch.nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """For each number of steps: the correlation with most steps, and the metrics, as means over the images."""
    with torch.no_grad():
        targets = net(x).argmax(1).tolist()
    full = IntegratedGradients(net, n_steps=STEPS[-1]).attribute(x, targets).numpy()
    found: dict[str, Any] = {}
    for n_steps in STEPS:
        tool = IntegratedGradients(net, n_steps=n_steps)
        maps = full if n_steps == STEPS[-1] else tool.attribute(x, targets).numpy()
        ranks = [SIMILARITIES["spearman"](one, most) for one, most in zip(maps, full, strict=True)]
        values = []
        for image, target in zip(x, targets, strict=True):
            with clean_maps_and_predictions_shared():
                values.append([value(name, tool, image[None], target) for name in COMPARED])
        means = dict(zip(COMPARED, np.nanmean(values, 0).round(4).tolist(), strict=True))
        found[str(n_steps)] = {
            "rank correlation": round(float(np.mean(ranks)), 4),
            "least": round(min(ranks), 4),
            **means,
        }
        print(n_steps, found[str(n_steps)], flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_steps", description=__doc__)
    parser.add_argument("data", type=Path, help="the folder of models and images")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--write", action="store_true", help=f"write them into results/{RESULTS.name}")
    chosen = parser.parse_args(arguments)
    spec = spec_from_file_location("models", chosen.data / "models.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{chosen.data}: there is no models.py")
    models = module_from_spec(spec)
    spec.loader.exec_module(models)
    found: dict[str, Any] = {"images": chosen.images, "size": chosen.size}
    for name, (model, folder) in SOURCES.items():
        print(name)
        found[name] = row(getattr(models, model)(), load(chosen.data, folder, chosen.size, chosen.images, models))
    if chosen.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
