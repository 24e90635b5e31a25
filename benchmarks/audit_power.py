"""`python -m benchmarks.audit_power`: does the audit find the shortcuts that nets were taught, and no others?

Models learn radiographs in which a marker in the corner occurs with the lesion with probability p. Each is audited on 300
images of the same distribution: the marker is removed with two imputation strategies, and inserted. The verdict is that of
`judge_reliance` in `camscope.audit.shortcuts.intervention_effects_and_reliance`. For comparison: AUROC, and the share of the
maps on the marker.
--quick: one seed of each, without maps; --json FILE; --write: into results/audit_power.json
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.volume_study import draw_volume_study
from camscope import GradCAM, IntegratedGradients, Occlusion
from camscope.audit.core.summary_schema import InterventionEffect
from camscope.audit.performance.auc import auroc
from camscope.audit.performance.compute_log_odds_and_features import compute_softmax_log_odds
from camscope.audit.shortcuts.intervention_effects_and_reliance import (
    estimate_insertion_effect,
    estimate_removal_effect,
    judge_reliance,
)
from camscope.audit.shortcuts.region_removal_and_insertion import (
    insert_region,
    match_receivers_donors_and_controls,
    remove_region,
)
from camscope.geometry import Placement
from camscope.metrics.imputation import DEFAULT_IMPUTATIONS
from camscope.metrics.localization import enrichment
from camscope.phantom.shortcut_study import ShortcutStudy, draw_study, to_study_input, train_shortcut_model

RESULTS: Final = Path(__file__).with_name("results") / "audit_power.json"
SHARES: Final = (0.5, 0.8, 0.95)
SEEDS: Final = range(4)
CLEAN: Final = range(4, 12)  # of further nets that had no shortcut to learn
TRAINED, AUDITED, MAPPED = 1000, 300, 40
LESION: Final = 1
TOP: Final = 0.1
BATCH: Final = 64


@dataclass(frozen=True)
class Judged:
    """What the audit says of a net: effects of the token, the word and its reason."""

    insert: tuple[InterventionEffect, ...]
    remove: tuple[InterventionEffect, ...]
    word: str
    reason: str


def score(net: nn.Module, x: Tensor) -> npt.NDArray[np.float64]:
    """The log odds (N,) of the lesion for inputs (N,C,*S)."""
    with torch.no_grad():
        logits = torch.cat([net(part) for part in x.split(BATCH)])
    return compute_softmax_log_odds(logits.double(), LESION).numpy()


def judged(net: nn.Module, study: ShortcutStudy, seed: int = 0) -> Judged:
    """Whether the net relies on the token of a study (N,*S)."""
    x, masks = to_study_input(study.images), torch.from_numpy(study.marker_masks)
    clean = score(net, x)
    unit, there = float(clean.std()), np.flatnonzero(study.has_marker)
    remove = tuple(
        _removed(net, x[there], masks[there], clean[there], unit, fill, study, there) for fill in DEFAULT_IMPUTATIONS
    )
    pairs = match_receivers_donors_and_controls(study.labels == 1, study.has_marker, study.patients, seed)
    given, sham = (
        score(net, insert_region(x[pairs.receivers], masks[pairs.donors], x[others]))
        for others in (pairs.donors, pairs.controls)
    )
    given_to, donors, others = ([study.patients[i] for i in rows] for rows in pairs)
    effect = estimate_insertion_effect(sham, given, unit, given_to, donors, others)
    insert = (InterventionEffect(region="token", finding="lesion", kind="insert", imputation=None, effect=effect),)
    return Judged(insert, remove, *judge_reliance(insert, remove))


def _removed(
    net: nn.Module, x: Tensor, masks: Tensor, clean: Any, unit: float, fill: str, study: ShortcutStudy, rows: Any
) -> InterventionEffect:
    changed = score(net, remove_region(x, masks, fill))
    effect = estimate_removal_effect(clean, changed, unit, [study.patients[i] for i in rows])
    return InterventionEffect(region="token", finding="lesion", kind="remove", imputation=fill, effect=effect)


def without_finding(net: nn.Module, study: ShortcutStudy) -> tuple[float, float]:
    """The mean effect of removing the lesion, in SD, and the AUROC that is left when the lungs are blanked."""
    x, clean = to_study_input(study.images), score(net, to_study_input(study.images))
    ill = np.flatnonzero(study.lesion_masks.reshape(len(study), -1).any(1))
    changed = score(net, remove_region(x[ill], torch.from_numpy(study.lesion_masks[ill]), "mean"))
    blank = score(net, remove_region(x, torch.from_numpy(study.lung_masks), "mean"))
    effect = estimate_removal_effect(clean[ill], changed, float(clean.std()), n_resamples=100)
    mean = float("nan") if effect.value is None else effect.value
    return mean, auroc(study.labels == 1, blank, study.patients, n_resamples=100).mean


def on_the_token(net: nn.Module, study: ShortcutStudy) -> dict[str, tuple[float, float]]:
    """Of each method's maps of images with the token: its enrichment there, and its share of the hottest tenth."""
    rows = np.flatnonzero(study.has_marker & (study.labels == 1))[:MAPPED]
    x, masks = to_study_input(study.images[rows]), study.marker_masks[rows]
    layer: Any = net.layer3
    tools = {
        "gradcam": GradCAM(net, layer),
        "integratedgradients": IntegratedGradients(net, n_steps=32),
        "occlusion": Occlusion(net, window=6, stride=3),
    }
    return {name: _share(tool.attribute(x, 1).numpy(), masks) for name, tool in tools.items()}


