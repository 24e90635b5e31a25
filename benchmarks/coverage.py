"""`python -m benchmarks.coverage`: do intervals cover, and how often are claims false, on data whose truth is known?

- coverage: how often a 95 % interval of a mean holds the truth, how often it has no width, and how often there is none.
- comparisons: methods that are all alike: how often does `camscope compare` say that one is behind the first? And one that is
  better: how often is that found?
- contradictions: how often is an interval that leaves 0 out printed with p of 0.05 or more, or the reverse?
- absences: a region that the model relies on in few patients: how often does the audit say "not supported"? And one that it does
  not rely on.
- rounding: how often is a difference of 1e-12 found?
- levels: subgroups that are all alike: how often does the audit say that one differs?
- dominance: one patient has a third, half, or most of the images: how often does an interval hold the truth, and how wide is it?

`--sims N`: simulations of each case. `--only PART ...`: not all of it.
`--json FILE`; `--write`: into results/coverage.json. `--beside FILE`: figures of another
state of camscope, as an earlier commit, shown as "before".
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from camscope.audit.core.summary_schema import InterventionEffect
from camscope.audit.performance.auc import auroc
from camscope.audit.performance.subgroup_differences import compare_level_means
from camscope.audit.shortcuts.intervention_effects_and_reliance import estimate_removal_effect, judge_reliance
from camscope.evaluation.comparison_statements import iter_statements
from camscope.evaluation.map_agreement import MapAgreement
from camscope.evaluation.method_summaries import summarize_values
from camscope.metrics import METRICS
from camscope.metrics.mean_estimates import estimate_difference, estimate_mean
from camscope.metrics.multiway_clustered_mean import estimate_clustered_mean

RESULTS: Final = Path(__file__).with_name("results") / "coverage.json"
BEFORE: Final = RESULTS.with_name("coverage_before.json")
MANY: Final = (
    "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance", "sparseness",
    "effective-area",
)  # fmt: skip
WORDS: Final = ("supported", "not supported", "not decided")
Sample = tuple[Any, list[int]]  # values, and whose they are
Random = np.random.Generator


def share(p: float, patients: int, most: int = 1) -> Callable[[Random], Sample]:
    """0 or 1 of each image; with several images a patient's own share varies around p."""

    def draw(random: Random) -> Sample:
        counts = random.integers(1, most + 1, patients)
        chances = np.full(patients, p) if most == 1 else random.beta(4 * p, 4 * (1 - p), patients)
        groups = np.repeat(np.arange(patients), counts)
        return (random.random(len(groups)) < chances[groups]).astype(float), groups.tolist()

    return draw


def each(patients: int, draw: Callable[[Random, int], Any]) -> Callable[[Random], Sample]:
    """One image of each patient."""
    return lambda random: (draw(random, patients), list(range(patients)))


def beta(a: float, b: float) -> Callable[[Random, int], Any]:
    """Values between 0 and 1."""
    return lambda random, count: random.beta(a, b, count)


def normal(patients: int, most: int = 8) -> Callable[[Random], Sample]:
    """Half of the variance is the patient's, with one to eight images each; the mean is 0."""

    def draw(random: Random) -> Sample:
        groups = np.repeat(np.arange(patients), random.integers(1, most + 1, patients))
        return random.normal(size=patients)[groups] + random.normal(size=len(groups)), groups.tolist()

    return draw


def coverages() -> Iterator[tuple[str, str, float, Callable[[Random], Sample]]]:
    """Name, metric, truth, and how a sample is drawn."""
    for images in (3, 5):
        yield f"pointing game 0.9, {images} images", "pointing-game", 0.9, share(0.9, images)
    for p, images in (
        (0.5, 10), (0.8, 10), (0.9, 10), (0.9, 20), (0.95, 20), (0.95, 40), (0.99, 40), (0.99, 100),
    ):  # fmt: skip
        yield f"pointing game {p}, {images} images", "pointing-game", p, share(p, images)
    for p, patients in ((0.9, 10), (0.9, 20), (0.9, 40), (0.5, 20)):
        yield f"pointing game {p}, {patients} patients of 1 to 6", "pointing-game", p, share(p, patients, 6)
    for a, b, images in ((1.0, 9.0, 10), (0.3, 5.0, 10), (0.3, 5.0, 40), (30.0, 3.0, 20)):
        name = f"energy inside, Beta({a:g}, {b:g}), {images} images"
        yield name, "energy-inside", a / (a + b), each(images, beta(a, b))
    yield (
        "energy inside, 0 in 80 %, 10 images",
        "energy-inside",
        0.1,
        each(10, lambda r, n: np.where(r.random(n) < 0.8, 0, r.beta(2, 2, n))),
    )
    for patients in (2, 3, 5, 6, 10, 20, 40):
        yield f"enrichment, normal, {patients} patients of 1 to 8", "enrichment", 0.0, normal(patients)
    for images in (6, 10, 20, 40, 100):
        truth = float(np.exp(0.5))
        yield (
            f"enrichment, lognormal(1), {images} images",
            "enrichment",
            truth,
            each(images, lambda r, n: r.lognormal(0, 1, n)),
        )


