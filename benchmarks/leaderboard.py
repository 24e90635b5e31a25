"""`python -m benchmarks.leaderboard`: methods on photographs whose objects are boxed, into docs/evidence/leaderboard.md.

--models resnet18 deit_tiny    trained ones, where a folder beside the project has them; the page is written of both
--kept FOLDER                  unfinished runs stay there, and a second start goes on
--finished                     start no other method: write the page of those that are finished

Quick methods see all photographs, slow ones the same twenty of them, the slowest ten; the very slowest have fewer passes than
they come with, and the page says how many. What is finished is kept in benchmarks/results, and not run again. One core: as many
threads as cores wait for one another where something else runs beside them, and a pass takes up to twenty times as long.
"""

import argparse
import json
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import parquet

from benchmarks.leaderboard_page import FIRST, PAGE, Results, page
from benchmarks.prices import price
from benchmarks.trained import BOXES, DATA, boxed, listed
from camscope import load_model
from camscope.batch import BatchOptions, run_batch
from camscope.errors import CamscopeError
from camscope.evaluation import evaluate
from camscope.explainers import METHODS, Explainer

QUICK = (
    "gradcam", "gradcam++", "smoothgradcam++", "xgradcam", "hirescam", "gradcam-elementwise", "layercam", "finercam",
    "shapleycam", "bagcam", "refinecam", "cam", "liftcam", "eigencam", "eigengradcam", "segeigencam", "kpcacam", "fem",
    "dff", "rollout", "gradrollout", "chefer", "legrad", "gradeclip", "fullgrad", "simplefullgrad", "saliency",
    "inputxgradient", "smoothgrad", "guidedbackprop", "deconvnet", "guidedgradcam", "excitationbackprop", "randomcam",
)  # fmt: skip
BRISK = ("reciprocam", "ablationcam", "lrp", "deeplift")  # each a run of its own, as are the slow ones
SLOW = tuple(name for name, kind in METHODS.items() if not kind.control and name not in QUICK + BRISK)
FEWER: dict[str, dict[str, Any]] = {
    "rise": {"n_samples": 1000, "precision": "bf16"},
    "drise": {"n_samples": 1000, "precision": "bf16"},
    "sobol": {"n_samples": 8, "precision": "bf16"},
    "iscam": {"n_samples": 2},
    "sscam": {"n_samples": 2},
    "meaningfulperturbation": {"n_steps": 150},
    "extremalperturbation": {"areas": (0.1, 0.3)},
}  # of those that would take minutes a photograph
MODELS = ["resnet18", "deit_tiny"]
KEPT = Path(__file__).parent / "results"
SLOWEST = 10.0  # seconds a photograph
COLUMNS = [
    "row",
    "method",
    "layer",
    "parameters_digest",
    "target",
    "control",
    "metric",
    "value",
    "reason",
    "center_in_box",
]
CHUNK = 5  # photographs in a part of a run of one method
PRICED = 60.0  # seconds that a method's price may take: the rest is reckoned from the steps so far
FEW = sorted(random.Random(0).sample(range(100), 20))  # photographs for the slow ones
SAMPLES = {"slow": FEW, "slowest": FEW[::2]}


