"""alike: whether two audits were made alike, so that what differs between them is the model's doing."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from camscope.audit.audit_run import AuditRun
from camscope.audit.core.config import Config
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import find_changed_images
from camscope.data_readers import read_errors_converted, read_json
from camscope.errors import InputError
from camscope.plurals import plural

VALUE_SETTINGS = (
    "seed",
    "imputations",
    "data",
    "explain.findings",
    "regions",
    "sample_sizes",
)  # what images are drawn, what is done to them
EXEMPT_SETTINGS = (
    "data.manifest",
    "data.root",
    "data.masks_root",
    "data.annotation_protocol",
    "data.subgroups",
    "sample_sizes.gallery",
)  # and of these what changes no number that is compared
MODEL_SPECIFIC_SETTINGS = (
    "explain.layer",
    "model.preprocess",
    "model.outputs",
)  # which another kind of model needs to have otherwise
VERDICT_SETTINGS = ("margins", "n_resamples", "skip")  # what changes words and intervals, and no value
ABSENT_VERDICT = "absent"
ProvenanceRecord = Mapping[str, Any]


def check_comparable(first: AuditRun, second: AuditRun) -> tuple[str, ...]:
    """What changes verdicts, but no number, in words; InputError where the two differ in more than the model.

    Other images, masks, fills, sizes, draws, regions or settings of a method change the numbers of one and the same model.
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
            f"the two audits were made otherwise: {name} is {one} in the first and {other} in the second, which changes the "
            "numbers of one and the same model; audit both with the same config"
        )
    names = [", ".join(run.summary.resolve.findings) for run in (first, second)]
    if names[0] != names[1]:  # of classes that one model names, and the other does not
        raise InputError(
            f"the findings are {names[0]} in the first and {names[1]} in the second: give both models the same names"
        )
    return tuple(_describe_allowed_differences(configs, records))


def _load_provenance(run: AuditRun) -> ProvenanceRecord:
    message = f"{run.folder}: its {provenance.PROVENANCE_FILE} is missing, or none; start the audit again"
    with read_errors_converted(message):
        record: ProvenanceRecord = read_json(run.folder / provenance.PROVENANCE_FILE, message)
        record["masks"], record["code"]
        if not isinstance(record["rows"], Mapping) or not isinstance(record["config"], Mapping):
            raise TypeError("its rows and its config are tables")
    return record


def _check_same_images(first: Mapping[str, str | None], second: Mapping[str, str | None]) -> None:
    if first.keys() != second.keys():
        raise InputError(
            "the two audits call their images by other names: was one made in another profile, or elsewhere?"
        )
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
    """Each setting with where it stands, as `group_sizes.sanity`."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flatten_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _find_forbidden_differences(first: ProvenanceRecord, second: ProvenanceRecord) -> Iterator[tuple[str, Any, Any]]:
    """Of what has to be alike, each that is not, with what it is in either."""
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
    """Of methods that both have, the settings; the layer is one of the model's."""
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
            yield f"{name} is {first_value} in the first and {second_value} in the second: verdicts may differ by that alone"
    if records[0]["code"] != records[1]["code"]:
        yield "the two were made by different states of camscope: a difference may be its doing"
