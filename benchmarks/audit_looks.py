"""How often an audit with interim looks errs, compared with one look at the whole sample.

    python -m benchmarks.audit_looks [--samples 20000] [--write]

Values are drawn around the margin, so that every decision is an error, from symmetric, skewed and two-valued
distributions. An interval is that of Student's t; `bounded` is that of Korn and Graubard for values in -1..1. `coverage`
is the share of samples whose interval at the look where it stopped contains the true value, also away from the margin.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from camscope.metrics.group_sequential import ERROR_RATE, InterimLook, plan_interim_looks
from camscope.metrics.mean_estimates import Estimate, estimate_mean

RESULTS: Final = Path(__file__).with_name("results") / "audit_looks.json"
SIZES: Final = (22, 24, 48)
SHIFTS: Final = (0.0, 0.5, 1.0)  # of the true value from the margin, in standard deviations
BOUNDED_SHARE: Final = 20  # bounded intervals are slow: a twentieth of the samples
Draw = Callable[[np.random.Generator, tuple[int, int]], Any]
DISTRIBUTIONS: Final[dict[str, Draw]] = {
    "normal": lambda rng, size: rng.normal(0, 1, size),
    "gamma (skewness -1)": lambda rng, size: (4 - rng.gamma(4, 1, size)) / 2,
    "exponential (skewness -2)": lambda rng, size: 1 - rng.exponential(1, size),
    "two values, 20 %": lambda rng, size: np.where(rng.random(size) < 0.2, -2.0, 0.5),
    "two values, 40 %": lambda rng, size: np.where(rng.random(size) < 0.4, -(1.5**0.5), 1.5**-0.5),
}


def student(values: Any, alpha: float) -> tuple[Any, Any]:
    """The ends of Student's interval of each row (R,n), NaN for a row of equal values."""
    from scipy.special import stdtrit

    n = values.shape[1]
    mean, error = values.mean(1), values.std(1, ddof=1) / n**0.5
    half = np.where(error > 1e-9, -stdtrit(n - 1, alpha / 2) * error, np.nan)
    return mean - half, mean + half


def bounded(values: Any, alpha: float) -> tuple[Any, Any]:
    """The ends of the interval of Korn and Graubard of each row (R,n)."""
    found: list[Estimate] = [estimate_mean(row, bounds=(-1, 1), confidence_level=1 - alpha) for row in values]
    return np.array([one.low for one in found]), np.array([one.high for one in found])


def outcomes(
    values: Any, truth: float, margin: float, interval: Callable[..., Any], looks: Sequence[InterimLook]
) -> Any:
    """Of each row (R,N): whether it is decided, whether its interval contains the truth, and the images it took."""
    rows = len(values)
    decided, covered, used = np.zeros(rows, bool), np.ones(rows, bool), np.full(rows, values.shape[1])
    running = np.ones(rows, bool)
    for look in looks:
        low, high = interval(values[:, : look.n_patients], look.alpha)
        beyond = (low > margin) | (high < margin)
        stops = running & (beyond | look.is_last)
        decided |= stops & beyond
        covered[stops] = ~((low > truth) | (high < truth))[stops]
        used[stops] = look.n_patients
        running &= ~stops
    return decided, covered, used


def row(name: str, size: int, n_samples: int, seed: int = 0) -> dict[str, Any]:
    """Errors at the margin, and coverage and images away from it, for a distribution and a number of patients."""
    rng, looks, single = np.random.default_rng((seed, size)), plan_interim_looks(size), [InterimLook(1, (size,))]
    values = DISTRIBUTIONS[name](rng, (n_samples, size))
    few = np.clip(0.5 + 0.2 * values[: n_samples // BOUNDED_SHARE], -1, 1)
    true = float(np.clip(0.5 + 0.2 * DISTRIBUTIONS[name](rng, (10**6, 1)), -1, 1).mean())
    found: dict[str, Any] = {"distribution": name, "patients": size}
    for kind, plan in (("one look", single), ("looks", looks)):
        found[f"error, {kind}"] = round(float(outcomes(values, 0.0, 0.0, student, plan)[0].mean()), 4)
        found[f"error, bounded, {kind}"] = round(float(outcomes(few, true, true, bounded, plan)[0].mean()), 4)
        for shift in SHIFTS[1:]:
            decided, covered, used = outcomes(values + shift, shift, 0.0, student, plan)
            found[f"coverage at {shift} SD, {kind}"] = round(float(covered.mean()), 4)
            found[f"power at {shift} SD, {kind}"] = round(float(decided.mean()), 4)
            found[f"images at {shift} SD, {kind}"] = round(float(used.mean()), 1)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_looks", description=__doc__)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--write", action="store_true", help=f"write them into results/{RESULTS.name}")
    chosen = parser.parse_args(arguments)
    rows = [row(name, size, chosen.samples) for size in SIZES for name in DISTRIBUTIONS]
    for one in rows:
        print("; ".join(f"{name} {value}" for name, value in one.items()))
    if chosen.write:
        found = {"samples": chosen.samples, "error rate": ERROR_RATE, "rows": rows}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