def _share(maps: Any, masks: Any) -> tuple[float, float]:
    heats = [Placement.identity(mask.shape).project(one)[0] for one, mask in zip(maps, masks, strict=True)]
    pairs = [(heat, mask) for heat, mask in zip(heats, masks, strict=True) if (heat > 0).any()]
    top = [(heat[mask] > np.quantile(heat, 1 - TOP)).mean() for heat, mask in pairs]
    return float(np.mean([enrichment(*pair) for pair in pairs])), float(np.mean(top))


def row(p: float, seed: int, *, maps: bool = True) -> dict[str, Any]:
    """All that is said of one net."""
    start = time.perf_counter()
    net = train_shortcut_model(draw_study(TRAINED, 100 + seed, p), seed)
    trained = time.perf_counter() - start
    kinds = {"aligned": p, "independent": 0.5, "flipped": 1 - p}
    studies = {name: draw_study(AUDITED, 200 + seed, share) for name, share in kinds.items()}
    answers = {name: score(net, to_study_input(one.images)) for name, one in studies.items()}
    found = judged(net, studies["aligned"], seed)
    lesion, blank = without_finding(net, studies["aligned"])
    return {
        "p": p,
        "seed": seed,
        "auroc": {name: auroc(one.labels == 1, answers[name], n_resamples=100).mean for name, one in studies.items()},
        "insert": [effect.model_dump() for effect in found.insert],
        "remove": [effect.model_dump() for effect in found.remove],
        "word": found.word,
        "reason": found.reason,
        "lesion": lesion,
        "blanked": blank,
        "maps": on_the_token(net, studies["aligned"]) if maps else {},
        "seconds": trained,
    }


def volume_row(p: float, seed: int) -> dict[str, Any]:
    """The verdict on a net of volumes with a marker in the corner."""
    net = train_shortcut_model(draw_volume_study(640, 100 + seed, p), seed)
    study = draw_volume_study(240, 200 + seed, p)  # as many patients as an absence takes
    found = judged(net, study, seed)
    area = auroc(study.labels == 1, score(net, to_study_input(study.images)), n_resamples=100).mean
    return {
        "p": p,
        "seed": seed,
        "auroc": area,
        "word": found.word,
        "insert": [one.model_dump() for one in found.insert],
    }


def right(one: dict[str, Any]) -> bool:
    """Whether the word is the one that the training deserves."""
    return bool(one["word"] == ("not supported" if one["p"] == 0.5 else "supported"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each p: the range over seeds."""
    head = (
        "p",
        "AUROC aligned / independent / flipped",
        "insert marker (SD)",
        "remove marker: mean, blur (SD)",
        "remove lesion (SD)",
        "lungs-blank AUROC",
        "marker enrichment: Grad-CAM",
        "IG",
        "occlusion",
        "marker in top 10 %: Grad-CAM",
        "verdicts",
    )
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for p in dict.fromkeys(one["p"] for one in rows):
        own = [one for one in rows if one["p"] == p]
        maps = [one["maps"] for one in own if one["maps"]]
        cells = [
            f"{p:.2f}",
            " / ".join(_range([one["auroc"][name] for one in own], 3) for name in own[0]["auroc"]),
            _range([one["insert"][0]["effect"]["value"] for one in own]),
            ", ".join(
                _range([one["remove"][k]["effect"]["value"] for one in own]) for k in range(len(DEFAULT_IMPUTATIONS))
            ),
            _range([one["lesion"] for one in own]),
            _range([one["blanked"] for one in own]),
            *(_range([one[name][0] for one in maps]) for name in ("gradcam", "integratedgradients", "occlusion")),
            _range([one["gradcam"][1] for one in maps]),
            ", ".join(f"{sum(one['word'] == word for one in own)} {word}" for word in sorted({o["word"] for o in own})),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def dose(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Spearman's correlation of p with what is measured of it, over nets; of three values of p 0.946 is the most."""
    from scipy.stats import spearmanr

    known = [one for one in rows if one["maps"]]
    measured = {"insertion": [one["insert"][0]["effect"]["value"] for one in rows]}
    for name in ("gradcam", "integratedgradients", "occlusion") if known else ():
        measured[name] = [one["maps"][name][0] for one in known]
    return {name: float(spearmanr([one["p"] for one in rows], values).statistic) for name, values in measured.items()}


def _range(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return "–"
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low}..{high}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, audit, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_power", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed of each p, without maps, clean nets and volumes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--write", action="store_true", help=f"write them into results/{RESULTS.name}")
    chosen = parser.parse_args(arguments)
    seeds = SEEDS[:1] if chosen.quick else SEEDS
    rows = [_told(row(p, seed, maps=not chosen.quick)) for p in SHARES for seed in seeds]
    clean = [] if chosen.quick else [_told(row(0.5, seed, maps=False)) for seed in CLEAN]
    volumes = [] if chosen.quick else [_told(volume_row(p, seed)) for p in (0.5, 0.95) for seed in range(2)]
    print(f"\n{table(rows)}\n")
    print(f"{sum(map(right, rows))} of {len(rows)} judged rightly")
    print(f"{sum(one['word'] == 'supported' for one in clean)} of {len(clean)} further clean nets accused")
    print(f"{sum(map(right, volumes))} of {len(volumes)} nets of volumes judged rightly")
    print("rank correlation with p:", ", ".join(f"{name} {value:.3f}" for name, value in dose(rows).items()))
    found = {"nets": rows, "clean": clean, "volumes": volumes, "dose": dose(rows)}
    for path in [chosen.json] * (chosen.json is not None) + [RESULTS] * chosen.write:
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _told(one: dict[str, Any]) -> dict[str, Any]:
    effect = one["insert"][0]["effect"]
    print(f"p {one['p']:.2f} seed {one['seed']:2}: insertion {effect['value']:+.2f}, {one['word']}", flush=True)
    return one


if __name__ == "__main__":
    main()
