"""Convert rows of a run to samples of FiftyOne, with classes and heatmaps as fields. No database is needed."""

import itertools
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from camscope.batch.sql_query import table_to_dicts
from camscope.errors import InputError

if TYPE_CHECKING:
    from camscope.batch.run_reader import RunReader


def build_samples(
    run: "RunReader", where: str | None = None, sort: str | None = None, max_rows: int | None = None
) -> list[Any]:
    """Build one `fiftyone.Sample` for each image of the selected rows (see `BatchRun.to_fiftyone`)."""
    try:
        fiftyone = import_module("fiftyone")
    except ImportError as error:
        raise InputError("fiftyone is not installed; run: pip install fiftyone") from error
    rows = table_to_dicts(run.query(where, sort, max_rows))
    samples: dict[int, Any] = {}
    for row, name in zip(rows, _name_heatmaps(rows), strict=True):
        sample = samples.get(row["row"])
        if sample is None:
            sample = samples[row["row"]] = fiftyone.Sample(filepath=_get_file_path(run, row))
            sample["camscope_id"], sample["status"] = row["id"], row["status"]
        if row["attribution"] is not None:
            heatmap = run.explanation(row).heatmap("image")
            sample[name] = fiftyone.Heatmap(map=heatmap, range=[min(0.0, float(heatmap.min())), 1.0])
            sample[f"{name}_class"] = fiftyone.Classification(label=row["label"], confidence=row["probability"])
        if row["status"] != "ok":
            sample["status"] = row["status"]
    return list(samples.values())


def _name_heatmaps(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the name of the heatmap field of each row: the method, and the class if an image has several of its maps.

    A number makes names unique that would still be equal, such as those of several layers.
    """
    counts = Counter((row["row"], row["method"]) for row in rows)
    names, used = list[str](), set[tuple[int, str]]()
    for row in rows:
        has_several = counts[row["row"], row["method"]] > 1
        base = _to_field_name("_".join([row["method"], str(row["label"])] if has_several else [row["method"]]))
        number = next(n for n in itertools.count(1) if (row["row"], _add_number(base, n)) not in used)
        names.append(_add_number(base, number))
        used.add((row["row"], names[-1]))
    return names


def _add_number(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"


def _to_field_name(text: str) -> str:
    """Convert text to letters, digits and underscores."""
    return "".join(character if character.isalnum() else "_" for character in text.replace("+", "plus"))


def _get_file_path(run: "RunReader", row: dict[str, Any]) -> str:
    """Return the location of the image of a row. Raise an InputError if the run does not name it."""
    if run.is_pseudonymized or row["path"] is None:
        raise InputError(
            "the run does not name its image files, which FiftyOne needs; make the run of image files, with "
            "--profile clinical if they are scans"
        )
    return run.path_resolver.resolve(row["path"])
