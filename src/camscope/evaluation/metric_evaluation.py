"""measure: metrics of every map of a run into one Parquet dataset in long form, restartable as the run itself."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from camscope.batch import Run
from camscope.batch.image_loading import expect_threads, in_order
from camscope.batch.query import Pieces, Query, images_of, open_maps, open_parts, read_rows
from camscope.batch.result_rows import table_of
from camscope.batch.run_store import Store
from camscope.errors import InputError
from camscope.evaluation.ground_truth import Column, Evidence, evidence_of
from camscope.evaluation.map_metrics import Measuring, Row, columns
from camscope.evaluation.model_based_metrics import Trials
from camscope.evaluation.run_replay import Again
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import expect_count
from camscope.explainers.core.keyword_arguments import with_our_names
from camscope.metrics import METRICS, Metric
from camscope.metrics.imputation import NAMES, USUAL
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa

ASKING = ("trial", "again", "explainer")  # what metrics need that ask the model
CHEAP = ("deletion", "insertion", "lerf-morf-gap", "aopc", "necessity", "sufficiency", "average-drop", "average-increase",
         "average-gain")  # fmt: skip
Images = Sequence[list[dict[str, Any]]]  # the rows of each
STEPS = 10  # the first six of them together then take 19 passes for each fill, and the last three one


@with_our_names
def measure(
    run: Run | str | os.PathLike[str],
    output: str | os.PathLike[str],
    masks: Evidence | str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
    *,
    model: nn.Module | None = None,
    preprocess: Any = None,
    tools: Sequence[Explainer] = (),
    fills: Sequence[str] = USUAL,
    steps: int = STEPS,
    region: int | None = None,
    batch_size: int = 16,
    categories: Sequence[str] = (),
    threads: int | None = None,
    anywhere: bool = False,
    overwrite: bool = False,
    strict: bool = True,
    told: Callable[[int, int], None] | None = None,
) -> "Measures":
    """Metrics of every map of `run`, into a Parquet dataset at `output`, a row for each map and metric.

    `masks`: a COCO file, a folder of mask pictures named as the images, or a column that the run carries, with a mask's path,
    boxes [[x, y, width, height]] or points [[x, y]]. `categories`: those of a COCO file, or labels of masks, that count; "all":
    every one. Several categories without a choice are a CategoryError. `metrics`: names in METRICS;
    default: all that need nothing else. Beside the methods stand maps that know nothing: `uniform`, `centre`, `edges`,
    `random`. Started again, it goes on where it was. `told`: called with how many images are done, of how many.

    `model`: the run's, with the same weights and the same `preprocess`; then metrics may ask it, by default the quick ones
    (`CHEAP`). `fills`, `steps`: see `Trial`; a metric that has a fill has a row for each. `region`: the side in pixels of what
    is removed at a time; None: a fourteenth of the input's shortest side. `batch_size`: images that share their passes, with
    all that is changed in them. `tools`: explainers of the run, for metrics that ask them again; what is not among them is
    made again from what the run says of it. `anywhere`: masks that a column or a COCO file names may lie outside the run's
    root, or the COCO file's folder. Not `strict`: an image whose mask cannot be read has no value, and the reason.
    """
    made = run if isinstance(run, Run) else Run(run)
    asked = chosen(metrics, masks is not None, model is not None)
    plain = Measuring(
        made,
        [one for one in asked if one.needs not in ASKING],
        evidence_for(masks, made, categories, anywhere=anywhere),
        strict,
    )
    trials = None
    if model is None and (tools or preprocess is not None):
        raise InputError("tools and preprocess are a model's: pass it as well (model=, or --model)")
    if model is not None:
        asking = [one for one in asked if one.needs in ASKING]
        again = Again.of(made, model, preprocess)
        trials = _trials(again, asking, tools, fills, steps, region, batch_size) if asking else None
    expect_threads(threads)
    store = Store(output)
    with store.begun(_facts(plain, asked, trials, masks), overwrite=overwrite):
        _write(plain, trials, store, threads or os.cpu_count() or 1, told)
    return Measures(output)


def chosen(names: Sequence[str] | None, masked: bool, model: bool = False) -> list[Metric]:
    """Metrics by name, or all that can be had and are quick; InputError for a name that is none."""
    if names is None:
        known = [one for one in METRICS.values() if one.needs == "map" or (one.needs == "mask" and masked)]
        return known + [METRICS[name] for name in CHEAP if model]
    if unknown := [name for name in names if name not in METRICS]:
        raise InputError(f"no metric {unknown[0]!r}; there are {', '.join(METRICS)}")
    found = [METRICS[name] for name in names]
    for one in found:
        if one.needs == "pair":
            raise InputError(f"{one.name} compares two maps: camscope.metrics has it for Python")
        if one.needs in ASKING and not model:
            raise InputError(f"{one.name} asks the model: pass the one that the run is of (model=, or --model)")
        if one.needs == "mask" and not masked:
            raise InputError(f"{one.name} needs to know where the evidence is: pass masks")
    return found


class Measures:
    """What `measure` wrote, in long form."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        facts = Store(folder).facts
        made = {} if facts is None else facts["made_with"]
        if facts is None or not isinstance(made, Mapping) or not isinstance(made.get("metrics"), list | Mapping):
            raise InputError(f"{folder}: no metrics of a run are here")
        self.facts: dict[str, Any] = facts

    @property
    def title(self) -> str:
        """Of which model and of how many images."""
        run = self.facts["made_with"]["run"]
        return f"{Path(run['model']['source']).name} · {plural(run['manifest']['rows'], 'image', spec=',')}"

    def table(self, where: str | None = None) -> "pa.Table":
        """row, id, method, layer, parameters, target, label, control, metric, fill, value, reason, and the manifest's columns
        but those that bear one of these names.

        `where`: DuckDB's SQL over them, as in `Run.query`.
        """
        store = Store(self.folder)
        parts = [str(store.path_of(chunk)) for chunk in sorted(store.finished())]
        rows = open_parts(parts)
        return read_rows(rows) if where is None else Pieces(rows).take(Query(where).places(rows))


