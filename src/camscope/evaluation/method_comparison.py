"""Comparison of attribution methods and layers over the images of a run: metrics, and the agreement of their maps."""

import html
import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from camscope import render
from camscope.batch import BatchRun
from camscope.errors import OutputError
from camscope.evaluation.comparison_statements import iter_statements
from camscope.evaluation.ground_truth import GroundTruth
from camscope.evaluation.map_agreement import METHOD_KEY_COLUMNS, MapAgreement, MethodKey, compute_agreement
from camscope.evaluation.metric_evaluation import DEFAULT_N_STEPS, EvaluationResult, evaluate, resolve_ground_truth
from camscope.evaluation.metric_plots import FIGURE_FORMATS
from camscope.evaluation.summary import MethodSummary, check_column, check_some_ground_truth, summarize_values
from camscope.explainers import Explainer
from camscope.metrics import METRICS
from camscope.metrics.base import FloatArray
from camscope.metrics.imputation import DEFAULT_IMPUTATIONS
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.safe_files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_METRICS = (
    "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance", "deletion", "insertion",
    "lerf-morf-gap", "average-drop", "sparseness", "effective-area",
)  # fmt: skip
ESTIMATE_COLUMNS = ("mean", "low", "high", "n_values", "n_groups", "n_undefined")
DIFFERENCE_COLUMNS = {"": "mean", "_low": "low", "_high": "high", "_p_value": "p_value"}


@dataclass(frozen=True, eq=False)
class ComparisonResult:
    """The comparison of the methods of a run over its images, as numbers, sentences and a figure.

    Attributes:
        run: The run.
        evaluation: The values.
        summaries: The summaries of each metric, the best first, including controls.
        agreement: The agreement of the maps.
        names: The display name of each method key and whether it is a control.
        seconds_per_image: The seconds per image of each method.
        n_images: The number of images.
        ground_truth: The annotations, for the figure.

    """

    run: BatchRun = field(repr=False)
    evaluation: EvaluationResult = field(repr=False)
    summaries: Mapping[str, Sequence[MethodSummary]] = field(repr=False)
    agreement: MapAgreement = field(repr=False)
    names: Mapping[tuple[MethodKey, bool], str]
    seconds_per_image: Mapping[MethodKey, float]
    n_images: int
    ground_truth: GroundTruth | None = field(default=None, repr=False)

    def get_name(self, summary: MethodSummary) -> str:
        """Return the display name of a summary's method."""
        return self.names[summary.key, summary.is_control]

    @property
    def method_names(self) -> list[str]:
        """The display names in the run's order."""
        return [self.names[key, False] for key in self.agreement.keys]

    @property
    def title(self) -> str:
        """The model, the layer if there is only one, and the number of images."""
        layers = {key[1] for key in self.agreement.keys} - {None}
        model, layer = self.run.run_info["run_config"]["model"]["source"], layers.pop() if len(layers) == 1 else None
        return " · ".join(filter(None, (Path(model).name, layer, plural(self.n_images, "image"))))

    def compute_correlation_matrix(self) -> FloatArray:
        """Return the mean Spearman correlations (M,M) of the methods' maps, in the order of `method_names`; NaN if undefined."""
        matrix = np.full((len(self.agreement.keys),) * 2, np.nan)
        np.fill_diagonal(matrix, 1)
        for (i, j), estimate in self.agreement.estimates.items():
            matrix[i, j] = matrix[j, i] = estimate.mean
        return matrix

    @cached_property
    def statements(self) -> tuple[str, ...]:
        """Which methods differ and which do not, as sentences."""
        return tuple(iter_statements(self.summaries, self.agreement, self.names))

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict for each metric and method: mean, interval, and the paired differences.

        `difference_to_best` is corrected for all pairs of methods and all metrics. `difference_to_control`, the difference to
        the best control, is corrected for all methods and metrics. Both are signed so that higher is better.
        """
        return [self._build_record(metric, summary) for metric, group in self.summaries.items() for summary in group]

    def _build_record(self, metric: str, summary: MethodSummary) -> dict[str, Any]:
        record: dict[str, Any] = {"metric": metric, "name": self.get_name(summary)}
        record |= dict(zip(METHOD_KEY_COLUMNS, summary.key, strict=True)) | {"is_control": summary.is_control}
        record |= {column: getattr(summary.estimate, column, None) for column in ESTIMATE_COLUMNS}
        for name in ("difference_to_best", "difference_to_control"):
            difference = getattr(summary, name)
            record |= {f"{name}{suffix}": getattr(difference, f, None) for suffix, f in DIFFERENCE_COLUMNS.items()}
        return record | {"seconds_per_image": self.seconds_per_image.get(summary.key)}

    def figure(self, *, n_examples: int | None = None, seed: int = 0) -> "Figure":
        """Draw intervals of every metric, the agreement of the maps and example images, as a matplotlib figure.

        Args:
            n_examples: Number of images. Default: as many as fit.
            seed: Seed by which the images are chosen.

        Returns:
            The figure.

        """
        from camscope.evaluation.comparison_figure import draw_comparison_figure

        figure: Figure = draw_comparison_figure(self, n_examples, seed)
        return figure

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure as `.png`, `.svg` or `.pdf`."""
        suffix = Path(path).suffix.lower()
        if suffix not in FIGURE_FORMATS:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'}; use {', '.join(FIGURE_FORMATS)}"
            )
        return write_bytes(path, self._encode_figure(suffix), overwrite=overwrite)

    def _encode_figure(self, suffix: str) -> bytes:
        stream = io.BytesIO()
        self.figure().savefig(stream, format=suffix[1:], dpi=120)
        return stream.getvalue()

    def _repr_html_(self) -> str:
        from PIL import Image

        image, title = Image.open(io.BytesIO(self._encode_figure(".png"))).convert("RGB"), html.escape(self.title)
        items = "".join(f"<li>{html.escape(statement)}</li>" for statement in self.statements)
        return render.build_figure_html(np.asarray(image), title, f"{title}<ul>{items}</ul>")


