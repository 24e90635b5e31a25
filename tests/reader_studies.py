"""Reader studies for tests: a run of radiographs whose names are canaries, forms without images, and filled forms."""

import csv
import json
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from camscope import BatchRun, GradCAM, load_model, run_batch
from camscope.batch.reader_study import study_files
from camscope.batch.reader_study.study_design import draw_readings
from camscope.phantom import draw_radiograph

CANARY = "KNR917VOGL"


def run_of_canaries(folder: Path, n_patients: int = 6, images_per_patient: int = 2) -> BatchRun:
    """A run whose files, folders, columns and image metadata hold the name of a patient."""
    source = folder / f"clinic {CANARY}"
    source.mkdir(parents=True)
    with (source / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "patient", "remark"])
        for n in range(n_patients * images_per_patient):
            phantom, metadata = draw_radiograph(n, n % 2), PngImagePlugin.PngInfo()
            metadata.add_text("Patient", CANARY)
            name = f"{CANARY} {n}.png"
            Image.fromarray(phantom.image).save(source / name, pnginfo=metadata)
            table.writerow([name, phantom.name, f"{CANARY}{n // images_per_patient}", CANARY])
    run_batch(GradCAM(load_model("phantom")), source / "list.csv", folder / "run")
    return BatchRun(folder / "run")


def study_without_images(
    folder: Path,
    truths: list[str],
    patients: list[int],
    n_readers: int,
    conditions: tuple[str, ...] = ("none", "map", "control"),
    *,
    design: str = "crossed",
    model_answers: list[str] | None = None,
    seed: int = 0,
) -> Path:
    """The key and the empty forms of a study, as the export writes them, but without images."""
    answers = sorted(set(truths))
    study = {
        "study": "0123456789abcdef", "schema": study_files.STUDY_SCHEMA, "n_readers": n_readers, "design": design,
        "controls": "other-case", "seed": seed, "conditions": list(conditions), "answers": answers, "method": "gradcam",
        "layer": None, "model": "m", "run": "r", "positive_answer": answers[-1] if len(answers) == 2 else None,
        "n_cases": len(truths), "n_patients": len(set(patients)),
    }  # fmt: skip
    key = []
    for reading in draw_readings(patients, n_readers, conditions, design, seed):
        case = reading.case
        key.append(
            {
                "reader": reading.reader,
                "session": reading.session,
                "case": f"{reading.place:03d}",
                "condition": reading.condition,
                "row": case,
                "patient": patients[case],
                "truth": truths[case],
                "model_answer": model_answers[case] if model_answers else "",
                "control_row": "",
            }
        )
        form = folder / f"reader-{reading.reader}" / f"session-{reading.session}" / "form.csv"
        if not form.exists():
            form.parent.mkdir(parents=True)
            token = study_files.compute_form_token(study["study"], reading.reader, reading.session)
            form.write_bytes(study_files.format_empty_form(token, len(truths)))
    (folder / "key").mkdir()
    (folder / "key" / "study.json").write_text(json.dumps(study))
    (folder / "key" / "key.csv").write_bytes(study_files.format_csv(study_files.KEY_COLUMNS, key))
    return folder


def read_table(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, lines: list[dict[str, str]]) -> None:
    """Write the lines of a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def fill_forms(folder: Path, answer) -> list[dict[str, str]]:
    """Fill in all forms. `answer` gets a line of the key, and returns answer, confidence and seconds. Returns all readings."""
    readings = []
    for reader, session in sorted(
        {(line["reader"], line["session"]) for line in read_table(folder / "key" / "key.csv")}
    ):
        path = folder / f"reader-{reader}" / f"session-{session}" / "form.csv"
        by_case = {
            line["case"]: line
            for line in read_table(folder / "key" / "key.csv")
            if (line["reader"], line["session"]) == (reader, session)
        }
        lines = read_table(path)
        for line in lines:
            entry = by_case[line["case"]]
            line["answer"], line["confidence"], line["seconds"] = answer(entry)
            readings.append({**entry, **line})
        write_table(path, lines)
    return readings


def random_readers(accuracy: dict[str, float], seed: int = 0, wrong: str | None = None):
    """Readers with a known accuracy under each condition, who differ, on cases that differ."""
    random = np.random.default_rng(seed)
    skill, ease = random.normal(0, 0.05, 100), random.normal(0, 0.1, 10_000)

    def answer(entry: dict[str, str]) -> tuple[str, str, str]:
        share = accuracy[entry["condition"]] + skill[int(entry["reader"])] + ease[int(entry["row"])]
        is_right = random.random() < share
        other = wrong or {"no": "yes", "yes": "no"}[entry["truth"]]
        confidence = random.integers(30, 101) if is_right else random.integers(0, 81)
        return entry["truth"] if is_right else other, str(confidence), f"{np.exp(random.normal(2.5, 0.4)):.1f}"

    return answer
