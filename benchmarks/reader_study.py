"""Coverage of the intervals of a reader study: simulated studies whose true accuracies are known in closed form.

    python -m benchmarks.reader_study [--studies 500] [--write]

An answer is right where μ + reader + patient + image + reader x condition + patient x condition + noise is above 0, with
normal effects. So the expected accuracy of a condition is Φ(μ / σ), where σ² is the sum of all variances. Readers and
patients are drawn anew in each study. An interval covers if it holds the true difference of the accuracies with and
without maps. "false gain" is the share of studies without any true difference whose interval excludes 0. --write saves
the figures in benchmarks/results/reader_study.json, and draws one simulated study.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from camscope.batch.reader_study.study_design import draw_readings
from camscope.evaluation.reader_study.evaluate_reader_study import ReaderStudyResult, summarize_readings
from camscope.evaluation.reader_study.read_reader_forms import StudyReadings
from camscope.evaluation.reader_study.reader_measures import MEASURES, compute_reader_values
from camscope.evaluation.reader_study.reader_study_figure import draw_reader_study
from camscope.metrics.reader_and_patient_intervals import estimate_over_readers_and_patients

RESULTS = Path(__file__).parent / "results" / "reader_study.json"
FIGURE = Path(__file__).parents[1] / "docs" / "how-to" / "reader-study" / "results.svg"
SD = {"reader": 0.3, "patient": 0.6, "image": 0.4, "reader x condition": 0.2, "patient x condition": 0.3, "noise": 1.0}
MEANS = {"none": 0.7, "map": 1.1}
EXAMPLE_MEANS, EXAMPLE_SEED = (
    {"none": 0.7, "map": 1.1, "control": 0.7},
    0,
)  # of the figure in docs/how-to/reader-study.md
LOG_SECONDS, LOG_SECONDS_SD, MAP_LOG_SECONDS = 2.5, 0.4, 0.1  # times of the example; maps take 10 % longer
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
    """Draw the readings of one study."""
    random, conditions = np.random.default_rng(seed), tuple(means)
    patients = np.repeat(np.arange(size.n_patients), size.images_per_patient)
    readings = draw_readings(patients.tolist(), size.n_readers, conditions, size.design, seed)
    reader, row = (np.array([getattr(x, name) for x in readings]) for name in ("reader", "case"))
    patient, condition = patients[row], np.array([conditions.index(x.condition) for x in readings])
    latent = np.array(list(means.values()))[condition]
    latent = latent + random.normal(0, SD["reader"], size.n_readers + 1)[reader]
    latent += random.normal(0, SD["patient"], size.n_patients)[patient]
    latent += random.normal(0, SD["image"], len(patients))[row]
    latent += random.normal(0, SD["reader x condition"], (size.n_readers + 1, len(means)))[reader, condition]
    latent += random.normal(0, SD["patient x condition"], (size.n_patients, len(means)))[patient, condition]
    latent += random.normal(0, SD["noise"], len(latent))
    n, answers = len(latent), np.array(["no", "yes"])
    is_positive = random.integers(0, 2, len(patients))[row]
    seconds = np.exp(LOG_SECONDS + MAP_LOG_SECONDS * (condition > 0) + random.normal(0, LOG_SECONDS_SD, n))
    return StudyReadings(
        reader=reader,
        session=np.array([x.session for x in readings]),
        row=row,
        patient=patient,
        condition=np.array([x.condition for x in readings]),
        truth=answers[is_positive],
        answer=answers[np.where(latent > 0, is_positive, 1 - is_positive)],
        model_answer=np.full(n, ""),
        confidence=np.full(n, np.nan),
        seconds=seconds,
    )


def measure_size(size: StudySize, n_studies: int) -> dict[str, Any]:
    """Measure coverage and width for a true difference, and the share of false gains without one."""
    sd = float(np.sqrt(sum(value**2 for value in SD.values())))
    truth = NormalDist().cdf(MEANS["map"] / sd) - NormalDist().cdf(MEANS["none"] / sd)
    intervals = {
        name: np.array([estimate_difference_of(size, means, seed) for seed in range(n_studies)])
        for name, means in (("gain", MEANS), ("equal", dict.fromkeys(MEANS, 0.9)))
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
    values = compute_reader_values(readings, MEASURES[0], range(1, size.n_readers + 1), tuple(means), None)
    if values is None:
        raise RuntimeError("a simulated study has no accuracy")
    estimates = estimate_over_readers_and_patients(
        values.values[:, 1] - values.values[:, 0], values.without_patient[:, 1] - values.without_patient[:, 0]
    )
    lines = [getattr(estimates, name) for name in KINDS.values()]
    return [[line.mean, line.low, line.high] for line in lines]


def evaluate_example() -> ReaderStudyResult:
    """Evaluate one simulated study with control maps, whose true accuracy without maps and with control maps is the same."""
    size = SIZES["4 readers, 60 patients"]
    readings = simulate(size, EXAMPLE_MEANS, EXAMPLE_SEED)
    study = {"conditions": list(EXAMPLE_MEANS), "answers": ["no", "yes"], "positive_answer": "yes", "design": "crossed"}
    return summarize_readings(study, readings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate studies of all sizes, print the figures, and save them if requested."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reader_study", description=__doc__)
    parser.add_argument("--studies", type=int, default=500, help="simulated studies of each size")
    parser.add_argument("--write", action="store_true", help=f"write the figures into results/{RESULTS.name}")
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {"studies": options.studies, "sd": SD, "means": MEANS, "sizes": {}}
    for name, size in SIZES.items():
        figures["sizes"][name] = measure_size(size, options.studies)
        print(name, json.dumps(figures["sizes"][name]))
    result = evaluate_example()
    names = (("accuracy", "map", "none"), ("accuracy", "map", "control"), ("seconds", "map", "none"))
    lines = {" ".join(name): line.estimates.pooled for name in names if (line := result.find(*name)) is not None}
    figures["example"] = {name: {"mean": line.mean, "low": line.low, "high": line.high} for name, line in lines.items()}
    print("\n".join(result.statements()))
    if options.write:
        FIGURE.write_bytes(draw_reader_study(result, ".svg"))
        RESULTS.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