def covered(metric: str, truth: float, draw: Callable[[Random], Sample], sims: int) -> dict[str, float]:
    """Of `sims` samples: the share whose interval holds the truth, of those that have one; without width; without any."""
    random, held, flat, none = np.random.default_rng(3), 0, 0, 0
    known: dict[str, Any] = {}
    if "bounds" in signature(estimate_mean).parameters:  # earlier states have none
        known["bounds"] = METRICS[metric].bounds
    for seed in range(sims):
        values, groups = draw(random)
        made = estimate_mean(values, groups, n_resamples=1000, seed=seed, **known)
        none += bool(np.isnan(made.low))
        flat += made.low == made.high
        held += made.low <= truth <= made.high
    return {"coverage": held / (sims - none) if none < sims else -1.0, "no width": flat / sims, "none": none / sims}


def table(values: dict[str, dict[str, Any]]) -> pa.Table:
    """[metric][method] -> (images,), as `evaluate` has it; names in capitals are controls."""
    names = ("row", "method", "layer", "parameters_digest", "target", "control", "value", "metric", "imputation")
    rows = [
        (row, name.lower(), "l", "p", None, name.isupper(), float(value), metric, None)
        for metric, own in values.items()
        for name, some in own.items()
        for row, value in enumerate(some)
    ]
    kinds = [pa.int64(), *[pa.string()] * 4, pa.bool_(), pa.float64(), *[pa.string()] * 2]
    return pa.table({n: pa.array(c, k) for n, c, k in zip(names, zip(*rows, strict=True), kinds, strict=True)})


def methods(random: Random, count: int, metrics: Sequence[str], images: int, better: float = 0.0) -> pa.Table:
    """Methods that are alike, but for the first, which is better by so many standard deviations of a difference."""
    made = {}
    for metric in metrics:
        up, image = 1 if METRICS[metric].higher_is_better else -1, random.normal(size=images)
        gains = [better * 2**0.5] + [0.0] * (count - 1)
        made[metric] = {f"m{k}": 5 + image + random.normal(size=images) + up * gain for k, gain in enumerate(gains)}
    return table(made)


def claims(found: pa.Table) -> list[str]:
    """The sentences of `compare` that tell a method from the first."""
    lines = summarize_values(found, n_resamples=20)
    names = {
        ((one.method, one.layer, one.parameters), one.is_control): one.method for own in lines.values() for one in own
    }
    return [one for one in iter_statements(lines, MapAgreement([], {}, []), names) if " is first" in one]


