"""The data of a comparison, and short display names that tell its methods apart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from camscope.batch import BatchRun
from camscope.evaluation.ground_truth import GroundTruth
from camscope.evaluation.map_agreement import MapAgreement, MethodKey
from camscope.evaluation.metric_evaluation import EvaluationResult
from camscope.evaluation.summary import MethodSummary
from camscope.metrics.base import FloatArray
from camscope.plurals import plural
from camscope.registry import METHODS


@dataclass(frozen=True, eq=False)
class MethodComparisonData:
    """The values and the agreement of the methods of a run over its images.

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
        count = len(self.agreement.keys)
        matrix = np.eye(count)
        for i in range(count):
            for j in range(i + 1, count):
                estimate = self.agreement.estimates.get((i, j))
                matrix[i, j] = matrix[j, i] = np.nan if estimate is None else estimate.mean
        return matrix


def name_methods(
    run: BatchRun, keys: Sequence[MethodKey], summaries: Sequence[MethodSummary]
) -> dict[tuple[MethodKey, bool], str]:
    """Return display names by method key and whether it is a control: `Grad-CAM`, or `Grad-CAM · layer4` with several layers.

    Settings are included where they differ. `keys` are the methods with a map; `summaries` also cover controls and methods
    without any map.
    """
    all_keys = list(dict.fromkeys([*((key, False) for key in keys), *map(_get_summary_key, summaries)]))
    method_keys = [key for key, is_control in all_keys if not is_control]
    names = {key: _name_method(key, run, method_keys) for key in method_keys}
    taken = set(names.values())
    controls = {key: METHODS.display_name(key[0]) for key, is_control in all_keys if is_control}
    names_of_controls = {key: f"{name} (control)" if name in taken else name for key, name in controls.items()}
    return {(key, is_control): (names_of_controls if is_control else names)[key] for key, is_control in all_keys}


def _get_summary_key(summary: MethodSummary) -> tuple[MethodKey, bool]:
    return summary.key, summary.is_control


def _name_method(key: MethodKey, run: BatchRun, keys: Sequence[MethodKey]) -> str:
    method, layer, _ = key
    same_method = [other for other in keys if other[0] == method]
    layers = Counter(other[1] for other in same_method)
    parts = [METHODS.display_name(method), layer if len(layers) > 1 and layer is not None else ""]
    if layers[layer] > 1:
        other_settings = [_read_method_settings(run, other) for other in same_method if other[1] == layer]
        parts.append(_format_differing_settings(_read_method_settings(run, key), other_settings) or str(key[2]))
    return " · ".join(filter(None, parts))


def _read_method_settings(run: BatchRun, key: MethodKey) -> Mapping[str, object]:
    settings: Mapping[str, object] = run.run_info["run_config"]["methods"].get(f"{key[0]} {key[2]}", {})
    return settings


def _format_differing_settings(settings: Mapping[str, object], other_settings: Sequence[Mapping[str, object]]) -> str:
    return " ".join(
        f"{name}={value}"
        for name, value in settings.items()
        if any(other.get(name) != value for other in other_settings)
    )