def _write(
    plain: Measuring, trials: Trials | None, store: Store, threads: int, told: Callable[[int, int], None] | None
) -> None:
    """The parts that are not there yet."""
    parts, form = Store(plain.run.folder), columns(plain.run.dataset.schema)
    todo, there, done = sorted(parts.finished()), store.finished(), 0
    total = sum(_images(plain.run, chunk) for chunk in todo)
    for chunk in todo:
        rows = open_maps([str(parts.path_of(chunk))])
        each = list(_parts(plain.run, chunk, rows, None if trials is None else trials.batch_size))
        source = parts.digest_of(chunk)  # images that failed may have been tried again since
        valid = {n for n, _, _ in each if n in there and store.source_of(n) in (None, source)}
        whole = read_rows(rows) if len(valid) < len(each) else None
        for number, places, images in each:
            if number not in valid and whole is not None:
                found: list[Row] = []
                own = list(images_of(whole.slice(places.start, len(places))))
                for count, values in _values(plain, trials, own, threads):
                    found += values
                    done += count
                    if told is not None and count:
                        told(done, total)
                found.sort(key=lambda row: row["row"])  # those of one image together, whoever found them
                store.write(number, table_of(found, form), source)
            elif told is not None:
                told(done := done + images, total)


def _parts(run: Run, chunk: int, rows: Any, most: int | None) -> Iterator[tuple[int, range, int]]:
    """What is written at a time of a chunk of the run: its number, the places of its rows, and how many images they are of.

    `most`: images of a part, where the model is asked and each takes long; None: all of the chunk.
    """
    each, size = _images(run, chunk), int(run.facts["made_with"]["chunk"])
    images = np.asarray(read_rows(rows, ["row"])["row"])
    ends = [*np.flatnonzero(np.diff(images, prepend=-1)).tolist(), len(images)]  # of the rows of an image
    for n, first in enumerate(range(0, each, most or each)):
        last = min(first + (most or each), len(ends) - 1)
        yield chunk * -(-size // (most or size)) + n, range(ends[first], ends[last]), last - first


def _values(plain: Measuring, trials: Trials | None, images: Images, threads: int) -> Iterator[tuple[int, list[Row]]]:
    """Values, and how many images are done with them: at the last of what is asked of each."""
    if plain.metrics or trials is None:
        for values in in_order(plain.of_image, images, threads):
            yield int(trials is None), values
    if trials is not None:
        yield from trials.values(images, threads)


def _images(run: Run, chunk: int) -> int:
    manifest, size = run.facts["made_with"]["manifest"], run.facts["made_with"]["chunk"]
    return int(min(size, manifest["rows"] - chunk * size))


def evidence_for(
    masks: Evidence | str | os.PathLike[str] | None, run: Run, categories: Sequence[str], *, anywhere: bool = False
) -> Evidence | None:
    """What `masks` means for a run; InputError where masks of a column lead out of the root."""
    if masks is None or isinstance(masks, Evidence):
        return masks
    origin = run.origin
    names = run.dataset.schema.names if origin is None else origin.table.column_names
    places = run.locations if origin is None else origin.locations
    source = masks if isinstance(masks, str) else Path(masks)
    known = evidence_of(source, names, places, categories, anywhere=anywhere)
    if isinstance(known, Column):
        table = run.table([known.name]) if origin is None else origin.table
        known.expect_inside(table[known.name].to_pylist())
    return known


def _trials(
    again: Again,
    metrics: Sequence[Metric],
    tools: Sequence[Explainer],
    fills: Sequence[str],
    steps: int,
    region: int | None,
    batch_size: int,
) -> Trials:
    if isinstance(fills, str) or not fills or set(fills) - set(NAMES):
        raise InputError(f"fills={fills!r}: expected one or several of {', '.join(NAMES)}, as ('mean', 'blur')")
    expect_count(steps=steps, batch_size=batch_size)
    expect_count(None, region=region)
    explained = any(one.needs != "trial" for one in metrics)
    made = again.explainers(tools) if explained else {}
    return Trials(again, metrics, made, list(dict.fromkeys(fills)), steps, region, batch_size)


def _facts(plain: Measuring, metrics: Sequence[Metric], trials: Trials | None, masks: Any) -> Mapping[str, Any]:
    named = isinstance(masks, str | os.PathLike) and not plain.run.private
    source = str(masks) if named else type(plain.evidence).__name__
    made = {
        "run": plain.run.facts["made_with"],
        "metrics": [one.name for one in metrics],
        "masks": None if plain.evidence is None else f"{source} {plain.evidence.digest}",
        "categories": [] if plain.evidence is None else list(plain.evidence.categories),
    }
    if trials is not None:
        made |= {"fills": trials.fills, "steps": trials.steps, "region": trials.region, "batch": trials.batch_size}
        made["parts"] = "by batch"  # once they were the run's, under the same numbers
    said = {} if plain.evidence is None else {"evidence": str(plain.evidence)}
    return {"made_with": made, "versions": plain.run.facts["versions"], **said}
