"""`python -m benchmarks.leaderboard`: methods on photographs whose objects are boxed, into docs/leaderboard.md.

--models resnet18 deit_tiny    trained ones, where a folder beside the project has them
--most 8                       seconds an image may take; what takes longer is named and left out
--kept FOLDER                  runs and values stay there, and a second start goes on
"""

import argparse
import csv
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import machine
from benchmarks.trained import DATA, TITLES
from camscope import load_model
from camscope.batch import run_batch
from camscope.errors import CamscopeError
from camscope.explainers import METHODS, Explainer
from camscope.measure import Measures, measure
from camscope.measure.figure import drawn
from camscope.measure.summary import Line, summarised

BOXES, PAGE = DATA / "imagenet_boxes", Path(__file__).parents[1] / "docs" / "leaderboard.md"
FIGURES = PAGE.parent / "leaderboard"
FIRST = ("enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept")
QUICK = (
    "gradcam", "gradcam++", "smoothgradcam++", "xgradcam", "hirescam", "gradcam-elementwise", "layercam", "finercam",
    "shapleycam", "bagcam", "refinecam", "cam", "liftcam", "eigencam", "eigengradcam", "kpcacam", "fem", "dff", "rollout",
    "gradrollout", "chefer", "legrad", "gradeclip", "fullgrad", "simplefullgrad", "saliency", "inputxgradient", "smoothgrad",
    "guidedbackprop", "deconvnet", "guidedgradcam", "excitationbackprop", "randomcam",
)  # fmt: skip
SUBSETS = {"all": None, "off-centre": "not centre_in_box"}


def manifest(folder: Path) -> Path:
    """A table of the photographs, with their labels as targets."""
    path, known = folder / "list.csv", json.loads((BOXES / "annotations.json").read_bytes())
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "target", "centre_in_box"])
        for one in known["images"]:
            table.writerow([BOXES / "images" / one["file_name"], one["imagenet_label"], one["centre_in_box"]])
    return path


def priced(model: Any, methods: Sequence[str], most: float) -> tuple[list[Explainer], dict[str, float], dict[str, str]]:
    """Methods that answer, their seconds for an image, and why others are left out."""
    first = json.loads((BOXES / "annotations.json").read_bytes())["images"][0]
    tools: list[Explainer] = []
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, kind in METHODS.items():
        if name not in methods:
            left_out |= {} if kind.control else {name: "its price"}
            continue
        try:
            tool: Any = kind(model)
            begin = time.perf_counter()
            tool.explain(BOXES / "images" / first["file_name"], first["imagenet_label"])
            seconds[name] = time.perf_counter() - begin
        except CamscopeError as error:
            left_out[name] = str(error).partition(":")[0].partition(";")[0]
            continue
        if seconds[name] > most:
            left_out[name] = f"{seconds[name]:.0f} s an image"
        else:
            tools.append(tool)
    return tools, seconds, left_out


def page(results: Mapping[str, tuple[Measures, Mapping[str, float], Mapping[str, str]]]) -> str:
    """The document, and its figures beside it."""
    here = machine("cpu")
    parts = [PREFACE.format(date=f"{here['processor']}, torch {here['torch']}")]
    FIGURES.mkdir(exist_ok=True)
    for name, (measures, seconds, left_out) in results.items():
        parts.append(f"## {TITLES[name]}\n")
        for title, where in SUBSETS.items():
            lines = summarised(measures.table(where))
            images = max(line.estimate.n for line in lines[FIRST[0]] if line.estimate)
            parts.append(f"### {title.capitalize()}: {images} photographs\n\n{_table(lines, seconds)}\n")
            file = f"{name}-{title}.png"
            (FIGURES / file).write_bytes(drawn({one: lines[one] for one in FIRST[:3]}, ".png"))
            parts.append(f"![{TITLES[name]}, {title}: means and intervals](leaderboard/{file})\n")
        said = "; ".join(f"`{method}` ({why})" for method, why in left_out.items() if why != "its price")
        dear = ", ".join(f"`{method}`" for method, why in left_out.items() if why == "its price")
        parts.append(f"Without an answer here: {said}. Not run, for their price: {dear}.\n")
    return "\n".join(parts)


PREFACE = """# Leaderboard: where the methods look, against boxes

Photographs of ImageNet's validation set with the objects' boxes, each asked for its label; methods with their settings as
they come, CAMs at the layer that camscope chooses. Means with bootstrap intervals (95 %) over photographs; **bold**: better
than the best map that knows nothing of the model (uniform, centre, edges, random), paired by photograph, at 5 % after Holm's
correction. A box holds background too, so no map reaches the end of a scale; and a map that lies on the object is not
thereby what the model used: for that, see the faithfulness metrics. Made by `python -m benchmarks.leaderboard` on {date};
`camscope measure` does the same with images and boxes of yours.
"""


def _table(lines: Mapping[str, Sequence[Line]], seconds: Mapping[str, float]) -> str:
    """A row a method, the highest enrichment first."""
    order = [(line.method, line.control) for line in lines[FIRST[0]]]
    found = {name: {line.method: line for line in own} for name, own in lines.items()}
    head = ["method", *FIRST, "seconds"]
    rows = []
    for method, control in order:
        cells = [_cell(found[name].get(method)) for name in FIRST]
        title = f"*{method}* (control)" if control else f"`{method}`"
        rows.append([title, *cells, f"{seconds[method]:.2f}" if method in seconds else ""])
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _cell(line: Line | None) -> str:
    if line is None or line.estimate is None:
        return "–"
    one = line.estimate
    text = f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]"
    return f"**{text}**" if line.beats_control else text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaderboard", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "deit_tiny"])
    parser.add_argument("--methods", nargs="+", default=QUICK)
    parser.add_argument("--most", type=float, default=8.0)
    parser.add_argument("--kept", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    results = {}
    with TemporaryDirectory() if options.kept is None else nullcontext(options.kept) as place:
        for name in options.models:
            folder = Path(place) / name
            folder.mkdir(parents=True, exist_ok=True)
            tools, seconds, left_out = priced(load_model(f"{DATA / 'models.py'}:{name}"), options.methods, options.most)
            print(
                f"{name}: {len(tools)} methods, {sum(seconds[tool.title] for tool in tools):.0f} s an image", flush=True
            )
            run_batch(tools, manifest(folder), folder / "run", root="", batch_size=4, chunk=10)
            results[name] = measure(folder / "run", folder / "measures", BOXES / "annotations.json"), seconds, left_out
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
