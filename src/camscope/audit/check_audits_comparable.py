"""Check that two audits are comparable: only the model may differ."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from camscope.audit.core.config import Config
from camscope.audit.finished_audit import AuditRun
from camscope.audit.provenance import provenance_file
from camscope.audit.provenance.digests import find_changed_images
from camscope.errors import InputError
from camscope.plurals import plural
from camscope.read_untrusted_files import read_errors_converted, read_json

VALUE_SETTINGS = (
    "seed", "imputations", "data", "explain.findings", "regions", "sample_sizes",
)  # fmt: skip  # settings that change which images are sampled, or how they are edited
EXEMPT_SETTINGS = (
    "data.manifest", "data.root", "data.masks_root", "data.annotation_protocol", "data.subgroups", "sample_sizes.gallery",
)  # fmt: skip  # exceptions, which change no compared number
MODEL_SPECIFIC_SETTINGS = ("explain.layer", "model.preprocess", "model.outputs")  # may differ between kinds of model
VERDICT_SETTINGS = ("margins", "n_resamples", "skip")  # change verdicts and intervals, but no value
Settings = Mapping[str, Any]
Difference = tuple[str, Any, Any]  # the name of a setting, and its value in either audit


def check_comparable_and_list_notes(first: AuditRun, second: AuditRun) -> tuple[str, ...]:
    """Return notes on settings that may change verdicts. Raise an InputError if two audits cannot be compared.

    Different images, masks, imputations, sample sizes, seeds, regions or method settings change the numbers of the same model.
    """
    runs = first, second
    records = [_load_provenance(run) for run in runs]
    if first.summary.data_digest != second.summary.data_digest:
        raise InputError("the audits use different manifests; expected two audits of the same images")
    _check_same_images(records[0]["rows"], records[1]["rows"])
    if records[0]["masks"] != records[1]["masks"]:
        raise InputError("the audits use different masks; expected the same masks of findings and regions")
    configs = [_flatten_settings(_load_config(run, record)) for run, record in zip(runs, records, strict=True)]
    for name, value, other_value in [*_find_forbidden_differences(*configs), *_find_method_differences(first, second)]:
        raise InputError(
            f"the two audits have different settings: {name} is {value} in the first and {other_value} in the second; "
            "audit both models with the same settings"
        )
    names = [", ".join(run.summary.resolve.findings) for run in runs]
    if names[0] != names[1]:  # one model has class names, and the other has none
        raise InputError(
            f"the findings are {names[0]} in the first and {names[1]} in the second: give both models the same names"
        )
    notes = [
        f"{name} is {value} in the first and {other_value} in the second: this alone may change verdicts"
        for name, value, other_value in _iter_differences(*configs)
        if _has_prefix(name, VERDICT_SETTINGS)
    ]
    if records[0]["code"] != records[1]["code"]:
        notes.append("the two audits were run with different versions of camscope, which may explain differences")
    return tuple(notes)


def _load_provenance(run: AuditRun) -> Mapping[str, Any]:
    """Read the provenance record of an audit. Raise an InputError if it is missing or invalid."""
    message = f"{run.folder}: its {provenance_file.PROVENANCE_FILE} is missing or invalid; run the audit again"
    with read_errors_converted(message):
        record: Mapping[str, Any] = read_json(run.folder / provenance_file.PROVENANCE_FILE, message)
        record["masks"], record["code"]
        if not isinstance(record["rows"], Mapping) or not isinstance(record["config"], Mapping):
            raise TypeError("rows and config must be tables")
    return record


def _check_same_images(first: Mapping[str, str | None], second: Mapping[str, str | None]) -> None:
    """Raise an InputError if the audits differ in the names or the digests of their images."""
    if first.keys() != second.keys():
        raise InputError("the audits use different image names; use the same profile and manifest for both")
    if changed := find_changed_images(first, second):
        raise InputError(
            f"{len(changed)} of {plural(len(first), 'image')} differ in the second audit; expected two audits of the same "
            "images"
        )


def _load_config(run: AuditRun, record: Mapping[str, Any]) -> Settings:
    """Return the config in the provenance record, with redacted paths. Raise an InputError if it is invalid."""
    try:
        return Config.model_validate(record["config"]).to_redacted_dict()
    except ValidationError:
        raise InputError(
            f"{run.folder}: the config in its {provenance_file.PROVENANCE_FILE} is invalid; run the audit again"
        ) from None


def _flatten_settings(settings: Settings, prefix: str = "") -> Settings:
    """Flatten nested settings into one mapping with dotted names, such as `sample_sizes.sanity`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_table = isinstance(value, dict) and value
        flat |= _flatten_settings(value, f"{prefix}{name}.") if is_table else {prefix + name: value}
    return flat


def _iter_differences(first: Settings, second: Settings) -> Iterator[Difference]:
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def _find_forbidden_differences(first: Settings, second: Settings) -> Iterator[Difference]:
    """Yield the settings that differ between two audits but must be equal."""
    functions = {str(settings["model.source"]).rpartition(":")[2] for settings in (first, second)}
    relevant = (*VALUE_SETTINGS, *MODEL_SPECIFIC_SETTINGS) if len(functions) == 1 else VALUE_SETTINGS
    for name, value, other_value in _iter_differences(first, second):
        if _has_prefix(name, relevant) and not _has_prefix(name, EXEMPT_SETTINGS):
            yield name, value, other_value


def _has_prefix(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _find_method_differences(first: AuditRun, second: AuditRun) -> Iterator[Difference]:
    """Yield the method parameters that differ between two audits. Different layers are allowed and not listed."""
    settings, other_settings = (
        {explainer.title: explainer.settings for explainer in run.summary.resolve.explainers} for run in (first, second)
    )
    for title in settings.keys() & other_settings.keys():
        for name, value, other_value in _iter_differences(settings[title], other_settings[title]):
            if name != "layer":
                yield f"{name} of {title}", value, other_value
