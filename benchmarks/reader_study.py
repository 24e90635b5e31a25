"""Coverage of the intervals of a reader study: simulated studies whose true accuracies are known in closed form.

    python -m benchmarks.reader_study [--studies 500] [--write]

An answer is right where μ + reader + patient + image + reader x condition + patient x condition + noise is above 0, with
normal effects. So the expected accuracy of a condition is Φ(μ / σ), where σ² is the sum of all variances. Readers and
patients are drawn anew in each study. An interval covers if it holds the true difference of the accuracies with and
without maps. "false gain" is the share of studies without any true difference whose interval excludes 0. --write saves
the figures in benchmarks/results/reader_study.json.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from camscope.batch.reader_study.study_design import draw_readings
from camscope.evaluation.reader_study.read_reader_forms import StudyReadings
from camscope.evaluation.reader_study.reader_measures import MEASURES, compute_reader_values
from camscope.metrics.reader_and_patient_intervals import estimate_over_readers_and_patients

RESULTS = Path(__file__).parent / "results" / "reader_study.json"
SD = {"reader": 0.3, "patient": 0.6, "image": 0.4, "reader x condition": 0.2, "patient x condition": 0.3, "noise": 1.0}
MEANS, CONDITIONS = {"none": 0.7, "map": 1.1}, ("none", "map")
KINDS = {
    "by reader and by patient": "pooled",
    "by patient": "for_these_readers",
    "by reader": "for_these_patients",
}


class StudySize(NamedTuple):
    """Readers, patients and images of each patient, and the design."""

    n_readers: int
    n_patients: int
    images_per_patient: int
    design: str = "crossed"


SIZES = {
    "4 readers, 60 patients": StudySize(4, 60, 1),
    "8 readers, 60 patients": StudySize(8, 60, 1),
    "4 readers, 200 patients": StudySize(4, 200, 1),
    "4 readers, 30 patients with 2 images": StudySize(4, 30, 2),
    "4 readers, 60 patients, split": StudySize(4, 60, 1, "split"),
}


def simulate(size: StudySize, means: dict[str, float], seed: int) -> StudyReadings:
    """Draw the readings of one study. The truth is always "yes", since only the accuracy is evaluated."""
    random = np.random.default_rng(seed)
    patients = np.repeat(np.arange(size.n_patients), size.images_per_patient)
    readings = draw_readings(patients.tolist(), size.n_readers, CONDITIONS, size.design, seed)
    reader, row = (np.array([getattr(x, name) for x in readings]) for name in ("reader", "case"))
    patient, condition = patients[row], np.array([CONDITIONS.index(x.condition) for x in readings])
    latent = np.array([means[name] for name in CONDITIONS])[condition]
    latent = latent + random.normal(0, SD["reader"], size.n_readers + 1)[reader]
    latent += random.normal(0, SD["patient"], size.n_patients)[patient]
    latent += random.normal(0, SD["image"], len(patients))[row]
    latent += random.normal(0, SD["reader x condition"], (size.n_readers + 1, 2))[reader, condition]
    latent += random.normal(0, SD["patient x condition"], (size.n_patients, 2))[patient, condition]
    latent += random.normal(0, SD["noise"], len(latent))
    n = len(latent)
    return StudyReadings(
        reader=reader,
        session=np.array([x.session for x in readings]),
        row=row,
        patient=patient,
        condition=np.array([x.condition for x in readings]),
        truth=np.full(n, "yes"),
        answer=np.where(latent > 0, "yes", "no"),
        model_answer=np.full(n, ""),
        confidence=np.full(n, np.nan),
        seconds=np.full(n, np.nan),
    )


def measure_size(size: StudySize, n_studies: int) -> dict[str, Any]:
    """Measure coverage and width for a true difference, and the share of false gains without one."""
    sd = float(np.sqrt(sum(value**2 for value in SD.values())))
    truth = NormalDist().cdf(MEANS["map"] / sd) - NormalDist().cdf(MEANS["none"] / sd)
    intervals = {
        name: np.array([estimate_difference_of(size, means, seed) for seed in range(n_studies)])
        for name, means in (("gain", MEANS), ("equal", dict.fromkeys(CONDITIONS, 0.9)))
    }  # each (studies, kinds, 3): mean, low, high
    gain, equal = intervals["gain"], intervals["equal"]
    figures: dict[str, Any] = {"true_difference": truth, "mean_difference": float(gain[:, 0, 0].mean())}
    for k, kind in enumerate(KINDS):
        low, high = gain[:, k, 1], gain[:, k, 2]
        excluded = (equal[:, k, 1] > 0) | (equal[:, k, 2] < 0)
        figures[kind] = {
            "coverage": float(((low <= truth) & (truth <= high)).mean()),
            "half_width": float((high - low).mean() / 2),
            "power": float((low > 0).mean()),
            "false_gain": float(excluded.mean()),
        }
    return figures


def estimate_difference_of(size: StudySize, means: dict[str, float], seed: int) -> list[list[float]]:
    """Estimate the difference of the accuracies of one study: mean, low and high of each kind of interval."""
    readings = simulate(size, means, seed)
    values = compute_reader_values(readings, MEASURES[0], range(1, size.n_readers + 1), CONDITIONS, None)
    if values is None:
        raise RuntimeError("a simulated study has no accuracy")
    estimates = estimate_over_readers_and_patients(
        values.values[:, 1] - values.values[:, 0], values.without_patient[:, 1] - values.without_patient[:, 0]
    )
    lines = [getattr(estimates, name) for name in KINDS.values()]
    return [[line.mean, line.low, line.high] for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate studies of all sizes, print the figures, and save them if requested."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reader_study", description=__doc__)
    parser.add_argument("--studies", type=int, default=500, help="simulated studies of each size")
    parser.add_argument("--write", action="store_true", help=f"write the figures into results/{RESULTS.name}")
    options = parser.parse_args(arguments)
    figures = {"studies": options.studies, "sd": SD, "means": MEANS, "sizes": {}}
    for name, size in SIZES.items():
        figures["sizes"][name] = measure_size(size, options.studies)  # type: ignore[index]  # the dictionary above
        print(name, json.dumps(figures["sizes"][name]))  # type: ignore[index]
    if options.write:
        RESULTS.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
