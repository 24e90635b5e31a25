"""alike: whether two audits were made alike, so that what differs between them is the model's doing."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from camscope.audit.audit_run import AuditRun
from camscope.audit.core.config import Config
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import others
from camscope.data_readers import one_error, read_json
from camscope.errors import InputError
from camscope.plurals import plural

MADE_BY = (
    "seed",
    "fills",
    "data",
    "explain.findings",
    "regions",
    "sizes",
)  # what images are drawn, what is done to them
FREE = (
    "data.manifest",
    "data.root",
    "data.beside",
    "data.annotated",
    "data.subgroups",
    "sizes.gallery",
)  # and of these what changes no number that is compared
OF_A_MODEL = (
    "explain.layer",
    "model.preprocess",
    "model.outputs",
)  # which another kind of model needs to have otherwise
JUDGED_BY = ("margins", "replicates", "skip")  # what changes words and intervals, and no value
ABSENT = "not there"
Facts = Mapping[str, Any]


def expect_alike(first: AuditRun, second: AuditRun) -> tuple[str, ...]:
    """What changes verdicts, but no number, in words; InputError where the two differ in more than the model.

    Other images, masks, fills, sizes, draws, regions or settings of a method change the numbers of one and the same model.
    """
    known = [_provenance(run) for run in (first, second)]
    if first.summary.data != second.summary.data:
        raise InputError("the two audits are of different manifests: only audits of the same images are compared")
    _expect_images(*(one["rows"] for one in known))
    if known[0]["masks"] != known[1]["masks"]:
        raise InputError("the two audits have other masks: only audits with the same evidence and regions are compared")
    configs = [dict(_leaves(_config(run, one))) for run, one in zip((first, second), known, strict=True)]
    if wrong := [*_unlike(*configs), *_settings(first, second)]:
        name, one, other = wrong[0]
        raise InputError(
            f"the two audits were made otherwise: {name} is {one} in the first and {other} in the second, which changes the "
            "numbers of one and the same model; audit both with the same config"
        )
    names = [", ".join(run.summary.resolve.findings) for run in (first, second)]
    if names[0] != names[1]:  # of classes that one model names, and the other does not
        raise InputError(
            f"the findings are {names[0]} in the first and {names[1]} in the second: give both models the same names"
        )
    return tuple(_notes(configs, known))


def _provenance(run: AuditRun) -> Facts:
    message = f"{run.folder}: its {provenance.FILE} is missing, or none; start the audit again"
    with one_error(message):
        known: Facts = read_json(run.folder / provenance.FILE, message)
        known["masks"], known["code"]
        if not isinstance(known["rows"], Mapping) or not isinstance(known["config"], Mapping):
            raise TypeError("its rows and its config are tables")
    return known


def _expect_images(first: Mapping[str, str | None], second: Mapping[str, str | None]) -> None:
    if first.keys() != second.keys():
        raise InputError(
            "the two audits call their images by other names: was one made in another profile, or elsewhere?"
        )
    if changed := others(first, second):
        raise InputError(
            f"{len(changed)} of {plural(len(first), 'image')} differ in the second audit: only audits of the same images are "
            "compared"
        )


def _config(run: AuditRun, known: Facts) -> Facts:
    try:
        return Config.model_validate(known["config"]).placeless()
    except ValidationError:
        raise InputError(f"{run.folder}: the config in its {provenance.FILE} is none") from None


def _leaves(node: Facts, above: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting with where it stands, as `sizes.sanity`."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield above + name, value


def _unlike(first: Facts, second: Facts) -> Iterator[tuple[str, Any, Any]]:
    """Of what has to be alike, each that is not, with what it is in either."""
    kinds = [str(one["model.source"]).rpartition(":")[2] for one in (first, second)]
    asked = MADE_BY if kinds[0] != kinds[1] else (*MADE_BY, *OF_A_MODEL)
    for name, one, other in _differing(first, second):
        if _is_in(name, asked) and not _is_in(name, FREE):
            yield name, one, other


def _differing(first: Facts, second: Facts) -> Iterator[tuple[str, Any, Any]]:
    for name in {**first, **second}:
        one, other = first.get(name), second.get(name)
        if one != other:
            yield name, one, other


def _is_in(name: str, some: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in some)


def _settings(first: AuditRun, second: AuditRun) -> Iterator[tuple[str, Any, Any]]:
    """Of methods that both have, the settings; the layer is one of the model's."""
    known = [{tool.title: tool.settings for tool in run.summary.resolve.tools} for run in (first, second)]
    for title in known[0].keys() & known[1].keys():
        for name, one, other in _differing(known[0][title], known[1][title]):
            if name != "layer":
                yield f"{name} of {title}", one, other


def _notes(configs: list[dict[str, Any]], known: list[Facts]) -> Iterator[str]:
    for name, one, other in _differing(*configs):
        if _is_in(name, JUDGED_BY):
            yield f"{name} is {one} in the first and {other} in the second: verdicts may differ by that alone"
    if known[0]["code"] != known[1]["code"]:
        yield "the two were made by different states of camscope: a difference may be its doing"