def compare_methods(
    run: BatchRun | str | os.PathLike[str],
    output: str | os.PathLike[str],
    masks: GroundTruth | str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
    *,
    model: nn.Module | None = None,
    preprocess: Any = None,
    explainers: Sequence[Explainer] = (),
    imputations: Sequence[str] = DEFAULT_IMPUTATIONS,
    n_steps: int = DEFAULT_N_STEPS,
    categories: Sequence[str] = (),
    group_column: str | None = None,
    allow_outside_root: bool = False,
    num_threads: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ComparisonResult:
    """Compare the methods and layers of a run over its images.

    The values of each image are written to `output` as `evaluate` writes them, the agreement of the maps to its subfolder
    `agreement`. A comparison that was interrupted resumes.

    Args:
        run: The run, or its folder.
        output: The folder for the values.
        masks: The ground truth; see `evaluate`.
        metrics: Names of metrics. Default: all that need no further input.
        model: The model of the run; see `evaluate`.
        preprocess: The preprocessing of the run; see `evaluate`.
        explainers: Explainers of the run; see `evaluate`.
        imputations: See `evaluate`.
        n_steps: See `evaluate`.
        categories: See `evaluate`.
        group_column: A column of the manifest, such as the patient; intervals resample its groups as a whole.
        allow_outside_root: See `evaluate`.
        num_threads: Threads that read images. Default: one for each core.
        overwrite: Whether to replace the values at `output`.
        on_progress: Called with the numbers of finished and of all steps.

    Returns:
        The comparison.

    Raises:
        InputError: A name, a column or the ground truth is unknown.

    """
    batch_run = run if isinstance(run, BatchRun) else BatchRun(run)
    ground_truth = resolve_ground_truth(masks, batch_run, categories, allow_outside_root=allow_outside_root)

    def report_half(half_index: int) -> Callable[[int, int], None] | None:  # metrics first, then agreement
        return on_progress and (lambda done, total: on_progress(half_index * total + done, 2 * total))

    evaluation = evaluate(
        batch_run,
        output,
        masks,
        metrics,
        model=model,
        preprocess=preprocess,
        explainers=explainers,
        imputations=imputations,
        n_steps=n_steps,
        categories=categories,
        allow_outside_root=allow_outside_root,
        num_threads=num_threads,
        overwrite=overwrite,
        on_progress=report_half(0),
    )
    table = evaluation.table()
    order = [METRICS.find(name).name for name in (DEFAULT_METRICS if metrics is None else metrics)]
    check_column(table, group_column)
    if ground_truth is not None:
        check_some_ground_truth(table)
    agreement = compute_agreement(
        batch_run,
        Path(output) / "agreement",
        None
        if group_column is None
        else dict(zip(*(table[n].to_pylist() for n in ("row", group_column)), strict=True)),
        num_threads=num_threads,
        overwrite=overwrite,
        on_progress=report_half(1),
    )
    summaries = summarize_values(table, group_column, metrics=order, equivalent_groups=agreement.equivalent_groups)
    ordered = dict(sorted(summaries.items(), key=lambda item: order.index(item[1][0].metric)))
    names = _name_methods(batch_run, agreement.keys, [summary for group in summaries.values() for summary in group])
    seconds, n_images = _compute_seconds_per_image(batch_run), len(table["row"].unique())
    return ComparisonResult(batch_run, evaluation, ordered, agreement, names, seconds, n_images, ground_truth)


def _name_methods(
    run: BatchRun, keys: Sequence[MethodKey], summaries: Sequence[MethodSummary]
) -> dict[tuple[MethodKey, bool], str]:
    """Return display names by method key and whether it is a control: `Grad-CAM`, or `Grad-CAM · layer4` with several layers.

    Settings are included where they differ. `keys` are the methods with a map; `summaries` also cover controls and methods
    without any map.
    """
    all_keys = dict.fromkeys([*((key, False) for key in keys), *((line.key, line.is_control) for line in summaries)])
    method_keys = [key for key, is_control in all_keys if not is_control]
    names = {key: _name_method(key, run, method_keys) for key in method_keys}
    taken = set(names.values())
    controls = {key: METHODS.display_name(key[0]) for key, is_control in all_keys if is_control}
    names_of_controls = {key: f"{name} (control)" if name in taken else name for key, name in controls.items()}
    return {(key, is_control): (names_of_controls if is_control else names)[key] for key, is_control in all_keys}


def _name_method(key: MethodKey, run: BatchRun, keys: Sequence[MethodKey]) -> str:
    method, layer, _ = key
    same_method = [other for other in keys if other[0] == method]
    layers = Counter(other[1] for other in same_method)
    parts = [METHODS.display_name(method), layer if len(layers) > 1 else ""]
    if layers[layer] > 1:
        all_settings = run.run_info["run_config"]["methods"]
        settings, *others = [
            all_settings.get(f"{method} {other[2]}", {})
            for other in [key, *(other for other in same_method if other[1] == layer)]
        ]
        different = [name for name in settings if any(other.get(name) != settings[name] for other in others)]
        parts.append(" ".join(f"{name}={settings[name]}" for name in different) or str(key[2]))
    return " · ".join(filter(None, parts))


def _compute_seconds_per_image(run: BatchRun) -> dict[MethodKey, float]:
    """Return the median seconds per image of each method; the first image is slow."""
    rows = run.table(columns=["row", *METHOD_KEY_COLUMNS, "seconds"]).to_pylist()
    seconds_by_method: dict[MethodKey, dict[int, float]] = {}
    for row in rows:
        if row["seconds"] is not None:
            by_row = seconds_by_method.setdefault((row["method"], row["layer"], row["parameters_digest"]), {})
            by_row[row["row"]] = by_row.get(row["row"], 0.0) + row["seconds"]
    return {key: float(np.median(list(by_row.values()))) for key, by_row in seconds_by_method.items()}
