"""Findings: what is known of methods and layers over the images of a run.

Names of methods in a comparison, as short as they can be and still tell one from the other.
"""

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


@dataclass(frozen=True, eq=False)
class MethodComparisonData:
    """Methods and layers of a run, over its images. `summaries`: [metric], the best first, controls among them.

    `names`: of each method, by name, layer, settings and whether it is a control; the layer only where a method has several.
    `seconds_per_image`: of each, an image. `ground_truth`: where it is known to be, for the figure.
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
        """The name of a line's method."""
        return self.names[(summary.method, summary.layer, summary.parameters), summary.is_control]

    @property
    def method_names(self) -> list[str]:
        """Their names, in the run's order."""
        return [self.names[key, False] for key in self.agreement.keys]

    @property
    def title(self) -> str:
        """What all have in common: the model, the layer where there is one of them, how many images."""
        layers = {key[1] for key in self.agreement.keys} - {None}
        model, layer = self.run.run_info["run_config"]["model"]["source"], layers.pop() if len(layers) == 1 else None
        return " · ".join(filter(None, (Path(model).name, layer, plural(self.n_images, "image"))))

    def compute_correlation_matrix(self) -> FloatArray:
        """(M,M): the mean Spearman correlation of the methods' maps, in the order of `method_names`; NaN where there is none."""
        count = len(self.agreement.keys)
        made = np.eye(count)
        for i in range(count):
            for j in range(i + 1, count):
                one = self.agreement.estimates.get((i, j))
                made[i, j] = made[j, i] = np.nan if one is None else one.mean
        return made


def name_methods(
    run: BatchRun, keys: Sequence[MethodKey], summaries: Sequence[MethodSummary]
) -> dict[tuple[MethodKey, bool], str]:
    """[method, whether it is a control]: `gradcam`, or `gradcam · layer4` where it has several layers, and settings that differ.

    `keys`: methods with a map; `summaries`: what metrics say, also of controls, and of methods without any map.
    """
    every = list(dict.fromkeys([*((key, False) for key in keys), *map(_get_summary_key, summaries)]))
    methods = {
        key: _name_method(key, run, [other for other, kind in every if not kind]) for key, kind in every if not kind
    }
    taken = set(methods.values())
    return {
        (key, kind): methods[key] if not kind else f"{key[0]} (control)" if key[0] in taken else key[0]
        for key, kind in every
    }


def _get_summary_key(summary: MethodSummary) -> tuple[MethodKey, bool]:
    return (summary.method, summary.layer, summary.parameters), summary.is_control


def _name_method(key: MethodKey, run: BatchRun, keys: Sequence[MethodKey]) -> str:
    method, layer, _ = key
    alike = [other for other in keys if other[0] == method]
    layers = Counter(other[1] for other in alike)
    parts = [method, layer if len(layers) > 1 and layer is not None else ""]
    if layers[layer] > 1:
        rivals = [_read_method_settings(run, other) for other in alike if other[1] == layer]
        parts.append(_format_differing_settings(_read_method_settings(run, key), rivals) or str(key[2]))
    return " · ".join(filter(None, parts))


def _read_method_settings(run: BatchRun, key: MethodKey) -> Mapping[str, object]:
    found: Mapping[str, object] = run.run_info["run_config"]["methods"].get(f"{key[0]} {key[2]}", {})
    return found


def _format_differing_settings(settings: Mapping[str, object], other_settings: Sequence[Mapping[str, object]]) -> str:
    return " ".join(
        f"{name}={value}" for name, value in settings.items() if any(r.get(name) != value for r in other_settings)
    )
