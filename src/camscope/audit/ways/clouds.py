"""A cloud of points: the parts into which it falls, how far these are apart, and how alike those of most of it are."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from camscope.audit.learning import sklearn
from camscope.audit.ways.spectral import Numbers, distances, parted, spectrum
from camscope.metrics.base import Floats

KEPT = 0.8  # of the patients, in each draw
DIGITS = 9  # of eigenvalues: what comes after is rounding, and other threads round otherwise
LEADING = 0.99  # of the variance, in the components of a reference


@dataclass(frozen=True, eq=False)
class Cloud:
    """N points, by how far `apart` (N,N) they are, of patients (N,), cut into each of `ks` parts."""

    apart: Floats
    patient: Numbers
    ks: tuple[int, ...]
    neighbours: int
    shown: int = 0

    @cached_property
    def spectrum(self) -> tuple[Floats, Floats]:
        """Eigenvalues and vectors of its graph: one more than there are parts, `shown` or more."""
        return spectrum(self.apart, self.patient, self.neighbours, max(self.ks[-1] + 1, self.shown))

    @cached_property
    def parts(self) -> dict[int, Numbers]:
        """Of each k: (N,) 0..k-1."""
        return {k: parted(self.spectrum[1], k) for k in self.ks}

    @cached_property
    def gaps(self) -> dict[int, float]:
        """Of each k: 1 - λ_k / λ_k+1, 1 where the graph falls into k parts and no more, 0 where it falls into more."""
        least = len(self.apart) * np.finfo(np.float64).eps  # what is 0 but for rounding
        values = np.where(self.spectrum[0] > least, self.spectrum[0], 0)
        gaps = {k: float(1 - values[k - 1] / values[k]) if values[k] > 0 else 0.0 for k in self.ks}
        return {k: round(gap, DIGITS) for k, gap in gaps.items()}

    def stability(self, draws: int, random: np.random.Generator) -> dict[int, float]:
        """Of each k: the mean adjusted Rand index with the parts of four fifths of the patients, drawn so often."""
        alike = np.array([self._alike(random) for _ in range(draws)]).mean(0)
        return dict(zip(self.ks, alike.tolist(), strict=True))

    def _alike(self, random: np.random.Generator) -> list[float]:
        patients = np.unique(self.patient)
        kept = random.permutation(patients)[: round(KEPT * len(patients))]
        rows = np.flatnonzero(np.isin(self.patient, kept))
        some = Cloud(self.apart[np.ix_(rows, rows)], self.patient[rows], self.ks, self.neighbours)
        index = sklearn("metrics").adjusted_rand_score
        return [float(index(self.parts[k][rows], some.parts[k])) for k in self.ks]


def reference(points: Floats, random: np.random.Generator) -> Floats:
    """(N,d) -> (N,c): as many points of one Gaussian, along the leading components with the points' own variances.

    After John et al. 2020, doi:10.1038/s41598-020-58766-1: how stable cuts are hangs on the shape of a cloud, too; one that
    is long is cut across its middle every time.
    """
    sizes = np.linalg.svd(points - points.mean(0), compute_uv=False)
    shares = np.cumsum(sizes**2)
    leading = sizes[: int(np.searchsorted(shares, LEADING * shares[-1])) + 1]
    return np.asarray(random.normal(size=(len(points), len(leading))) * leading / np.sqrt(len(points)))


def cloud_of(points: Floats, patient: Numbers, ks: tuple[int, ...], neighbours: int, shown: int = 0) -> Cloud:
    """(N,d), (N,) -> their cloud."""
    return Cloud(distances(points), patient, ks, neighbours, shown)
