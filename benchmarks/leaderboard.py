"""`python -m benchmarks.leaderboard`: methods on photographs whose objects are boxed, into docs/leaderboard.md.

--models resnet18 deit_tiny    trained ones, where a folder beside the project has them
--most 15                      seconds of a core that a photograph may take; what takes longer is named and left out
--kept FOLDER                  runs, values and prices stay there, and a second start goes on
--finished                     start no other method: write the page of those that are finished

Quick methods see all photographs, the slow ones the same twenty of them. One core: as many threads as cores wait for one
another where something else runs beside them, and a pass takes up to twenty times as long.
"""

import argparse
import json
import random
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.leaderboard_page import PAGE, Results, page
from benchmarks.prices import price
from benchmarks.trained import BOXES, DATA, boxed, listed
from camscope import load_model
from camscope.batch import run_batch
from camscope.errors import CamscopeError
from camscope.explainers import METHODS, Explainer
from camscope.measure import measure

QUICK = (
    "gradcam", "gradcam++", "smoothgradcam++", "xgradcam", "hirescam", "gradcam-elementwise", "layercam", "finercam",
    "shapleycam", "bagcam", "refinecam", "cam", "liftcam", "eigencam", "eigengradcam", "kpcacam", "fem", "dff", "rollout",
    "gradrollout", "chefer", "legrad", "gradeclip", "fullgrad", "simplefullgrad", "saliency", "inputxgradient", "smoothgrad",
    "guidedbackprop", "deconvnet", "guidedgradcam", "excitationbackprop", "randomcam",
)  # fmt: skip
BRISK = ("reciprocam", "ablationcam", "lrp", "deeplift")  # each a run of its own, as are the slow ones
SLOW = tuple(name for name, kind in METHODS.items() if not kind.control and name not in QUICK + BRISK)
CHUNK = 5  # photographs in a part of a run of one method
PRICED = 60.0  # seconds that a method's price may take: the rest is reckoned from the steps so far
FEW = sorted(random.Random(0).sample(range(100), 20))  # photographs for the slow ones


@dataclass(frozen=True)
class Board:
    """One model: what its methods cost, and the values of those that were run; all of it kept in a folder."""

    name: str
    folder: Path
    most: float
    finished: bool

    def results(self) -> Results:
        """Run and measure what is not there yet, the cheapest method first."""
        model, every = load_model(f"{DATA / 'models.py'}:{self.name}"), range(len(boxed()["images"]))
        prices = self.prices(model)
        tools = {name: METHODS[name](model) for name, (seconds, _) in prices.items() if seconds <= self.most}
        quick = [tools[name] for name in QUICK if name in tools]
        tables = [self.values(quick, "list.csv", every, self.folder)]
        for name in (name for name in tools if name in BRISK and self.wanted(self.folder / name, every)):
            tables.append(self.values([tools[name]], "list.csv", every, self.folder / name))
        few = []
        for name in (name for name in tools if name in SLOW and self.wanted(self.folder / "few" / name, FEW)):
            few.append(self.values([tools[name]], "few.csv", FEW, self.folder / "few" / name))
        return Results(tables, few, FEW, self.prices(model))

    def wanted(self, place: Path, numbers: Sequence[int]) -> bool:
        """Whether a method's values are there, or may be made."""
        return not self.finished or len([*place.glob("measures/parts/*.parquet")]) * CHUNK >= len(numbers)

    def prices(self, model: Any) -> dict[str, tuple[float, str]]:
        """[method]: seconds of a core for a photograph, and in words, the cheapest first; or infinity and why not."""
        kept, first = self.folder / "prices.json", boxed()["images"][0]
        found: dict[str, tuple[float, str]] = json.loads(kept.read_bytes()) if kept.exists() else {}
        for name in (*QUICK, *BRISK, *SLOW):
            if name in found:
                continue
            try:
                tool: Any = METHODS[name](model)
                shown = BOXES / "images" / first["file_name"], first["imagenet_label"]
                found[name] = price(partial(tool.explain, *shown), PRICED)
            except CamscopeError as error:
                found[name] = float("inf"), str(error).partition(":")[0].partition(";")[0]
            kept.write_text(json.dumps(found))
            print(f"{self.name}: {name}: {found[name][1]}", flush=True)
        return dict(sorted(found.items(), key=lambda one: one[1][0]))

    def note_price(self, name: str, seconds: float) -> None:
        """What a method took for a photograph of many, where its price was reckoned from a part of one."""
        kept = self.folder / "prices.json"
        found = json.loads(kept.read_bytes())
        if not found[name][1][0].isdigit():
            kept.write_text(json.dumps({**found, name: (seconds, f"{seconds:.2f}")}))

    def values(self, tools: Sequence[Explainer], file: str, numbers: Sequence[int], place: Path) -> Any:
        """The measured table of some methods on some photographs, whose rows are numbered as in the whole list."""
        print(f"{self.name}: {', '.join(tool.title for tool in tools)}", flush=True)
        begin, chunk = time.process_time(), CHUNK if len(tools) == 1 else 2 * CHUNK
        made = run_batch(tools, listed(self.folder / file, numbers), place / "run", root="", batch_size=4, chunk=chunk)
        if made.images and len(tools) == 1:
            self.note_price(tools[0].name, (time.process_time() - begin) / made.images)
        table = measure(place / "run", place / "measures", BOXES / "annotations.json").table()
        rows = [numbers[row] for row in table["row"].to_pylist()]
        return table.set_column(table.column_names.index("row"), "row", [rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaderboard", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "deit_tiny"])
    parser.add_argument("--most", type=float, default=15.0)
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--finished", action="store_true")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with TemporaryDirectory() if options.kept is None else nullcontext(options.kept) as place:
        results = {}
        for name in options.models:
            folder = Path(place) / name
            folder.mkdir(parents=True, exist_ok=True)
            results[name] = Board(name, folder, options.most, options.finished).results()
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
