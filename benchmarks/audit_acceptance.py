"""`python -m benchmarks.audit_acceptance`: whole audits on studies whose truth is known, and what they took.

- subgroups: a token that occurs at site B only, and goes with the finding there: is the difference of its effect found? And is
  none claimed where it occurs evenly?
- strategies: nets that have two ways to be right, and nets that have one: how often are two claimed, and are they the two? How
  many times more of the maps lies where tokens are in the one cluster than in the other?
- volumes: the same verdicts in three dimensions.
- time: an audit of 500 images, with all stages, on this machine.
- scale: Grad-CAM and metrics of where maps lie, of 10,000 images, beside a bare loop of forward and backward passes.
- corrupt: 2 % of files of five kinds damaged.
- killed: an audit with every stage, killed at three instants drawn at random, beside one that was left alone: the same files?

Each is run by its name; without one all are. `--json FILE`.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from benchmarks.volume_study import draw_volume_study
from camscope import GradCAM, IntegratedGradients, audit, load_model, run_batch
from camscope.audit import AuditRun
from camscope.audit.clustering.map_clustering import cluster_maps
from camscope.audit.demo_dataset_and_model import (
    CONFOUNDED_PROBABILITY,
    UNBIASED_PROBABILITY,
    build_demo_config,
    write_demo_study,
)
from camscope.audit.provenance.provenance_file import digest_outputs
from camscope.audit.shortcuts.region_attribution import compute_mass_share
from camscope.batch import BatchOutcome, BatchRun
from camscope.evaluation import evaluate
from camscope.geometry import Placement
from camscope.phantom.shortcut_study import (
    ShortcutStudy,
    Site,
    draw_study,
    to_study_input,
    train_shortcut_model,
    write_study,
    write_weights,
)

FEW = {"faithfulness": 8, "robustness": 8, "sanity": 5, "interventions": 200, "gallery": 4}
OTHERS = ("localization", "faithfulness", "sanity", "robustness")
ROUNDS = 3
IMPORTS = 5.0  # seconds, before which nothing was begun
Told = dict[str, Any]


def audited(folder: Path, trained: ShortcutStudy, seen: ShortcutStudy, **tables: Any) -> AuditRun:
    """A net of one study, audited on another."""
    net = train_shortcut_model(trained)
    config = build_demo_config(write_study(seen, folder), write_weights(net, folder), CONFOUNDED_PROBABILITY)
    config["sample_sizes"] = FEW
    return audit.run_audit({**config, **tables}, folder / "audit")


def subgroups(folder: Path) -> Told:
    """The verdict on each site's effect of the token."""
    made = {}
    sites: dict[str, Site | None] = {"at site B only": "B", "at both sites": None}
    for name, site in sites.items():
        studies = [draw_study(n, seed, 0.95, marker_site=site) for n, seed in ((1000, 1), (400, 99))]
        run = audited(folder / name.replace(" ", "-"), *studies, skip=list(OTHERS))
        level = next(one for one in run.summary.shortcut.subgroup_differences if one.column.startswith("site"))
        made[name] = {"word": level.conclusion, **level.difference.model_dump()}
    return made


def strategies_of(folder: Path, seeds: int = 10) -> Told:
    """How often two ways of looking are claimed, and how well they are the two there are."""
    made: Told = {}
    for name, mixed in (("two ways", True), ("one way", False)):
        for kind in (GradCAM, IntegratedGradients):
            claims, found, times = [], [], []
            for seed in range(seeds if not mixed else 3):
                net = train_shortcut_model(draw_study(1000, 1 + seed, mixed=mixed), seed)
                study = draw_study(400, 99 + seed, mixed=mixed)
                positive = np.flatnonzero(study.labels == 1)
                tool = kind(net)
                heat = tool.attribute(to_study_input(study.images[positive]), 1).numpy()
                judged = cluster_maps(heat, [study.patients[i] for i in positive])
                claims.append(judged.n_clusters)
                if mixed:
                    from sklearn.metrics import adjusted_rand_score

                    labels = judged.partitions[2].labels
                    known = labels >= 0
                    found.append(float(adjusted_rand_score(study.has_marker[positive][known], labels[known])))
                    times.append(_times(heat, study.marker_masks.any(0), labels))
            made[f"{name}, {kind.name}"] = {"claimed": claims, "ari": found, "mass_at_tokens_times": times}
    return made