def comparisons(sims: int) -> dict[str, float]:
    """The share of comparisons with a false claim, or with a true one."""
    made = {}
    cases = [(2, 1), (5, 1), (10, 1), (24, 1), (2, 8), (5, 8)]
    for count, metrics in cases:
        random, own = np.random.default_rng(count), max(1, sims // (1 + count * metrics // 10))
        wrong = sum(bool(claims(methods(random, count, MANY[:metrics], 40))) for _ in range(own))
        made[f"{count} equal methods, {metrics} metric{'s' * (metrics > 1)}, 40 images: any differs from the first"] = (
            wrong / own
        )
    for better in (0.5, 1.0):
        random, own = np.random.default_rng(1), max(1, sims // 4)
        right = sum(
            any("m0 is first" in one for one in claims(methods(random, 5, MANY[:1], 40, better))) for _ in range(own)
        )
        made[f"5 methods, 1 metric, 40 images, one better by {better:g} SD of the difference: differs from another"] = (
            right / own
        )
    return made


def contradictions(sims: int) -> dict[str, float]:
    """Of differences to the best control, five methods: the share whose interval and p say different things."""
    made = {}
    for images in (4, 8, 40):
        random, wrong, seen = np.random.default_rng(images), 0, 0
        for _ in range(max(1, sims // 6)):
            image = random.normal(size=images)
            own = {f"m{k}": 2 + 0.3 + image + random.normal(size=images) for k in range(5)}
            own["CENTRE"] = 2 + image + random.normal(size=images)
            for line in summarize_values(table({"enrichment": own}), n_resamples=20)["enrichment"]:
                gap = line.difference_to_control
                if gap is not None and gap.p_value is not None and not np.isnan(gap.low):
                    seen += 1
                    wrong += (gap.p_value < 0.05) != (gap.low > 0 or gap.high < 0)
        made[f"{images} images: interval and p contradict each other"] = wrong / max(1, seen)
    return made


RELIED = (
    (10, 0.05, 3.0, 0.02), (20, 0.05, 3.0, 0.02), (40, 0.05, 3.0, 0.02), (100, 0.05, 3.0, 0.02), (40, 0.03, 5.0, 0.02),
    (100, 0.03, 5.0, 0.02), (20, 0.1, 2.0, 0.05), (40, 0.1, 2.0, 0.05), (20, 1.0, 0.3, 0.3), (60, 1.0, 0.3, 0.3),
)  # fmt: skip
ABSENT = ((20, 1.0, 0.0, 0.05), (40, 1.0, 0.0, 0.05), (59, 1.0, 0.0, 0.05), (100, 1.0, 0.0, 0.05), (100, 1.0, 0.0, 0.3))


def _build_removal(imputation: str, *args: Any, **options: Any) -> InterventionEffect:
    effect = estimate_removal_effect(*args, **options)
    return InterventionEffect(region="token", finding="lesion", kind="remove", imputation=imputation, effect=effect)


def absences(sims: int) -> dict[str, dict[str, float]]:
    """[case]: the shares of the three words."""
    made = {}
    for patients, prevalence, size, noise in (*RELIED, *ABSENT):
        random, words = np.random.default_rng(9), dict.fromkeys(WORDS, 0)
        for seed in range(sims):
            met, clean = random.random(patients) < prevalence, random.normal(size=patients)
            gone = [clean - (size * met + noise * random.normal(size=patients)) for _ in range(2)]
            shown = [
                _build_removal(fill, clean, each, 1.0, list(range(patients)), n_resamples=500, seed=seed)
                for fill, each in zip(("mean", "blur"), gone, strict=True)
            ]
            words[judge_reliance([], shown)[0]] += 1
        name = f"{patients} patients, {size:g} SD in {100 * prevalence:g} % of them, noise {noise:g}"
        made[name] = {word: count / sims for word, count in words.items()}
    return made


def rounding(sims: int) -> dict[str, float]:
    """The share of differences of rounding that have p below 0.05."""
    random, wrong, alike = np.random.default_rng(0), 0, 0
    for _ in range(sims):
        values = random.random(20)
        wrong += (estimate_difference(values + 1e-12 * random.random(20), values).p_value or 0.0) < 0.05
        alike += (estimate_difference(values, values).p_value or 0.0) < 0.05
    return {"20 images, a difference of 1e-12": wrong / sims, "20 images, no difference": alike / sims}


def levels(sims: int) -> dict[str, float]:
    """The share of columns with any level that is called different, though all are alike."""
    made = {}
    for count in (2, 5):
        random, wrong, own = np.random.default_rng(count), 0, max(1, sims // 2)
        for seed in range(own):
            site = np.repeat(np.arange(count), 20).tolist()
            found = compare_level_means(random.normal(size=20 * count), site, margin=1e-3, n_resamples=400, seed=seed)
            wrong += any(one.conclusion == "different" for one in found)
        made[f"{count} levels of 20 patients: any is reported as different"] = wrong / own
    return made


PATIENTS: Final = 20
IMAGES: Final = 200
DOMINANT: Final = (0.3, 0.5, 0.8, 0.9)
Ends = tuple[float, float]


def cluster_sizes(random: Random, patients: int, share: float | None) -> Any:
    """(patients,) images of each: the first has this share of about 200; 0: 1 to 8 of each; None: 4 of each."""
    if share is None:
        return np.full(patients, 4)
    if not share:
        return random.integers(1, 9, patients)
    first = round(share * IMAGES)
    others = random.multinomial(IMAGES - first - (patients - 1), np.full(patients - 1, 1 / (patients - 1))) + 1
    return np.concatenate([[first], others])


def normal_of(random: Random, groups: Any) -> Any:
    """Half of the variance is the patient's; the mean is 0."""
    return (random.normal(size=int(groups.max()) + 1)[groups] + random.normal(size=len(groups))) / 2**0.5


def _share_ends(random: Random, groups: Any, seed: int) -> Ends:
    rates = random.beta(3.6, 0.4, int(groups.max()) + 1)
    hits = (random.random(len(groups)) < rates[groups]).astype(float)
    estimate = estimate_mean(hits, groups.tolist(), bounds=(0.0, 1.0))
    return estimate.low, estimate.high


def _mean_ends(random: Random, groups: Any, seed: int) -> Ends:
    estimate = estimate_mean(normal_of(random, groups), groups.tolist(), n_resamples=400, seed=seed)
    return estimate.low, estimate.high


def _difference_ends(random: Random, groups: Any, seed: int) -> Ends:
    values = normal_of(random, groups)
    estimate = estimate_difference(values, np.zeros(len(values)), groups.tolist())
    if estimate.p_value is not None and (estimate.p_value < 0.05) != (estimate.low > 0 or estimate.high < 0):
        raise ValueError(f"interval {estimate} and p {estimate.p_value} contradict each other")
    return estimate.low, estimate.high


def _insertion_ends(random: Random, groups: Any, seed: int) -> Ends:
    """Each image is given the region of one donor; the donors have the sizes that `groups` names, the images one patient each."""
    donors = random.permutation(groups)
    values = random.normal(size=int(donors.max()) + 1)[donors] + random.normal(size=len(donors))
    estimate = estimate_clustered_mean(values, range(len(values)), donors.tolist())
    return estimate.low, estimate.high


def _contrast_ends(random: Random, groups: Any, seed: int) -> Ends:
    """Against a level of 20 patients of 4 images."""
    other = np.repeat(np.arange(PATIENTS), 4)
    values = np.concatenate([normal_of(random, groups), normal_of(random, other)])
    patients = [*groups.tolist(), *(-1 - other).tolist()]
    level = ["a"] * len(groups) + ["b"] * len(other)
    gap = compare_level_means(values, level, patients, margin=1e-3, n_resamples=200, seed=seed, min_patients=6)[
        0
    ].difference
    return (float("nan"), float("nan")) if gap is None else (gap.low, gap.high)


def _auroc_ends(random: Random, groups: Any, seed: int) -> Ends:
    """Images with the finding, and as many patients of 4 images each without it; the truth is 0.5."""
    other = np.repeat(np.arange(int(groups.max()) + 1), 4)
    values = np.concatenate([normal_of(random, groups), normal_of(random, other)])
    truth = np.arange(len(values)) < len(groups)
    estimate = auroc(truth, values, [*groups.tolist(), *(-1 - other).tolist()], n_resamples=200, seed=seed)
    return estimate.low, estimate.high


ESTIMATES: Final[dict[str, tuple[float, Callable[[Random, Any, int], Ends]]]] = {
    "a share of 0.9": (0.9, _share_ends),
    "a mean": (0.0, _mean_ends),
    "a paired difference": (0.0, _difference_ends),
    "an insertion, by donors": (0.0, _insertion_ends),
    "a contrast of subgroups": (0.0, _contrast_ends),
    "an AUROC": (0.5, _auroc_ends),
}


def dominance(sims: int) -> dict[str, dict[str, float]]:
    """[case]: the share of intervals that hold the truth, the share of samples without one, and the median width."""
    cases: list[tuple[str, int, float | None]] = [
        (f"{PATIENTS} patients of 4", PATIENTS, None),
        ("6 patients of 1 to 8", 6, 0.0),
        (f"{PATIENTS} patients of 1 to 8", PATIENTS, 0.0),
        *((f"{PATIENTS} patients, one has {100 * share:.0f} %", PATIENTS, share) for share in DOMINANT),
    ]
    results = {}
    for name, (truth, interval) in ESTIMATES.items():
        for case, patients, share in cases:
            random, ends = np.random.default_rng(5), []
            for seed in range(sims):
                sizes = cluster_sizes(random, patients, share)
                ends.append(interval(random, np.repeat(np.arange(patients), sizes), seed))
            results[f"{name}, {case}"] = _ends_summary(np.array(ends), truth)
    return results


def _ends_summary(ends: Any, truth: float) -> dict[str, float]:
    there = ends[~np.isnan(ends[:, 0])]
    if not len(there):
        return {"coverage": -1.0, "none": 1.0, "width": -1.0}
    held = (there[:, 0] <= truth) & (truth <= there[:, 1])
    width = float(np.median(there[:, 1] - there[:, 0]))
    return {"coverage": float(held.mean()), "none": 1 - len(there) / len(ends), "width": round(width, 4)}


def _coverages(sims: int) -> dict[str, dict[str, float]]:
    return {name: _told(name, covered(metric, truth, draw, sims)) for name, metric, truth, draw in coverages()}


PARTS: Final[dict[str, Callable[[int], Any]]] = {
    "coverage": _coverages,
    "comparisons": comparisons,
    "contradictions": contradictions,
    "absences": absences,
    "rounding": rounding,
    "levels": levels,
    "dominance": dominance,
}


def measured(sims: int, parts: Sequence[str] = tuple(PARTS)) -> dict[str, Any]:
    """Some parts, or all of them."""
    return {part: _told(part, PARTS[part](sims)) for part in parts} | {"sims": sims}


def tables(found: dict[str, Any], before: dict[str, Any] | None) -> Iterator[str]:
    """In Markdown: each figure, and what it was before."""
    states = [one for one in (before, found) if one is not None]
    titles = ["before", "now"] if before else ["now"]
    yield _row(
        "95 % interval of a mean", *(f"{title}: {name}" for title in titles for name in ("covers", "no width", "none"))
    )
    yield _row(*["---"] * (1 + 3 * len(states)))
    for name in found["coverage"]:
        yield _row(name, *(cell for one in states for cell in _covers(one["coverage"][name])))
    yield ""
    yield _row("false or true claims", *titles)
    yield _row(*["---"] * (1 + len(states)))
    for part in ("comparisons", "contradictions", "rounding", "levels"):
        for name in found[part]:
            yield _row(name, *("" if name not in one[part] else f"{100 * one[part][name]:.1f} %" for one in states))
    yield ""
    yield _row(
        "removal in all of n patients",
        *(f"{title}: {' / '.join(WORDS)}" for title in titles),
    )
    yield _row(*["---"] * (1 + len(states)))
    for name in found["absences"]:
        yield _row(
            name, *(" / ".join(f"{100 * one['absences'][name][word]:.0f} %" for word in WORDS) for one in states)
        )


def dominance_table(now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """In Markdown: coverage, samples without an interval, and width, of intervals before and after sizes of groups counted."""
    yield _row("95 % interval, images by patient", *(f"{when}: {what}" for when in ("before", "now")
               for what in ("covers", "none", "width")), "width, now / before")  # fmt: skip
    yield _row(*["---"] * 8)
    for name, case in now["dominance"].items():
        cells = []
        for state in (before["dominance"][name], case):
            some = state["none"] < 1
            cells += [f"{state['coverage']:.3f}" if some else "", f"{state['none']:.2f}" if state["none"] else ""]
            cells.append(f"{state['width']:.2f}" if some else "")
        ratio = case["width"] / before["dominance"][name]["width"] if case["none"] < 1 else None
        yield _row(name, *cells, "" if ratio is None else f"{ratio:.2f}")


def _covers(one: dict[str, float]) -> list[str]:
    held = "" if one["none"] == 1 else f"{one['coverage']:.3f}"
    return [held, *("" if not one[name] else f"{one[name]:.2f}" for name in ("no width", "none"))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _told(name: str, made: Any) -> Any:
    print(f"{time.process_time():6.0f} s  {name}", file=sys.stderr, flush=True)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--sims", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="the others stay as they are"
    )
    parser.add_argument("--write", action="store_true", help=f"into results/{RESULTS.name}")
    parser.add_argument("--beside", type=Path, default=BEFORE if BEFORE.exists() else None)
    chosen = parser.parse_args(arguments)
    before = None if chosen.beside is None else json.loads(chosen.beside.read_text(encoding="utf-8"))
    results = chosen.json or RESULTS
    found = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    found |= measured(chosen.sims, chosen.only)
    if found.keys() >= PARTS.keys():
        print("\n".join(tables(found, before)))
    if before is not None and "dominance" in before and "dominance" in found:
        print("\n".join(["", *dominance_table(found, before)]))
    for path in [chosen.json] * (chosen.json is not None) + [RESULTS] * chosen.write:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
