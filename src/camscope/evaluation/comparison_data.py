"""Findings: what is known of methods and layers over the images of a run.

Names of methods in a comparison, as short as they can be and still tell one from the other.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from camscope.batch import Run
from camscope.evaluation.ground_truth import Evidence
from camscope.evaluation.map_agreement import Agreement, Key
from camscope.evaluation.metric_evaluation import Measures
from camscope.evaluation.summary import Line
from camscope.metrics.base import Floats
from camscope.plurals import plural


@dataclass(frozen=True, eq=False)
class Findings:
    """Methods and layers of a run, over its images. `lines`: [metric], the best first, controls among them.

    `names`: of each method, by name, layer, settings and whether it is a control; the layer only where a method has several.
    `seconds`: of each, an image. `evidence`: where it is known to be, for the figure.
    """

    run: Run = field(repr=False)
    measures: Measures = field(repr=False)
    lines: Mapping[str, Sequence[Line]] = field(repr=False)
    agreement: Agreement = field(repr=False)
    names: Mapping[tuple[Key, bool], str]
    seconds: Mapping[Key, float]
    images: int
    evidence: Evidence | None = field(default=None, repr=False)

    def name(self, line: Line) -> str:
        """The name of a line's method."""
        return self.names[(line.method, line.layer, line.parameters), line.control]

    @property
    def methods(self) -> list[str]:
        """Their names, in the run's order."""
        return [self.names[key, False] for key in self.agreement.keys]

    @property
    def title(self) -> str:
        """What all have in common: the model, the layer where there is one of them, how many images."""
        layers = {key[1] for key in self.agreement.keys} - {None}
        model, layer = self.run.facts["made_with"]["model"]["source"], layers.pop() if len(layers) == 1 else None
        return " · ".join(filter(None, (Path(model).name, layer, plural(self.images, "image"))))

    def correlations(self) -> Floats:
        """(M,M): the mean Spearman correlation of the methods' maps, in the order of `methods`; NaN where there is none."""
        count = len(self.agreement.keys)
        made = np.eye(count)
        for i in range(count):
            for j in range(i + 1, count):
                one = self.agreement.estimates.get((i, j))
                made[i, j] = made[j, i] = np.nan if one is None else one.mean
        return made


def named(run: Run, keys: Sequence[Key], lines: Sequence[Line]) -> dict[tuple[Key, bool], str]:
    """[method, whether it is a control]: `gradcam`, or `gradcam · layer4` where it has several layers, and settings that differ.

    `keys`: methods with a map; `lines`: what metrics say, also of controls, and of methods without any map.
    """
    every = list(dict.fromkeys([*((key, False) for key in keys), *map(_key, lines)]))
    methods = {key: _named(key, run, [other for other, kind in every if not kind]) for key, kind in every if not kind}
    taken = set(methods.values())
    return {
        (key, kind): methods[key] if not kind else f"{key[0]} (control)" if key[0] in taken else key[0]
        for key, kind in every
    }


def _key(line: Line) -> tuple[Key, bool]:
    return (line.method, line.layer, line.parameters), line.control


def _named(key: Key, run: Run, keys: Sequence[Key]) -> str:
    method, layer, _ = key
    alike = [other for other in keys if other[0] == method]
    layers = Counter(other[1] for other in alike)
    parts = [method, layer if len(layers) > 1 and layer is not None else ""]
    if layers[layer] > 1:
        rivals = [_settings(run, other) for other in alike if other[1] == layer]
        parts.append(_differing(_settings(run, key), rivals) or str(key[2]))
    return " · ".join(filter(None, parts))


def _settings(run: Run, key: Key) -> Mapping[str, object]:
    found: Mapping[str, object] = run.facts["made_with"]["methods"].get(f"{key[0]} {key[2]}", {})
    return found


def _differing(own: Mapping[str, object], all_of_them: Sequence[Mapping[str, object]]) -> str:
    return " ".join(f"{name}={value}" for name, value in own.items() if any(r.get(name) != value for r in all_of_them))
