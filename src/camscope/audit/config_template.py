"""A config to begin with, written from a manifest and a model.

- starting: a config to begin with, from what a manifest and a model say of themselves, with a word on every setting.
- findings: what a manifest has labels of, among the classes of a model.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from camscope.audit.core.config import NAMING, Config, Fill, Margins, Modality, Sizes
from camscope.audit.core.subgroup_levels import AGE, BANDS, FOR_A_WORD, MOST, label
from camscope.audit.shortcuts.reliance import patients_for
from camscope.batch import Manifest, batch_worker, manifest_of
from camscope.batch.manifest import TABLES, arrow
from camscope.batch.sources import LIBRARIES
from camscope.errors import InputError
from camscope.model_card import card_of
from camscope.models import load_model
from camscope.plurals import plural
from camscope.safe_files import no_file

LABEL = ("label", "target", "class", "diagnosis")
PATIENT = ("patient", "patient_id", "subject", "subject_id")
SUBGROUPS = ("site", "hospital", "scanner", "manufacturer", "sex", "age_group", *AGE, "view", "ethnicity")
SPLIT = ("split", "fold")
EVIDENCE = ("mask", "mask_path", "box", "boxes", "points")
ORGAN = ("region_lungs", "region_organ", "region_body", "region_brain")
REGION = "region_"


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
    """The text of a config, which holds. What could not be guessed is a comment that says what to write.

    InputError where there are neither labels nor columns of 0 and 1 for classes of the model, and for an unknown modality.
    """
    if modality is not None and modality not in (known := get_args(Modality)):
        raise InputError(f"no modality {modality!r}; there are {', '.join(known)}")
    made = _read(manifest, root)
    names, folder = made.table.column_names, relative_to or Path.cwd()
    label = _first(names, LABEL)
    card = card_of(load_model(model, weights=weights))
    categories = (card.categories if card else None) or ()
    labels = {} if label is not None else labels_of(_own(made.table), categories, findings, LABEL)
    asked = list(labels) if label is None else list(findings) or single(made.table[label], categories)
    if label is not None:
        expect_told(made.table[label], categories, asked)
    text = "\n".join(
        [
            *HEAD,
            *_data(
                made.table, _near(manifest, folder), None if root is None else _near(root, folder), label, labels, asked
            ),
            *_model(
                _near_code(model, folder), None if weights is None else _near(weights, folder), several=bool(labels)
            ),
            *_explain(asked),
            *_regions(names, modality or "any"),
            "[margins]",
            *_fields(Margins(), MARGINS),
            "",
            f"[sizes]  # on how many images the costly stages work; a verdict needs {FOR_A_WORD} patients with the finding",
            *_fields(Sizes(), {}),
            "",
            *_report(names),
            "",
        ]
    )
    Config.parsed(text, folder)
    return text


HEAD = (
    "# What camscope audit run reads. Margins are declared here, before anybody looks: their digest goes into the report.",
    'title = "Model audit"',
    'question = ""  # what the model is meant for, in a sentence',
    "seed = 0",
    "# replicates = 2000  # resamples of the bootstrap over patients; the report says which intervals rest on it",
    f'fills = ["mean", "blur"]  # what is seen where something is removed: two of {", ".join(get_args(Fill))}, or more',
    f"# batch_size = 16  # images in a forward pass; default: {batch_worker.LEAST}, of small ones up to {batch_worker.MOST}",
    "# skip = []  # stages to leave out, of localise, faithfulness, sanity, robustness, shortcut: the report says so",
    "",
)


def _data(
    table: Any, manifest: str, root: str | None, label: str | None, labels: Mapping[str, str], asked: Sequence[str]
) -> Iterator[str]:
    names = table.column_names
    known = [name for one in SUBGROUPS if (name := _first(names, [one])) is not None]
    subgroups = [name for name in known if 1 < _levels(table[name]) <= (150 if name.lower() in AGE else MOST)]
    columns = ", ".join(f"{_text(finding)} = {_text(column)}" for finding, column in labels.items())
    yield "[data]"
    yield f"manifest = {_text(manifest)}"
    yield _optional("root", root, "the folder that paths may not leave; default: the manifest's; empty: any path")
    yield _optional("label", label, "each image's class, by name or number")
    words = "for each finding a column of 0 and 1, in place of label"
    yield f"labels = {{ {columns} }}  # {words}" if labels else f'# labels = {{ finding = "column" }}  # {words}'
    yield _optional(
        "patient", _first(names, PATIENT), "whose image it is: statistics take all images of a patient as one unit"
    )
    yield f"# columns by which answers and maps are compared; the report shows their levels, of ages {', '.join(BANDS)}"
    yield f"subgroups = {_list(subgroups)}"
    yield from _split(table)
    yield _evidence(_first(names, EVIDENCE), asked)
    yield '# beside = ""  # the folder that a relative place of evidence begins in; default: the folder of this file'
    yield 'annotated = ""  # who said which images have a finding, and where, by what standard: the report quotes it'
    yield "# images = 1000  # at most so many, drawn by the seed; default: all"
    words = "its center and width; default: the whole range of values; the window in a file's own tags is never applied"
    yield f'# window = "40,400"  # of CT, {words}'
    yield ""


def _evidence(column: str | None, asked: Sequence[str]) -> str:
    """One column is the place of one finding: of several somebody has to say which."""
    words = 'a column of masks or boxes, a folder, or { file = "annotations.json", category = "lesion" }'
    if column is None or len(asked) < 2:
        return _optional("evidence", column, words)
    return f"# evidence = {{ {_text(asked[0])} = {_text(column)} }}  # of which finding is it? {words}"


def _split(table: Any) -> Iterator[str]:
    """The rows that are audited: those of "test" where there are any, else of the value that stands last."""
    name, compute = _first(table.column_names, SPLIT), arrow("compute")
    cells = [] if name is None else compute.cast(table[name], arrow().string()).to_pylist()
    known = list(dict.fromkeys(one for one in cells if one is not None))
    if name is None or not known:
        yield '# split = ""  # a column, of which only rows of the value `use` are audited'
        yield '# use = "test"'
        return
    yield f"split = {_text(name)}"
    shown = ", ".join(map(_plain, known[:MOST])) + (", …" if len(known) > MOST else "")
    yield f"use = {_text('test' if 'test' in known else known[-1])}  # only rows of this split, of {shown}"


def _model(source: str, weights: str | None, *, several: bool) -> Iterator[str]:
    yield "[model]"
    yield f"source = {_text(source)}  # a file of Python that is named here is executed"
    yield _optional("weights", weights, "a checkpoint, loaded strictly")
    yield '# preprocess = "imagenet"  # if the model does not say how images enter it'
    if several:
        yield 'outputs = "sigmoid"  # findings of which each has an answer of its own; or "softmax": classes of which one is true'
    else:
        yield 'outputs = "softmax"  # or "sigmoid": findings of which each has an answer of its own'
    yield '# device = "cpu"  # or "cuda"'
    yield ""


def _explain(findings: Sequence[str]) -> Iterator[str]:
    yield "[explain]"
    yield f"findings = {_list(findings)}"
    yield 'methods = ["gradcam", "integratedgradients"]  # a CAM misses small markers: keep a finer one beside it'
    yield '# layer = "layer4"  # default: the model\'s own'
    yield "# settings = { integratedgradients = { steps = 16 } }  # of a method, as its class has them"
    yield ""


def _regions(names: Sequence[str], modality: str) -> Iterator[str]:
    organ = _first(names, ORGAN)
    markers = [name for name in names if name.lower().startswith(REGION) and name != organ]
    columns = ", ".join(f"{_text(name[len(REGION) :])} = {_text(name)}" for name in markers)
    yield "[regions]  # where the model should not need to look"
    yield f"modality = {_text(modality)}  # whose usual regions: {', '.join(get_args(Modality))}"
    yield '# presets = ["border", "corners"]  # or these regions, by name'
    yield _optional("organ", organ, "a column of masks of what the finding lies in")
    words = "masks of markers that some images have"
    yield f"columns = {{ {columns} }}  # {words}" if markers else f'# columns = {{ token = "region_token" }}  # {words}'
    yield ""


def _report(names: Sequence[str]) -> Iterator[str]:
    yield "[report]"
    yield 'profile = "research"  # no file names; of the manifest only subgroups and columns listed here; "clinical" shows all'
    yield "columns = []  # may be shown, of " + ", ".join(_plain(name) for name in names if name not in NAMING)
    yield "allow_pixels = false  # true: also pictures in which text may be burned in are shown"


MARGINS = {
    "effect": "of an intervention, in standard deviations of the log odds",
    "auroc": "a difference between subgroups that would matter",
    "useful": "the AUROC that a model has to exceed",
    "blanked": "the AUROC above which a model without the organ still answers",
    "enrichment": "of a region in a map, where 1 is chance",
    "mass": "a difference of a map's share between subgroups",
    "robust": "rank correlation of maps under changes that do not matter",
    "leak": "the AUROC of a probe below which the features do not tell a column, as site",
    "prevalence": "a reliance of a smaller share of patients may be missed; "
    + ", ".join(f"{share} takes {plural(patients_for(share), 'patient')}" for share in (0.05, 0.1)),
}


def _read(manifest: str, root: str | None) -> Manifest:
    """InputError where it is not there, by the name that was given: elsewhere it may name somebody."""
    if Path(manifest).suffix.lower() in TABLES and not Path(manifest).is_file():
        raise InputError(f"{manifest}: there is no such manifest: {no_file(manifest)}")
    return manifest_of(manifest, root, strict=False)


def _own(table: Any) -> Any:
    """The columns that somebody wrote: rows are numbered here, and without an id called by their path."""
    return table.drop_columns(["row", *(["id"] if table["id"].equals(table["path"]) else [])])


def _first(names: Iterable[str], known: Sequence[str]) -> str | None:
    """A column by one of the names that are known, in whatever case it is written."""
    there = {one.lower(): one for one in reversed(list(names))}
    return next((there[one] for one in known if one in there), None)


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
    """A path, of an `hf:FOLDER` too, as seen from the folder of the config."""
    library = next((one for one in LIBRARIES if place.startswith(one)), "")
    if library:
        name = place.removeprefix(library)
        return f"{library}{_near(name, folder)}" if Path(name).is_dir() else place
    if "://" in place or place == "random":
        return place
    return Path(os.path.relpath(Path(place).resolve(), folder.resolve())).as_posix()


def _near_code(source: str, folder: Path) -> str:
    file, colon, function = source.rpartition(":")
    return f"{_near(file, folder)}:{function}" if colon and file.endswith(".py") else source


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML does not take as it is


def _plain(value: str) -> str:
    """As it is, in a comment, which ends with its line."""
    return value if value.isprintable() else _text(value)


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_text, values)) + "]"


NEGATIVE = ("no finding", "clear", "normal", "healthy", "negative", "background", "none")
SHOWN = 6  # labels of a message
TRUTHS = {"0", "1", "0.0", "1.0", "true", "false", "yes", "no"}  # what a column of 0 and 1 may say, in any case


def single(column: Any, categories: Sequence[str]) -> list[str]:
    """The classes that a column of labels names, but those that say that nothing was found."""
    said = _said(column)
    if categories:
        named = [one for n, one in enumerate(categories) if one in said or str(n) in said]
        return [one for one in named if one.lower() not in NEGATIVE] or named[-1:] or list(categories[-1:])
    numbers = sorted(one for one in said if one.isdecimal())
    return [one for one in numbers if one != "0"] or ["1"]


def expect_told(column: Any, categories: Sequence[str], asked: Sequence[str]) -> None:
    """InputError where no label of a column can be a finding that is asked for."""
    said = _said(column)
    shown = ", ".join(sorted(said)[:SHOWN]) + (", …" if len(said) > SHOWN else "")
    if not categories and not all(one.isdecimal() for one in said):
        raise InputError(
            f"the labels are words ({shown}), and the model does not name its classes: write them beside it, in their order, "
            'as CATEGORIES = {"name of the function": ("clear", "lesion")} in its file, or label by number'
        )
    for one in asked:
        place = str(categories.index(one)) if one in categories else None
        if categories and place is None and not (one.isdecimal() and int(one) < len(categories)):
            raise InputError(f"the finding {one!r} is no class of the model: its classes are {', '.join(categories)}")
        names = {one, place} if place is not None else {one, *categories[int(one) : int(one) + 1]}
        if not names & said:
            raise InputError(f"no label is the finding {one!r}: the labels are {shown}")


def labels_of(table: Any, categories: Sequence[str], asked: Sequence[str], usual: Sequence[str]) -> dict[str, str]:
    """Class of the model -> its column of 0 and 1: of those that are asked, by class or column, or of all that there are.

    InputError where there is none; `usual`: what a column with each image's class would be called.
    """
    columns = {_key(name): name for name in table.column_names if _key(name) and _is_truth(table[name])}
    found = _asked(asked, categories, columns) if asked else _named(categories, columns)
    if not found:
        raise InputError(
            f"no column of labels ({', '.join(usual)}) among {', '.join(table.column_names)}, and none of 0 and 1 that is "
            "named as a class of the model: rename one, or write the config by hand"
        )
    return found


def _named(categories: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    found = {one: columns[_key(one)] for one in categories if _key(one) in columns}
    return {one: column for one, column in found.items() if one.lower() not in NEGATIVE} or found


def _asked(asked: Sequence[str], categories: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    classes = {_key(one): one for one in categories}
    for one in asked:
        if _key(one) not in columns:
            raise InputError(
                f"no column of 0 and 1 is named {one!r}; there are: {', '.join(columns.values()) or 'none'}"
            )
        if _key(one) not in classes:
            there = f"its classes are {', '.join(categories)}" if categories else "it names none: see CATEGORIES"
            raise InputError(f"which class of the model is the column {one!r}? {there}")
    return {classes[_key(one)]: columns[_key(one)] for one in asked}


def _key(name: str) -> str:
    """The letters and digits of a name: "Pleural Effusion" is pleural_effusion."""
    return "".join(one for one in name.casefold() if one.isalnum())


def _is_truth(column: Any) -> bool:
    if arrow().types.is_nested(column.type):  # boxes, points
        return False
    said = {one.lower() for one in _said(column)}
    return bool(said) and said <= TRUTHS


def _said(column: Any) -> set[str]:
    return {name for one in column.unique().to_pylist() if (name := label(one)) is not None}
