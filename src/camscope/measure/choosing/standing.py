"""Standing: a candidate in a race, and what is known of it so far; Sample: an image that it is judged by."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from camscope.errors import UndefinedError
from camscope.explainers import Explainer
from camscope.explainers.inputs import Item
from camscope.metrics import METRICS
from camscope.metrics.statistics import Estimate, estimated
from camscope.targets import Question

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
FAITHFULNESS, LOCALISATION, ROBUSTNESS = "lerf-morf-gap", "enrichment", "stability"
RACED = (FAITHFULNESS, LOCALISATION)  # what ranks candidates; the maps of what is not robust are out


@dataclass(frozen=True)
class Sample:
    """An image as the model takes it, what is asked of it, and on the input's plane where the evidence is, if that is known."""

    item: Item
    target: Question = None
    mask: Mask | None = None
    group: Hashable = None  # a patient, a scene; None: nobody else's


@dataclass
class Standing:
    """A candidate's evidence so far. `values`: [criterion] of each image, NaN where there is no number.

    `groups`: of all images of the race, in its order; images of one are no independent witnesses. None: each is its own.
    `first`: its maps (N,*S) of the first images, by which those that are the same are told.
    """

    tool: Explainer
    values: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    images: int = 0
    out: str = ""  # why it is out of the race
    groups: Sequence[Hashable] | None = None
    first: list[Floats] = field(default_factory=list, repr=False)

    @property
    def title(self) -> str:
        """`gradcam · layer4`"""
        layer = getattr(self.tool, "layer", None)
        return " · ".join(filter(None, (self.tool.title, layer if isinstance(layer, str) else None)))

    @property
    def price(self) -> float:
        """Seconds an image."""
        return self.seconds / max(1, self.images)

    def estimate(self, criterion: str) -> Estimate | None:
        """The mean of a criterion over the images that it saw."""
        try:
            values = self.values[criterion]
            groups = None if self.groups is None else self.groups[: len(values)]
            return estimated(values, groups, bounds=METRICS[criterion].bounds)
        except UndefinedError:
            return None


# of each criterion that ranks, the values of all candidates on the first images where it has any, in order
Reference = dict[str, Floats]


def reference(standings: Sequence[Standing]) -> Reference:
    """What all candidates made of the images that all of them saw: by it a value is called high or low from then on."""
    names = [name for name in RACED if name in standings[0].values]
    every = {name: np.concatenate([np.asarray(one.values[name], np.float64) for one in standings]) for name in names}
    return {name: np.sort(values[~np.isnan(values)]) for name, values in every.items()}


def quality(racing: Sequence[Standing], known: Reference) -> Floats:
    """[candidate, image]: the share of the reference's values that its own exceeds (equal ones count half), 0..1.

    Values that differ by no more than the criterion's precision are equal. The mean over criteria; 0 where it has no number
    and another candidate has one. It does not depend on who else is left.
    """
    shares = []
    for name, values in known.items():
        own = np.array([one.values[name] for one in racing], np.float64)
        rounding = METRICS[name].precision
        below = np.searchsorted(values, own - rounding, "left") + np.searchsorted(values, own + rounding, "right")
        found = np.where(np.isnan(own), 0.0, below / (2 * max(1, len(values))))
        found[:, np.isnan(own).all(0)] = np.nan
        shares.append(found)
    counts = (~np.isnan(shares)).sum(0)
    return np.asarray(np.nansum(shares, 0) / np.maximum(counts, 1), np.float64)
