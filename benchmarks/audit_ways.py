"""`python -m benchmarks.audit_ways`: among how many maps are two ways of looking that were planted found?

Maps of four kinds, each of its own patient, of which a share shows heat at another place than the rest: a corner against the
middle on a grid of 8 cells under noise ("coarse", and "faint" where some are weaker than the noise), a corner against
anywhere in two lungs ("wander"), low against high ("halves"), both on a grid of 16 cells.
--draws N (15); --maps N ... and --shares S ... for others than those of the docs.
"""

import argparse
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from camscope.audit.clustering.map_clustering import cluster_maps

Floats = npt.NDArray[np.float64]
Random = np.random.Generator
NOISE = 0.05


def coarse(random: Random, rare: npt.NDArray[np.bool_], least: float = 0.5, most: float = 2.0) -> Floats:
    """(N,) -> (N,8,8): a square of 2 x 2 cells."""
    heat = np.abs(random.normal(size=(len(rare), 8, 8))) * NOISE
    for one, own in zip(heat, rare, strict=True):
        y, x = (1, 1) if own else random.integers(3, 6, 2)
        one[y : y + 2, x : x + 2] += random.uniform(least, most)
    return heat


def faint(random: Random, rare: npt.NDArray[np.bool_]) -> Floats:
    """(N,) -> (N,8,8): the same, of which the weakest are half noise."""
    return coarse(random, rare, 0.3, 3.0)


def wander(random: Random, rare: npt.NDArray[np.bool_]) -> Floats:
    """(N,) -> (N,16,16): a corner, or anywhere in either of two ellipses."""
    count = len(rare)
    angle, out, side = random.uniform(0, 2 * np.pi, count), np.sqrt(random.random(count)), random.choice([-1, 1], count)
    lungs = np.stack([26 + 14 * out * np.sin(angle), 24 + side * 10 + 6 * out * np.cos(angle)], 1)
    return _blobs(random, np.where(rare[:, None], random.uniform(4, 6, (count, 2)), lungs))


def halves(random: Random, rare: npt.NDArray[np.bool_]) -> Floats:
    """(N,) -> (N,16,16): low, or high."""
    count = len(rare)
    middles = np.where(rare, random.normal(40, 2, count), random.normal(20, 3, count))
    return _blobs(random, np.stack([middles, random.normal(24, 4, count)], 1))


KINDS: Mapping[str, Callable[[Random, npt.NDArray[np.bool_]], Floats]] = {
    "coarse": coarse, "faint": faint, "wander": wander, "halves": halves,
}  # fmt: skip


def found(kind: str, maps: int, share: float, draws: int) -> int:
    """In how many draws more than one way is claimed."""
    rare = np.arange(maps) < round(share * maps)
    made = (KINDS[kind](np.random.default_rng(1000 * seed + maps), rare) for seed in range(draws))
    return sum(cluster_maps(heat, range(maps), seed=seed).n_clusters > 1 for seed, heat in enumerate(made))


def main() -> None:
    """A line for each number of maps and share of the rarer way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=15)
    parser.add_argument("--maps", type=int, nargs="+", default=[40, 60, 80, 100])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.3, 0.2])
    args = parser.parse_args()
    for maps in args.maps:
        for share in args.shares:
            counts = (f"{kind} {found(kind, maps, share, args.draws)}" for kind in KINDS)
            print(f"{maps} maps, {share:.0%}: of {args.draws} {', '.join(counts)}", flush=True)


def _blobs(random: Random, centers: Floats) -> Floats:
    """(N,2) on 48 pixels -> (N,16,16) Gaussians of any strength, under noise."""
    cells = np.arange(16)
    down, right = (np.exp(-((cells - one[:, None] / 3) ** 2) / (2 * 1.5**2)) for one in centers.T)
    heat = random.uniform(0.3, 3, (len(centers), 1, 1)) * down[:, :, None] * right[:, None, :]
    return np.asarray(heat + NOISE * np.abs(random.normal(size=heat.shape)))


if __name__ == "__main__":
    main()