def _times(heat: Any, place: Any, labels: Any) -> float:
    """How many times more of the maps lies in a place in the one cluster than in the other."""
    on_input = [Placement.identity(place.shape).project(one)[0] for one in heat]
    shares = np.array([compute_mass_share(np.asarray(one, np.float64), place) for one in on_input])
    low, high = sorted(float(np.nanmean(shares[labels == one])) for one in (0, 1))
    return high / low


def volumes(folder: Path) -> Told:
    """The word on the marker of clean and confounded nets of volumes."""
    made = {}
    for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
        net = train_shortcut_model(draw_volume_study(640, 100, p))
        where = folder / name
        config = build_demo_config(write_study(draw_volume_study(240, 200, p), where), write_weights(net, where), p)
        config["model"]["source"] = f"{_factory(where)}:create_shortcut_volume_model"
        config |= {
            "sample_sizes": FEW,
            "skip": list(OTHERS),
            "regions": {"columns": {"token": "region_marker"}, "organ": "region_lungs"},
        }
        run = audit.run_audit(config, where / "audit")
        made[name] = {
            one.question + " " + one.qualifier: one.conclusion
            for one in run.verdicts
            if one.question in ("shortcut", "performance")
        }
    return made


def _factory(folder: Path) -> Path:
    """A file that says how volumes enter the net: as they are."""
    file = folder / "net.py"
    file.write_text(
        "from camscope.images.scans.scan_preprocess import ScanPreprocess\n"
        "from benchmarks.volume_study import create_shortcut_volume_model\n"
        "PREPROCESSING = {'create_shortcut_volume_model': ScanPreprocess()}\n"
        "CATEGORIES = {'create_shortcut_volume_model': ['clear', 'lesion']}\n"
        "TARGET_LAYER = {'create_shortcut_volume_model': 'layer3'}\n"
    )
    return file


def timed(folder: Path) -> Told:
    """Seconds of an audit of 500 images with every stage, as `build_config` would set it up."""
    config = write_demo_study(folder, CONFOUNDED_PROBABILITY, n_images=500)
    plain = config.model_dump()
    plain["sample_sizes"] = {}
    foreseen: list[float] = []
    begun = time.perf_counter()
    run = audit.run_audit(plain, folder / "audit", on_estimate=lambda each: foreseen.append(sum(each.values())))
    took = time.perf_counter() - begun
    page = (folder / "audit" / "report.html").stat().st_size
    return {"seconds": took, "foreseen": foreseen, "page_bytes": page, "verdicts": len(run.verdicts)}