@dataclass(frozen=True)
class Board:
    """One model: what its methods cost, and the values of those that were run; unfinished runs are in the folder."""

    name: str
    folder: Path
    finished: bool

    def results(self) -> Results:
        """Run and measure what is not there yet, the cheapest method first."""
        model, every = load_model(f"{DATA / 'models.py'}:{self.name}"), range(len(boxed()["images"]))
        prices = self.prices(model)
        able = [
            name for name, (_, words) in prices.items() if words[:1].isdigit() or words.startswith(("about", "more"))
        ]
        quick = [METHODS[name](model) for name in QUICK if name in able]
        self.add("all", quick, every, self.folder)
        for name in (name for name in able if name in BRISK):
            self.add("all", [METHODS[name](model)], every, self.folder / name)
        for name in (name for name in able if name in SLOW):
            part = "slow" if prices[name][0] <= SLOWEST else "slowest"
            tool: Any = METHODS[name]
            self.add(part, [tool(model, **FEWER.get(name, {}))], SAMPLES[part], self.folder / "few" / name)
        return self.kept()

    @property
    def file(self) -> Path:
        """Where the finished values are."""
        return KEPT / f"leaderboard-{self.name}.parquet"

    def kept(self) -> Results:
        """What is finished."""
        table = parquet.read_table(self.file)
        parts = {name: table.filter(pc.field("part") == name) for name in ("all", *SAMPLES)}
        return Results(parts, SAMPLES, self.known, FEWER)

    def add(self, part: str, tools: Sequence[Explainer], numbers: Sequence[int], place: Path) -> None:
        """Run and measure some methods, unless their values are there or no run is to be started."""
        there = parquet.read_table(self.file) if self.file.exists() else None
        known = [] if there is None else pc.unique(there["method"]).to_pylist()
        if self.finished or all(tool.name in known for tool in tools):
            return
        new = self.values(tools, "list.csv" if part == "all" else f"{part}.csv", numbers, place).select(COLUMNS)
        wanted = pc.field("metric").isin(FIRST)
        new = new.filter(
            wanted if there is None else wanted & ~pc.field("control")
        )  # each run has them: the first one's stay
        new = new.append_column("part", pa.array([part] * new.num_rows))
        parquet.write_table(new if there is None else pa.concat_tables([there, new]), self.file)

    def prices(self, model: Any) -> dict[str, tuple[float, str]]:
        """[method]: seconds of a core for a photograph, and in words, the cheapest first; or infinity and why not."""
        first, found = boxed()["images"][0], self.known
        for name in (*QUICK, *BRISK, *SLOW):
            if name in found or self.finished:
                continue
            try:
                tool: Any = METHODS[name](model)
                shown = BOXES / "images" / first["file_name"], first["imagenet_label"]
                found[name] = price(partial(tool.explain, *shown), PRICED)  # as it comes
            except CamscopeError as error:
                found[name] = float("inf"), _reason(error)
            self.note(found)
            print(f"{self.name}: {name}: {found[name][1]}", flush=True)
        return dict(sorted(found.items(), key=lambda one: one[1][0]))

    @property
    def known(self) -> dict[str, tuple[float, str]]:
        """The prices so far."""
        kept = self.file.with_suffix(".json")
        found = json.loads(kept.read_bytes()) if kept.exists() else {}
        return {name: (float("inf") if seconds is None else seconds, words) for name, (seconds, words) in found.items()}

    def note(self, found: Mapping[str, tuple[float, str]]) -> None:
        """Keep the prices; one without end is no number in JSON."""
        plain = {name: (seconds if isfinite(seconds) else None, words) for name, (seconds, words) in found.items()}
        self.file.with_suffix(".json").write_text(json.dumps(plain, indent=0, allow_nan=False) + "\n")

    def values(self, tools: Sequence[Explainer], file: str, numbers: Sequence[int], place: Path) -> Any:
        """The measured table of some methods on some photographs, whose rows are numbered as in the whole list."""
        print(f"{self.name}: {', '.join(tool.composed_name for tool in tools)}", flush=True)
        begin, chunk = time.process_time(), CHUNK if len(tools) == 1 else 2 * CHUNK
        made = run_batch(
            tools,
            listed(self.folder / file, numbers),
            place / "run",
            options=BatchOptions(chunk_size=chunk),
            root="",
            batch_size=4,
        )
        if made.n_processed and len(tools) == 1:
            spent = (time.process_time() - begin) / made.n_processed
            self.note({**self.known, tools[0].name: (spent, f"{spent:.2f}")})
        table = evaluate(place / "run", place / "measures", BOXES / "annotations.json", categories="all").table()
        rows = [numbers[row] for row in table["row"].to_pylist()]
        return table.set_column(table.column_names.index("row"), "row", [rows])


def _reason(error: Exception) -> str:
    """The beginning of what it says, without a bracket that stays open."""
    words = str(error).partition(":")[0].partition(";")[0]
    return words.rpartition(" (")[0] if words.count("(") > words.count(")") else words


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaderboard", description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
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
            results[name] = Board(name, folder, options.finished).results()
        if set(results) == set(MODELS):
            PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
