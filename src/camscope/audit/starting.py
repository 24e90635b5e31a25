"""starting: a config to begin with, from what a manifest and a model say of themselves, with a word on every setting."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from camscope.audit.config import Margins, Sizes
from camscope.batch import manifest_of
from camscope.cards import card_of
from camscope.errors import InputError
from camscope.models import load_model

LABEL = ("label", "target", "class", "diagnosis")
PATIENT = ("patient", "patient_id", "subject", "subject_id")
SUBGROUPS = ("site", "hospital", "scanner", "manufacturer", "sex", "age_group", "view", "ethnicity")
SPLIT = ("split", "fold")
EVIDENCE = ("mask", "mask_path", "box", "boxes", "points")
ORGAN = ("region_lungs", "region_organ", "region_body", "region_brain")
REGION = "region_"
NEGATIVE = ("no finding", "clear", "normal", "healthy", "negative", "background", "none")
MOST = 20  # levels of a subgroup


def init(
    manifest: str,
    model: str,
    *,
    weights: str | None = None,
    root: str | None = None,
    findings: Sequence[str] = (),
    modality: str | None = None,
    relative_to: Path | None = None,
) -> str:
    """The text of a config. What could not be guessed is a comment that says what to write; InputError without labels."""
    made = manifest_of(manifest, root, strict=False)
    names = made.table.column_names
    label = _first(names, LABEL)
    if label is None:
        raise InputError(
            f"no column of labels ({', '.join(LABEL)}) among {', '.join(names)}: rename it, or write the config by hand"
        )
    card = card_of(load_model(model, weights=weights))
    said = {str(one) for one in made.table[label].to_pylist() if one not in (None, "")}
    asked = list(findings) or _findings((card.categories if card else None) or (), said)
    folder = relative_to or Path.cwd()
    return "\n".join(
        [
            *HEAD,
            *_data(made.table, _near(manifest, folder), None if root is None else _near(root, folder), label),
            *_model(_near_code(model, folder), None if weights is None else _near(weights, folder)),
            *_explain(asked),
            *_regions(names, modality or "any"),
            "[margins]",
            *_fields(Margins(), MARGINS),
            "",
            "[sizes]  # on how many images the costly stages work",
            *_fields(Sizes(), {}),
            "",
            *_report(names),
            "",
        ]
    )


HEAD = (
    "# What camscope audit run reads. Margins are declared here, before anybody looks: their digest goes into the report.",
    'title = "Model audit"',
    'question = ""  # what the model is meant for, in a sentence',
    "seed = 0",
    'fills = ["mean", "blur"]  # what is seen where something is removed: two of mean, blur, noise, zero, inpainting, or more',
    "# skip = []  # stages to leave out, of localise, faithfulness, sanity, robustness, shortcut: the report says so",
    "",
)


def _data(table: Any, manifest: str, root: str | None, label: str) -> Iterator[str]:
    names = table.column_names
    subgroups = [name for name in SUBGROUPS if name in names and 1 < _levels(table[name]) <= MOST]
    split = _first(names, SPLIT)
    yield "[data]"
    yield f"manifest = {_text(manifest)}"
    if root is not None:
        yield f"root = {_text(root)}"
    yield f"label = {_text(label)}  # each image's class, by name or number"
    yield _optional("patient", _first(names, PATIENT), "whose image it is: intervals draw patients whole")
    yield f"subgroups = {_list(subgroups)}  # columns by which answers and maps are compared"
    if split is not None:
        yield f"split = {_text(split)}"
        yield 'use = "test"  # only rows of this split'
    yield _optional(
        "evidence", _first(names, EVIDENCE), "where findings are: a column of masks or boxes, a folder, or a COCO file"
    )
    yield ""


def _model(source: str, weights: str | None) -> Iterator[str]:
    yield "[model]"
    yield f"source = {_text(source)}  # a file of Python that is named here is executed"
    if weights is not None:
        yield f"weights = {_text(weights)}"
    yield '# preprocess = "imagenet"  # if the model does not say how images enter it'
    yield 'outputs = "softmax"  # or "sigmoid": findings of which each has an answer of its own'
    yield ""


def _explain(findings: Sequence[str]) -> Iterator[str]:
    yield "[explain]"
    yield f"findings = {_list(findings)}"
    yield 'methods = ["gradcam", "integratedgradients"]  # a CAM misses small markers: keep a finer one beside it'
    yield '# layer = "layer4"  # default: the model\'s own'
    yield "# settings = { integratedgradients = { steps = 16 } }"
    yield ""


def _regions(names: Sequence[str], modality: str) -> Iterator[str]:
    organ = _first(names, ORGAN)
    markers = [name for name in names if name.startswith(REGION) and name != organ]
    columns = ", ".join(f"{name.removeprefix(REGION)} = {_text(name)}" for name in markers)
    yield "[regions]  # where the model should not need to look"
    yield f"modality = {_text(modality)}  # whose usual regions: xray, ct, mri, dermoscopy, retina, pathology, any"
    yield _optional("organ", organ, "a column of masks of what the finding lies in")
    words = "masks of markers that some images have"
    yield f"columns = {{ {columns} }}  # {words}" if markers else f'# columns = {{ token = "region_token" }}  # {words}'
    yield ""


def _report(names: Sequence[str]) -> Iterator[str]:
    yield "[report]"
    yield 'profile = "research"  # names no file, and no column that is not listed; "clinical" names them'
    yield "columns = []  # may be shown, of " + ", ".join(name for name in names if name not in ("row", "id", "path"))


MARGINS = {
    "effect": "of an intervention, in standard deviations of the log odds",
    "auroc": "a difference between subgroups that would matter",
    "useful": "the AUROC that a model has to exceed",
    "blanked": "the AUROC above which a model without the organ still answers",
    "enrichment": "of a region in a map, where 1 is chance",
    "mass": "a difference of a map's share between subgroups",
    "robust": "rank correlation of maps under changes that do not matter",
}


def _findings(categories: Sequence[str], said: set[str]) -> list[str]:
    """The classes that labels name, but those that say that nothing was found."""
    if categories:
        named = [one for n, one in enumerate(categories) if one in said or str(n) in said]
        return [one for one in named if one.lower() not in NEGATIVE] or named[-1:] or list(categories[-1:])
    numbers = sorted(one for one in said if one.isdecimal())
    return [one for one in numbers if one != "0"] or ["1"]


def _first(names: Iterable[str], known: Sequence[str]) -> str | None:
    there = set(names)
    return next((one for one in known if one in there), None)


def _levels(column: Any) -> int:
    return len({one for one in column.to_pylist() if one is not None})


def _optional(name: str, value: str | None, why: str) -> str:
    return f'# {name} = ""  # {why}' if value is None else f"{name} = {_text(value)}  # {why}"


def _fields(part: Any, words: dict[str, str]) -> list[str]:
    return [
        f"{name} = {value}" + (f"  # {words[name]}" if name in words else "")
        for name, value in part.model_dump().items()
    ]


def _near(place: str, folder: Path) -> str:
    """A path as seen from the folder of the config."""
    if "://" in place or place == "random":
        return place
    return Path(os.path.relpath(Path(place).resolve(), folder.resolve())).as_posix()


def _near_code(source: str, folder: Path) -> str:
    file, colon, function = source.rpartition(":")
    return f"{_near(file, folder)}:{function}" if colon and file.endswith(".py") else source


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_text, values)) + "]"