def scale(folder: Path, images: int = 10_000) -> Told:
    """Maps and where they lie, of 10,000 files, beside a bare loop over the same inputs; memory at the start and the end."""
    study = draw_study(500, 99, CONFOUNDED_PROBABILITY)
    net = train_shortcut_model(draw_study(1000, 1, CONFOUNDED_PROBABILITY))
    write_study(study, folder)
    weights = write_weights(net, folder)
    rows = (folder / "manifest.csv").read_text().splitlines()
    many = [rows[0].replace("label", "finding")] + [
        f"{i:06d},{rows[1 + i % 500].split(',', 1)[1]}" for i in range(images)
    ]
    (folder / "many.csv").write_text("\n".join(many) + "\n")
    model = load_model("camscope.phantom.shortcut_study:create_shortcut_model", weights=weights)
    files, used = sorted((folder / "images").iterdir()), list[int]()

    def mapped() -> None:
        used.clear()
        told = partial(_note, used)
        run_batch(GradCAM(model), folder / "many.csv", folder / "maps", [1], overwrite=True, on_progress=told)

    rounds = [(_timed(lambda: _bare(model, files, images)), _timed(mapped)) for _ in range(ROUNDS)]  # in turns
    metrics = _timed(
        lambda: evaluate(BatchRun(folder / "maps"), folder / "values", "mask", ("energy-inside", "enrichment"))
    )
    bare, maps = (median(times) for times in zip(*rounds, strict=True))
    return {
        "images": images, "bare_loop": bare, "maps": maps, "metrics": metrics, "rounds": rounds,
        "maps_over_bare": median(own / other for other, own in rounds),
        "memory_at_a_tenth": used[len(used) // 10], "memory_at_the_end": used[-1],
    }  # fmt: skip


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _note(used: list[int], outcome: BatchOutcome) -> None:
    used.append(_memory())


def _bare(model: torch.nn.Module, files: list[Path], images: int) -> None:
    """Reading, one forward and one backward pass of batches of 16, by a single thread as scripts have it."""
    for start in range(0, images, 16):
        read = [np.asarray(Image.open(files[(start + i) % len(files)])) for i in range(16)]
        part = to_study_input(np.stack(read)).requires_grad_()
        F.log_softmax(model(part), 1)[:, 1].sum().backward()


def _memory() -> int:
    """Bytes that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def corrupt(folder: Path) -> Told:
    """500 images, of which 2 % are damaged in five ways."""
    config = write_demo_study(folder, UNBIASED_PROBABILITY, n_images=500)
    files = sorted((folder / "images").iterdir())[::50]
    damages: list[Callable[[Path], Any]] = [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"no picture"),
        lambda file: file.write_bytes(file.read_bytes()[:80]),
        lambda file: file.unlink(),
        lambda file: file.write_bytes(file.read_bytes()[:30] + b"\xff" * 40 + file.read_bytes()[70:]),
    ]
    for n, file in enumerate(files):
        damages[n % 5](file)
    run = audit.run_audit({**config.model_dump(), "skip": list(OTHERS)}, folder / "audit")
    listed = (run.folder / "failures.csv").read_text("utf-8-sig").splitlines()[1:]
    return {
        "damaged": len(files),
        "listed": run.n_failures,
        "reasons": sorted({one.split(",", 2)[2] for one in listed}),
    }


def killed(folder: Path, seed: int = 0) -> Told:
    """Which stages were done when it was killed, and whether it ended in the same bytes as one that was not."""
    config = write_demo_study(folder, CONFOUNDED_PROBABILITY, n_images=100).model_dump()
    config |= {
        "sample_sizes": FEW,
        "explain": {**config["explain"], "settings": {"integratedgradients": {"n_steps": 4}}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    begun = time.perf_counter()
    _started(folder, "whole").wait()
    took, random, done = time.perf_counter() - begun, np.random.default_rng(seed), []
    for _ in range(3):
        process = _started(folder, "killed")
        time.sleep(IMPORTS + random.uniform(0, took / 3))
        process.kill()
        process.wait()
        done.append(sorted(one.stem for one in (folder / "killed" / "stages").glob("*.json")))
    _started(folder, "killed").wait()
    whole, other = (digest_outputs(folder / name) for name in ("whole", "killed"))
    differ = sorted(name for name in {*whole, *other} if whole.get(name) != other.get(name))
    return {"seconds": took, "done_when_killed": done, "files": len(whole), "differ": differ}


def _started(folder: Path, name: str) -> "subprocess.Popen[bytes]":
    code = "import json, sys; from camscope import audit; audit.run_audit(json.load(open(sys.argv[1])), sys.argv[2])"
    return subprocess.Popen([sys.executable, "-c", code, str(folder / "config.json"), str(folder / name)])


ALL: dict[str, Callable[[Path], Told]] = {
    "subgroups": subgroups, "strategies": strategies_of, "volumes": volumes, "time": timed, "scale": scale, "corrupt": corrupt,
    "killed": killed,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run some, print what they found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_acceptance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--json", type=Path, help="also into this file")
    chosen = parser.parse_args(arguments)
    made = {}
    for name in chosen.names or ALL:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            made[name] = ALL[name](Path(folder))
            print(f"{name} ({time.perf_counter() - begun:.0f} s): {json.dumps(made[name], indent=2)}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(made, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
