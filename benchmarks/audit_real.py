"""Two audits of trained networks on real images: chest X-rays whose classes come from different hospitals, and blood cells.

    python -m benchmarks.audit_real DATA -o FOLDER

DATA holds `models.py`, `chest_xray` and `blood_cells` with COCO-like `annotations.json`. Prints the share of the
chest network's maps on the radiologists' opacities next to the opacities' share of the image, and the same for white
cells. Every estimate is saved in benchmarks/results/audit_real.json: numbers only.
"""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from camscope import audit
from camscope.audit import AuditRun
from camscope.audit.core.stage_result_schema import EstimateSummary

RESULTS = Path(__file__).parent / "results" / "audit_real.json"
SETTINGS = {"integratedgradients": {"n_steps": 8}}
SMALL = {"faithfulness": 16, "robustness": 12, "sanity": 12, "gallery": 12}  # enough patients for a word
CATEGORIES = {
    "chest_xray": ("no finding", "other pneumonia", "COVID-19"),
    "blood_cells": ("polynuclear", "mononuclear"),
}
NAMED = """from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("models", {file!r})
models = module_from_spec(spec)
spec.loader.exec_module(models)
{name}, PREPROCESSING, TARGET_LAYER = models.{name}, models.PREPROCESSING, models.TARGET_LAYER
CATEGORIES = {{{name!r}: {categories!r}}}
"""  # a model that does not name its classes, with their names


def chest_rows(data: Path) -> list[dict[str, str]]:
    """The manifest of the chest X-rays, with the radiologists' masks."""
    known = json.loads((data / "chest_xray" / "annotations.json").read_bytes())
    names = {one["id"]: one["name"] for one in known["categories"]}
    masks = {(one["image_id"], names[one["category_id"]]): one["mask_file"] for one in known["annotations"]}

    def place(image: Mapping[str, Any], name: str) -> str:
        found = masks.get((image["id"], name))
        return f"chest_xray/{found}" if found else ""

    return [
        {
            "id": f"x-ray {image['id']:02d}",
            "path": f"chest_xray/images/{image['file_name']}",
            "label": _label(image["finding"]),
            "view": image["view"],
            "opacity": place(image, "opacity"),
            "lungs": place(image, "lungs"),
            "devices": place(image, "devices"),
        }
        for image in known["images"]
    ]


def chest(data: Path, folder: Path) -> dict[str, Any]:
    """COVID-19 against other pneumonias; ground truth: opacities, organ: lungs."""
    config = _config(data, write_table(chest_rows(data), folder / "chest.csv"), "chest_xray", "COVID-19")
    config["title"], config["intended_use"] = "Chest X-rays, three classes", "COVID-19, or another pneumonia?"
    config["data"] |= {"ground_truth": "opacity", "subgroups": ["view"]}
    config["regions"] = {"modality": "xray", "organ": "lungs", "columns": {"devices": "devices"}}
    return config


def _label(finding: str) -> str:
    nothing, other, covid = CATEGORIES["chest_xray"]
    return covid if "COVID" in finding else nothing if finding == "No Finding" else other


def blood(data: Path, folder: Path) -> dict[str, Any]:
    """Mononuclear white cells against polynuclear ones; ground truth: the box of the white cell."""
    known = json.loads((data / "blood_cells" / "annotations.json").read_bytes())
    boxes: dict[int, list[list[int]]] = {}
    for one in known["annotations"]:
        if one["category_id"] == 1:
            boxes.setdefault(one["image_id"], []).append(one["bbox"])
    rows = [
        {
            "id": f"smear {image['id']:03d}",
            "path": f"blood_cells/images/{image['file_name']}",
            "label": CATEGORIES["blood_cells"][image["label"]],
            "cell": json.dumps(boxes.get(image["id"], [])),
        }
        for image in known["images"]
    ]
    config = _config(data, write_table(rows, folder / "blood.csv"), "blood_cells", "polynuclear")
    config["title"], config["intended_use"] = (
        "Blood smears, two classes",
        "Has the white cell a nucleus of several lobes?",
    )
    config["data"] |= {"ground_truth": "cell"}
    config["regions"] = {"presets": ["border", "corners"]}
    return config


