"""Check that two audits differ only in the model, so that it explains the differences of their results."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from camscope.audit.audit_run import AuditRun
from camscope.audit.core.config import Config
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import find_changed_images
from camscope.errors import InputError
from camscope.plurals import plural
from camscope.untrusted_files import read_errors_converted, read_json

VALUE_SETTINGS = (
    "seed",
    "imputations",
    "data",
    "explain.findings",
    "regions",
    "sample_sizes",
)  # settings that change which images are sampled, or how they are edited
EXEMPT_SETTINGS = (
    "data.manifest",
    "data.root",
    "data.masks_root",
    "data.annotation_protocol",
    "data.subgroups",
    "sample_sizes.gallery",
)  # exceptions, which change no compared number
MODEL_SPECIFIC_SETTINGS = (
    "explain.layer",
    "model.preprocess",
    "model.outputs",
)  # may differ between different kinds of model
VERDICT_SETTINGS = ("margins", "n_resamples", "skip")  # change verdicts and intervals, but no value
ABSENT_VERDICT = "absent"
ProvenanceRecord = Mapping[str, Any]


def check_comparable(first: AuditRun, second: AuditRun) -> tuple[str, ...]:
    """Return notes on settings that may change verdicts; raise an InputError where the audits differ in more than the model.

    Different images, masks, imputations, sample sizes, seeds, regions or method settings change the numbers of the same model.
    """
    records = [_load_provenance(run) for run in (first, second)]
    if first.summary.data_digest != second.summary.data_digest:
        raise InputError("the two audits are of different manifests: only audits of the same images are compared")
    _check_same_images(*(one["rows"] for one in records))
    if records[0]["masks"] != records[1]["masks"]:
        raise InputError("the two audits have other masks: only audits with the same evidence and regions are compared")
    configs = [
        dict(_flatten_settings(_load_redacted_config(run, one)))
        for run, one in zip((first, second), records, strict=True)
    ]
    if differences := [*_find_forbidden_differences(*configs), *_find_method_differences(first, second)]:
        name, one, other = differences[0]
        raise InputError(
            f"the two audits have different settings: {name} is {one} in the first and {other} in the second, which changes the "
            "numbers of one and the same model; audit both with the same config"
        )
    names = [", ".join(run.summary.resolve.findings) for run in (first, second)]
    if names[0] != names[1]:  # one model has class names, and the other has none
        raise InputError(
            f"the findings are {names[0]} in the first and {names[1]} in the second: give both models the same names"
        )
    return tuple(_describe_allowed_differences(configs, records))


def _load_provenance(run: AuditRun) -> ProvenanceRecord:
    message = f"{run.folder}: its {provenance.PROVENANCE_FILE} is missing or invalid; run the audit again"
    with read_errors_converted(message):
        record: ProvenanceRecord = read_json(run.folder / provenance.PROVENANCE_FILE, message)
        record["masks"], record["code"]
        if not isinstance(record["rows"], Mapping) or not isinstance(record["config"], Mapping):
            raise TypeError("its rows and its config are tables")
    return record


def _check_same_images(first: Mapping[str, str | None], second: Mapping[str, str | None]) -> None:
    if first.keys() != second.keys():
        raise InputError("the two audits use different image names; expected the same profile and the same manifest")
    if changed := find_changed_images(first, second):
        raise InputError(
            f"{len(changed)} of {plural(len(first), 'image')} differ in the second audit: only audits of the same images are "
            "compared"
        )


def _load_redacted_config(run: AuditRun, record: ProvenanceRecord) -> ProvenanceRecord:
    try:
        return Config.model_validate(record["config"]).to_redacted_dict()
    except ValidationError:
        raise InputError(f"{run.folder}: the config in its {provenance.PROVENANCE_FILE} is none") from None


def _flatten_settings(settings: ProvenanceRecord, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name, as `sample_sizes.sanity`."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flatten_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _find_forbidden_differences(first: ProvenanceRecord, second: ProvenanceRecord) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that must be equal but differs, with both values."""
    kinds = [str(first_value["model.source"]).rpartition(":")[2] for first_value in (first, second)]
    relevant = VALUE_SETTINGS if kinds[0] != kinds[1] else (*VALUE_SETTINGS, *MODEL_SPECIFIC_SETTINGS)
    for name, first_value, second_value in _iter_differences(first, second):
        if _matches_prefix(name, relevant) and not _matches_prefix(name, EXEMPT_SETTINGS):
            yield name, first_value, second_value


def _iter_differences(first: ProvenanceRecord, second: ProvenanceRecord) -> Iterator[tuple[str, Any, Any]]:
    for name in {**first, **second}:
        first_value, second_value = first.get(name), second.get(name)
        if first_value != second_value:
            yield name, first_value, second_value


def _matches_prefix(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _find_method_differences(first: AuditRun, second: AuditRun) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parameters that differ between methods of both audits, except the layer, which depends on the model."""
    settings = [
        {explainer.title: explainer.settings for explainer in run.summary.resolve.explainers} for run in (first, second)
    ]
    for title in settings[0].keys() & settings[1].keys():
        for name, first_value, second_value in _iter_differences(settings[0][title], settings[1][title]):
            if name != "layer":
                yield f"{name} of {title}", first_value, second_value


def _describe_allowed_differences(configs: list[dict[str, Any]], records: list[ProvenanceRecord]) -> Iterator[str]:
    for name, first_value, second_value in _iter_differences(*configs):
        if _matches_prefix(name, VERDICT_SETTINGS):
            yield f"{name} is {first_value} in the first and {second_value} in the second: this alone may change verdicts"
    if records[0]["code"] != records[1]["code"]:
        yield "the two audits were run with different versions of camscope, which may explain differences"
