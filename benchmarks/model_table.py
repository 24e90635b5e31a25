"""A table of models: the question, how far the map is from an independent computation, and how long it takes.

    python -m benchmarks.model_table [--family NAME] [--only TEXT ...] [--write]

--write merges the rows into benchmarks/results/model_table.json and draws docs/evidence/model-table.md from it. The family
yolo needs Ultralytics, and is measured only if it is asked for.
"""

import argparse
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.model_table_cases import Case, list_cases, list_yolo_cases
from camscope.errors import CamscopeError

RESULTS = Path(__file__).parent / "results" / "model_table.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "model-table.md"
N_REPEATS = 5
MAX_WORDS_OF_ERROR = 16  # on the page; the figures have the whole message
HEAD = """# Does it work with my model?

Each row is a small model with random weights, a question to it, and a map.

- *Difference* is the largest difference from the same map by an independent computation, as a share of the maximum. *Right*
  means that it is below the tolerance. A map of a box, a region, a class or a word is compared with `torch.autograd.grad`. A map
  without a target is compared with NumPy's singular value decomposition, and that of a point with the cosines of a plain hook.
- For a model without gradients, it is the occlusion map of the same network as a module.
- *Map* is the median time of five maps on one thread, and *passes* is this time as a multiple of a forward pass. Segmentation
  and video run in float64, the others in float32. On models as small as these, the fixed
  cost of a call counts most. The runs shared two cores with other work, so read the times as an order of magnitude.

LLaVA-OneVision is not in the table. It interpolates its image tokens before the language model, so that a plain hook at its
projector reads other cells. `tests/explainers/vision_language` compares its map at the input of the language model.

[The models page](models.md) lists the classifiers and their layers. `python -m benchmarks.model_table --write` measures this
page again.

"""


def measure_case(case: Case) -> dict[str, Any]:
    """Measure one case. One that cannot be explained has its error instead of figures."""
    row: dict[str, Any] = {"family": case.family, "model": case.name, "question": case.question}
    try:
        prepared = case.prepare()
        explanation = prepared.explain()
    except CamscopeError as error:
        return {**row, "error": f"{type(error).__name__}: {error}"}
    expected = np.asarray(prepared.compute(explanation))
    scale = float(np.abs(expected).max())
    difference = float(np.abs(explanation.attribution - expected).max()) / scale if scale else float("inf")
    seconds, forward = measure_seconds(prepared.explain), measure_seconds(prepared.forward)
    return {
        **row,
        "difference": difference,
        "tolerance": case.tolerance,
        "right": difference <= case.tolerance,
        "ms": round(1000 * seconds, 1),
        "passes": round(seconds / forward, 1),
    }


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
    computer, rows = figures["machine"], figures["rows"]
    lines = [
        HEAD + f"Measured on {computer['processor']}, one thread, PyTorch {computer['torch']}.\n",
        "| family | model | question | difference | right | map | passes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        values = [row["family"], row["model"], row["question"]]
        if "error" in row:
            message = " ".join(row["error"].replace("|", "/").split()[:MAX_WORDS_OF_ERROR])
            values += [f"{message} …", "error", "–", "–"]
        else:
            right = "right" if row["right"] else "wrong"
            values += [f"{row['difference']:.0e}", right, f"{row['ms']} ms", row["passes"]]
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_table", description=__doc__)
    parser.add_argument("--family", help="one family only")
    parser.add_argument("--only", nargs="+", default=[], help="models whose name contains one of these texts")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} and {PAGE.name}")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = list_yolo_cases() if chosen.family == "yolo" else list_cases()
    cases = [case for case in cases if chosen.family in (None, case.family)]
    cases = [case for case in cases if not chosen.only or any(text in case.name for text in chosen.only)]
    rows = []
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append(measure_case(case))
        print(rows[-1], flush=True)
    if chosen.write:
        old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": []}
        measured = {(row["family"], row["model"]) for row in rows}
        kept = [row for row in old["rows"] if (row["family"], row["model"]) not in measured]
        order = {
            family: place for place, family in enumerate(dict.fromkeys(row["family"] for row in old["rows"] + rows))
        }
        figures = {"machine": machine("cpu"), "rows": sorted(kept + rows, key=lambda row: order[row["family"]])}
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(write_page(figures), encoding="utf-8")
    print(Counter("error" if "error" in row else "right" if row["right"] else "wrong" for row in rows))


if __name__ == "__main__":
    main()
