"""Findings: what is known of methods and layers over the images of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from camscope.batch import Run
from camscope.measure.agreement import Agreement, Key
from camscope.measure.evidence import Evidence
from camscope.measure.run import Measures
from camscope.measure.summary import Line
from camscope.metrics.base import Floats
from camscope.wording import plural


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