def _config(data: Path, manifest: Path, model: str, finding: str) -> dict[str, Any]:
    source = manifest.with_suffix(".py")
    source.write_text(NAMED.format(file=str(data / "models.py"), name=model, categories=CATEGORIES[model]))
    return {
        "data": {"manifest": str(manifest), "root": str(data), "label": "label"},
        "model": {"source": f"{source}:{model}"},
        "explain": {"findings": [finding], "settings": SETTINGS},
        "sample_sizes": SMALL,
    }


def write_table(rows: Sequence[Mapping[str, str]], path: Path) -> Path:
    """Write rows as a CSV file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        sheet = csv.DictWriter(file, list(rows[0]))
        sheet.writeheader()
        sheet.writerows(rows)
    return path


def told(name: str, run: AuditRun) -> None:
    """Answers, and what share of the maps lies in each region, beside the region's share of the image."""
    answers = run.summary.predict.performance[0]
    print(
        f"\n{name}: AUROC {answers.auroc.value:.3f}, {answers.n_positives} with the finding, {answers.n_negatives} without"
    )
    for one in run.summary.localization.metric_summaries:
        if one.metric in ("energy-inside", "enrichment", "pointing-game") and one.value.value is not None:
            interval = f"[{one.value.low:.3f}, {one.value.high:.3f}]" if one.value.low is not None else ""
            print(f"  {one.metric:>14} {one.method:<22} {one.value.value:.3f} {interval} n={one.value.n_values}")
    for mass in run.summary.shortcut.attribution_mass:
        if mass.share.value is not None and mass.enrichment.value is not None:
            print(f"  {mass.method:<20} in {mass.region:<18} {mass.share.value:.3f}, enrichment {mass.enrichment.value:.2f} "
                  f"(other images {mass.share.baseline:.3f}) n={mass.share.n_values}")  # fmt: skip
    for verdict in run.verdicts:
        print(f"  {verdict.conclusion:<14} {verdict.claim} {verdict.reason}")
    print(f"  {run.report_path}")


def numbers(run: AuditRun) -> dict[str, Any]:
    """Every estimate with its interval, and the words of the verdicts."""
    found, stages = run.summary, ("localization", "faithfulness", "robustness")
    return {
        "auroc": [_ends(one.auroc) for one in found.predict.performance],
        **{
            name: {
                " · ".join(filter(None, (one.metric, one.method, one.imputation))): _ends(one.value)
                for one in getattr(found, name).metric_summaries
            }
            for name in stages
        },
        "masses": {f"{one.region} · {one.method}": _ends(one.share) for one in found.shortcut.attribution_mass},
        "verdicts": {one.claim: one.conclusion for one in run.verdicts},
    }


def _ends(one: EstimateSummary) -> list[float | int | None]:
    return [one.value, one.low, one.high, one.n_values]


def main(arguments: list[str] | None = None) -> None:
    """Both audits, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_real", description=__doc__)
    parser.add_argument("data", type=Path, help="the folder of models and images")
    parser.add_argument("-o", "--output", type=Path, default=Path("audit-real"), help="where the audits go")
    parser.add_argument("--only", choices=("chest", "blood"), help="one of the two")
    chosen = parser.parse_args(arguments)
    kept = json.loads(RESULTS.read_bytes()) if RESULTS.is_file() else {}
    for name, made in (("chest", chest), ("blood", blood)):
        if chosen.only in (None, name):
            run = audit.run_audit(
                made(chosen.data.resolve(), chosen.output), chosen.output / name, on_progress=_progress
            )
            told(name, run)
            kept[name] = numbers(run)
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _progress(stage: str, done: int, total: int) -> None:
    if done == 0:
        print(f"  {stage}", flush=True)


if __name__ == "__main__":
    main()
