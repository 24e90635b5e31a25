"""`read_run_images`: the images of a run with their rows and answers. `match_images`: pair the images of two runs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from camscope.batch import BatchRun
from camscope.batch.result_rows import FAILED

TOP_CLASS = "top class"  # the target of a map for which no class was chosen
LIGHT_COLUMNS = (
    "row", "id", "sha256", "status", "target", "label", "probability", "method", "layer", "parameters_digest",
)  # fmt: skip
Row = dict[str, Any]


class MapKey(NamedTuple):
    """What identifies a map of an image: its method, layer and settings, and its target."""

    method: str
    layer: str | None
    parameters_digest: str | None
    target: str


@dataclass
class RunImage:
    """An image of a run, with its rows by map, and the answer of the model."""

    id: str
    digest: str | None
    rows: dict[MapKey, Row] = field(default_factory=dict)

    @property
    def answer(self) -> Row | None:
        """The row of a map of the predicted class, or None."""
        rows = (row for key, row in self.rows.items() if key.target == TOP_CLASS and row["status"] != FAILED)
        return next(rows, None)

    @property
    def status(self) -> str:
        """The status of all maps, such as `ok` or `ok, no_positive_evidence`."""
        return ", ".join(sorted({row["status"] for row in self.rows.values()}))


@dataclass
class RunImages:
    """The images of a run, and whether the run has the predicted class of each."""

    images: list[RunImage]
    has_answers: bool
    method_keys: list[MapKey]


def read_run_images(run: BatchRun) -> RunImages:
    """Read all rows of a run without their maps. Each row gets its position in the run."""
    table = run.table(list(LIGHT_COLUMNS))
    rows = [{**row, "position": position} for position, row in enumerate(table.to_pylist())]
    run_targets: Sequence[str | None] = run.run_info["run_config"]["targets"]
    has_given_targets = bool(run.run_info.get("images_have_targets"))
    groups = [list(group) for _, group in groupby(rows, lambda row: row["row"])]
    # a row that failed has no layer and no settings: those of its place among the rows of another image
    keys_of_places: dict[int, tuple[str | None, str | None]] = {}
    for group in groups:
        for place, row in enumerate(group):
            if row["status"] != FAILED:
                keys_of_places.setdefault(place, (row["layer"], row["parameters_digest"]))
    images = []
    for group in groups:
        image = RunImage(group[0]["id"], group[0]["sha256"])
        n_methods = max(1, len(group) // max(1, len(run_targets)))
        for place, row in enumerate(group):
            target = row["target"] or ""
            if not has_given_targets:
                requested = run_targets[min(place // n_methods, len(run_targets) - 1)]
                target = TOP_CLASS if requested is None else requested
            key = MapKey(row["method"], *keys_of_places.get(place, (None, None)), target)
            image.rows[key] = row
        images.append(image)
    keys = list(dict.fromkeys(key for image in images for key in image.rows))
    return RunImages(images, None in run_targets and not has_given_targets, keys)


@dataclass
class MatchedImages:
    """The images of two runs: pairs, those that only one run has, and those whose file has changed."""

    pairs: list[tuple[RunImage, RunImage]]
    only_first: list[str]
    only_second: list[str]
    changed_files: list[str]


def match_images(first: Sequence[RunImage], second: Sequence[RunImage]) -> MatchedImages:
    """Pair images by id, and those without a partner by the digest of their file.

    Images with the same id and another digest are different files: they are listed and not compared. Copies of one file
    with other ids are paired in the order of the runs.
    """
    by_id = {image.id: image for image in second}
    pairs, unmatched, changed_files = [], [], []
    for image in first:
        partner = by_id.get(image.id)
        if partner is None:
            unmatched.append(image)
        elif image.digest and partner.digest and image.digest != partner.digest:
            changed_files.append(image.id)
        else:
            pairs.append((image, partner))
    used = {partner.id for _, partner in pairs} | set(changed_files)
    unmatched_by_digest = defaultdict[str, list[RunImage]](list)
    for image in second:
        if image.id not in used and image.digest:
            unmatched_by_digest[image.digest].append(image)
    copies = {digest: iter(images) for digest, images in unmatched_by_digest.items()}
    only_first = []
    for image in unmatched:
        partner = next(copies.get(image.digest or "", iter(())), None)
        if partner is None:
            only_first.append(image.id)
        else:
            pairs.append((image, partner))
            used.add(partner.id)
    only_second = [image.id for image in second if image.id not in used]
    return MatchedImages(pairs, only_first, only_second, changed_files)
