"""Every model of the zoo: how far its Grad-CAM map is from one by plain autograd, and how long it takes.

    python -m benchmarks.model_times [--only NAME ...] [--write]

The models have random weights and small inputs, in float64 for the difference and in float32 for the time. A difference is
the largest of a cell, as a share of the largest cell. The time of a map is also given as a multiple of a forward pass.
--write saves the figures in benchmarks/results/model_times.json and the page docs/evidence/model-times.md.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from camscope import GradCAM
from camscope.errors import CamscopeError

RESULTS = Path(__file__).parent / "results" / "model_times.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "model-times.md"
N_REPEATS = 5
HEAD = """# Time and difference per model

Each model of [the models page](models.md) has random weights and a small input.

- *Difference* is the largest difference between a Grad-CAM map and the same map by plain `torch.autograd.grad`, as a share of
  the map's maximum, in float64.
- *Map* is the median time of one map in float32 on one thread. *Passes* is this time as a multiple of a forward pass without
  gradients. On inputs as small as these, the fixed cost of a call counts most.

`python -m benchmarks.model_times --write` measures this page again.

"""


def measure_row(row: Any, compute_reference: Callable[..., Any]) -> dict[str, Any]:
    """Measure one model of the zoo. A model that cannot be explained has its error instead of figures."""
    model, x = row.model(), row.inputs(1)
    try:
        attribution = torch.from_numpy(GradCAM(model).explain(x[0], row.target).attribution)
        expected = compute_reference(row, model, x)[0][0]
        difference = float((attribution - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    except CamscopeError as error:
        return {"error": str(error)}
    model, x = model.float(), x.float()
    explainer = GradCAM(model, row.layer)
    with torch.no_grad():
        forward = measure_seconds(lambda: model(x))
    seconds = measure_seconds(lambda: explainer.explain(x[0], row.target))
    return {"difference": difference, "ms": round(1000 * seconds, 1), "passes": round(seconds / forward, 1)}


def measure_seconds(function: Callable[[], Any]) -> float:
    """Return the median seconds of a few calls, after one that warms up."""
    function()
    seconds = []
    for _ in range(N_REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def write_page(figures: Mapping[str, Any]) -> str:
    """Return the page of the figures."""
    computer = figures["machine"]
    lines = [
        HEAD + f"Measured on {computer['processor']}, one thread, PyTorch {computer['torch']}.\n",
        "| family | model | difference | map | passes |",
        "|---|---|---|---|---|",
    ]
    for name, row in figures["models"].items():
        family, _, model = name.partition(": ")
        values = (
            [row["error"], "–", "–"]
            if "error" in row
            else [f"{row['difference']:.0e}", f"{row['ms']} ms", row["passes"]]
        )
        lines.append(f"| {family} | {model} | {' | '.join(map(str, values))} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    zoo = import_module("tests.explainers.test_zoo")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_times", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="models whose name contains one of these texts")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} and {PAGE.name}")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    models = {}
    for name, row in zoo.ROWS.items():
        if not chosen.only or any(text in name for text in chosen.only):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                models[name] = measure_row(row, zoo.reference)
            print(name, models[name], flush=True)
    figures = {"machine": machine("cpu"), "models": models}
    if chosen.write:
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
        PAGE.write_text(write_page(figures))


if __name__ == "__main__":
    main()
