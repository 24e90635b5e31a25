"""JSON output of `--json`: each command prints one object on stdout. Also describes the fields of these objects."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from camscope.json_values import to_json_value

if TYPE_CHECKING:
    from camscope.batch import BatchOutcome
    from camscope.evaluation.method_summaries import MethodSummary
    from camscope.explanation import Explanation
    from camscope.metrics import Estimate

SCHEMA_VERSION = 1  # of all results; a field that is renamed or removed raises it
OPTION = "--json"
_is_active = False


@contextmanager
def json_output_scope(requested: bool) -> Iterator[None]:
    """If `requested` is true, stdout gets only JSON inside the `with` block."""
    global _is_active
    previous, _is_active = _is_active, requested
    try:
        yield
    finally:
        _is_active = previous


def is_json_output() -> bool:
    """Return whether the running command prints JSON."""
    return _is_active


def print_json_result(command: str, result: Mapping[str, Any]) -> None:
    """If the command prints JSON, print its result as one JSON object. Otherwise print nothing."""
    if _is_active:
        _print_json({"schema": f"camscope/{command}/{SCHEMA_VERSION}", **result})


def print_json_error(kind: str, message: str, remedy: str | None, exit_code: int) -> None:
    """Print the error that ends a command as one JSON object."""
    error = {"kind": kind, "message": message, "remedy": remedy, "exit_code": exit_code}
    _print_json({"schema": f"camscope/error/{SCHEMA_VERSION}", "error": error})


def _print_json(document: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(to_json_value(document), indent=2, allow_nan=False))  # ASCII, which every terminal can print


def describe_explanation(explanation: "Explanation") -> dict[str, Any]:
    """Return the fields of an explanation, without the map and the images."""
    from camscope.explanation import STATUS_MEANINGS

    names = (
        "method", "layer", "layout", "target", "label", "score", "probability", "status", "grid", "input_size", "notes",
        "diagnostics", "parameters", "model",
    )  # fmt: skip
    return {
        **{name: getattr(explanation, name) for name in names},
        "title": explanation.method_title,
        "status_meaning": STATUS_MEANINGS.get(explanation.status),
        "value_range": [explanation.attribution.min(), explanation.attribution.max()],
        "peak": _describe_peak(explanation),
    }


def _describe_peak(explanation: "Explanation") -> dict[str, Any] | None:
    """Return the largest value of a map and its position. Return None if all values are equal."""
    highest = explanation.attribution.max()
    if not highest > explanation.attribution.min():
        return None
    image = None if explanation.placement is None else explanation.peak
    return {"value": highest, "input": explanation.peak_at("input"), "image": image}


def describe_failures(outcome: "BatchOutcome | None") -> list[dict[str, Any]]:
    """Return why images of a run have no map. For each reason, give the number of images."""
    counts = {} if outcome is None else outcome.failure_counts_by_kind
    return [{"reason": reason, "kind": kind, "n_images": count} for (reason, kind), count in counts.items()]


def describe_summaries(
    summaries: "Mapping[str, Sequence[MethodSummary]]", seconds_per_image: Mapping[Any, float] | None = None
) -> list[dict[str, Any]]:
    """Describe each metric with the means of its methods. The best method comes first."""
    from camscope.metrics import METRICS

    described = []
    for lines in summaries.values():
        metric = METRICS[lines[0].metric]
        described.append(
            {
                "metric": metric.name,
                "title": metric.title,
                "imputation": lines[0].imputation,
                "higher_is_better": metric.higher_is_better,
                "formula": metric.formula,
                "methods": [
                    {
                        "method": line.method,
                        "layer": line.layer,
                        "title": line.title,
                        "parameters_digest": line.parameters,
                        "is_control": line.is_control,
                        "n_values": line.n_values,
                        "n_undefined": line.n_undefined,
                        "estimate": describe_estimate(line.estimate),
                        "difference_to_control": describe_estimate(line.advantage_over_control),
                        "difference_to_best": describe_estimate(line.difference_to_best),
                        "seconds_per_image": (seconds_per_image or {}).get(line.key),
                    }
                    for line in lines
                ],
            }
        )
    return described


def describe_estimate(estimate: "Estimate | None") -> dict[str, Any] | None:
    """Describe a mean with its confidence interval. Return None if there is no estimate."""
    names = ("mean", "low", "high", "p_value", "n_groups")
    return None if estimate is None else {name: getattr(estimate, name) for name in names}


def _prefix_field_names(prefix: str, fields: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}{name}": description for name, description in fields.items()}


EXPLANATION_FIELDS = {
    "method": "name of the method",
    "title": "name of the method as in its paper",
    "layer": "layer of the map, or null",
    "layout": "how the layer's output holds its grid, or null",
    "target": "class index, or null",
    "label": "class as text",
    "score": "value of the target",
    "probability": "probability of the class, or null",
    "status": "`ok`, or a flag",
    "status_meaning": "the flag as a sentence, or null",
    "grid[]": "size of the map in cells",
    "input_size[]": "size of the model's input",
    "value_range[]": "smallest and largest value of the map",
    "peak.value": "largest value; `peak` is null if all values are equal",
    "peak.input[]": "row and column of the peak in pixels of the model's input, for a volume three indices",
    "peak.image[]": "the same in pixels of the original image or voxels of the volume, or null if that place is unknown",
    "notes[]": "remarks of the method",
    "diagnostics.*": "numbers of the method about its map",
    "parameters.*": "settings of the method",
    "model": "digest of the model's weights, 16 hex digits",
}
FAILURE_FIELDS = {
    "failures[].reason": "why images have no map",
    "failures[].kind": "`transient` or `permanent`",
    "failures[].n_images": "number of these images",
}
ESTIMATE_FIELDS = {
    "mean": "mean, or mean difference",
    "low": "lower end of the 95 % interval, or null",
    "high": "upper end of the interval, or null",
    "p_value": "corrected p-value of a difference, or null",
    "n_groups": "number of independent images or groups",
}
STUDY_ESTIMATE_FIELDS = {
    "mean": "mean over readers, mean difference, or for `seconds` geometric mean or ratio",
    "low": "lower end of the 95 % interval, or null",
    "high": "upper end of the interval, or null",
    "p_value": "p-value of a difference, not corrected, or null",
    "dof": "degrees of freedom, or null if infinite",
    "n_readings": "readings that count",
    "n_readers": "readers",
    "n_patients": "patients",
}
METRIC_FIELDS = {
    "metrics[].metric": "name of the metric",
    "metrics[].title": "its display name",
    "metrics[].imputation": "what replaces removed pixels, or null",
    "metrics[].higher_is_better": "true, false, or null if neither is better",
    "metrics[].formula": "its formula",
    "metrics[].methods[].method": "name of the method; the best method is first",
    "metrics[].methods[].layer": "its layer, or null",
    "metrics[].methods[].title": "method and layer for display",
    "metrics[].methods[].parameters_digest": "digest of its settings",
    "metrics[].methods[].is_control": "whether it is a map without the model",
    "metrics[].methods[].n_values": "maps with a value",
    "metrics[].methods[].n_undefined": "maps without a value",
    "metrics[].methods[].seconds_per_image": "time of a map, or null",
    **_prefix_field_names("metrics[].methods[].estimate.", ESTIMATE_FIELDS),
    **_prefix_field_names("metrics[].methods[].difference_to_control.", ESTIMATE_FIELDS),
    **_prefix_field_names("metrics[].methods[].difference_to_best.", ESTIMATE_FIELDS),
}
METHOD_FIELDS = {
    "name": "key of the method",
    "title": "name as in its paper",
    "paper": "link or DOI",
    "description": "formula and summary",
    "forward_passes": "cost, as text",
    "backward_passes": "cost, as text",
    "class_specific": "whether the map depends on the class",
    "control": "whether it is a map without the model",
    "slow": "whether it runs only when it is named",
    "settings.*": "settings with their defaults",
}
VERDICT_FIELDS = {
    "claim": "the claim",
    "question": "key of the question",
    "finding": "the finding",
    "conclusion": "`supported`, `not supported` or `not decided`",
    "direction": "`supports`, `contradicts` or `neither`",
    "reason": "why, as text",
    "effect": "the value, or null",
    "low": "lower end of its 95 % interval, or null",
    "high": "upper end, or null",
}
RESULT_FIELDS: dict[str, dict[str, str]] = {
    "error": {
        "error.kind": "class of the error, or `UsageError`, `Interrupted`, `OutOfMemory`",
        "error.message": "the error as one line, with its fix",
        "error.remedy": "the fix for programs, such as `set_layer`, or null",
        "error.exit_code": "exit code of the command",
    },
    "info": {
        "versions.*": "version of each package",
        "devices.*": "devices of PyTorch",
        "extras.*[]": "missing packages of each extra",
    },
    "mcp": {
        "url": "address of the server over HTTP",
        "token": "random token that requests must carry, or null if it was chosen",
        "models[]": "names of the models",
        "runs[]": "names of the runs",
        "audits[]": "names of the audits",
    },
    "methods": {"methods[]." + name: text for name, text in METHOD_FIELDS.items()},
    "layers": {
        "model": "class of the model",
        "input_shape[]": "shape of the input",
        "default_layer": "layer that is explained by default, or null",
        "layers[].name": "name of the layer",
        "layers[].type": "its class",
        "layers[].output_shape[]": "shape of its output, or null",
        "layers[].stride[]": "input pixels per cell, or null",
        "layers[].n_parameters": "parameters, with those of nested layers",
        "layers[].n_direct_parameters": "parameters without those of nested layers",
        "layers[].n_calls": "calls in one forward pass",
        "layers[].has_grid": "whether maps can be computed there",
        "layers[].is_default": "whether it is the default layer",
        "notes[]": "warnings",
    },
    "demo": {
        "images[].name": "name of the radiograph",
        "images[].file": "its file",
        "images[].finding": "the true class",
        "images[].prediction": "the predicted class",
        "images[].probability": "its probability",
        "images[].is_correct": "whether both are the same",
        "images[].maps[].method": "name of the method",
        "images[].maps[].score": "score of the class",
        "images[].maps[].hit": "whether the peak lies in the finding, or null",
        "images[].maps[].energy": "share of the map inside the finding, or null",
        "images[].maps[].area": "share of the image inside the finding, or null",
        "figure": "file of the figure",
    },
    "demo-audit": {
        "audits[].name": "`clean` or `confounded`",
        "audits[].auroc": "AUROC of the model",
        "audits[].report": "file of the report",
        "differing_verdicts[].claim": "the claim",
        "differing_verdicts[].clean": "conclusion for the clean model",
        "differing_verdicts[].confounded": "conclusion for the confounded model",
    },
    "explain": {
        "images[].image": "path of the image, or a pseudonym",
        "images[].top_classes[].index": "class index",
        "images[].top_classes[].label": "class as text",
        "images[].top_classes[].score": "score of the class",
        "images[].top_classes[].probability": "its probability, or null",
        **_prefix_field_names("images[].explanations[].", EXPLANATION_FIELDS),
        "images[].scan_steps[]": "for a scan: what was done to its values",
        "images[].notes[]": "warnings and remarks",
        "images[].files[]": "the written files",
        "images[].expected.label": "with `--expected`: the expected class",
        "images[].expected.predicted_label": "the predicted class",
        "images[].expected.is_predicted": "whether both are the same",
        "images[].expected.differences[].method": "name of the method",
        "images[].expected.differences[].value_range[]": "smallest and largest difference of the maps, predicted - expected",
        "images[].expected.differences[].correlation": "rank correlation of both maps, or null",
        "failures[].image": "an image that was not explained",
        "failures[].message": "the reason",
        "versions.*": "versions of the libraries",
    },
    "compare": {
        "image": "path of the image, or a pseudonym",
        "maps[].method": "method, with settings that differ",
        "maps[].layer": "its layer, or null",
        "maps[].target": "class index, or null",
        "maps[].label": "class as text",
        "maps[].score": "score of the class",
        "maps[].probability": "its probability, or null",
        "maps[].status": "`ok`, or a flag",
        "maps[].forward_passes": "cost, as text",
        "maps[].backward_passes": "cost, as text",
        "maps[].seconds": "time; that of shared passes is divided",
        "maps[].correlation": "with the first map of the class, or null",
        "equivalences[]": "sentences about methods with the same maps",
        "notes[]": "warnings and remarks",
        "figure": "file of the figure",
    },
    "compare-dataset": {
        "title": "model, layer and number of images",
        **METRIC_FIELDS,
        "agreement[].first": "a method",
        "agreement[].second": "another method",
        **_prefix_field_names("agreement[].correlation.", ESTIMATE_FIELDS),
        "evidence": "the ground truth, or null",
        "statements[]": "sentences about what differs significantly",
        **FAILURE_FIELDS,
        "folder": "folder of the values",
        "figure": "file of the figure",
    },
    "features": {
        "drawing": "`channels`, `pca`, `similarity` or `attention`",
        "image": "path of the first image, or a pseudonym",
        "images[]": "paths of all images, or pseudonyms",
        "layer": "name of the layer, or null for attention",
        "shape[]": "shape of its output, channels first; of attention: heads first",
        "n_drawn": "number of channels, components, images or heads that are drawn",
        "explained_variance_ratio[]": "share of each principal component in the variance",
        "notes[]": "remarks about the layer",
        "file": "the written file",
    },
    "batch": {
        "folder": "folder of the run",
        "n_images": "images of the run or shard",
        "n_done_before": "images that an earlier start processed",
        "n_processed": "images that this start processed",
        "n_failures": "images without a map",
        "n_flagged": "maps with a flag, with those of earlier starts",
        "flags.*": "maps of each flag",
        **FAILURE_FIELDS,
    },
    "show": {
        "file": "the page, or null if no row matches",
        "n_displayed": "rows on the page",
        "n_matching": "rows that match",
        "n_rows": "rows of the run",
    },
    "export": {
        "output": "folder or file",
        "n_files": "number of files",
        "n_rows": "selected rows",
        "n_rows_without_map": "rows that have no map",
        "n_escaped_cells": "cells of a table that got an apostrophe",
        "failures[].reason": "why rows have no file",
        "failures[].n_rows": "number of these rows",
        "failures[].example": "id of one of them",
    },
    "export-reader-study": {
        "folder": "folder of the study",
        "n_cases": "number of cases",
        "n_patients": "number of patients",
        "n_readers": "number of readers",
        "n_sessions": "sessions of each reader",
        "n_readings": "readings of all readers",
        "conditions[]": "`none`, `map` and, with controls, `control`",
        "answers[]": "allowed answers",
        "positive_answer": "the positive one of two answers, or null",
        "n_model_errors": "cases where the model is wrong, or null if its answers are not in the run",
        "n_maps_without_information": "cases whose map has a warning",
    },
    "evaluate-reader-study": {
        "study.*": "the design, as in `study.json`",
        "study.conditions[]": "the conditions",
        "study.answers[]": "the allowed answers",
        "n_readings": "readings with an answer",
        "n_missing": "readings without an answer",
        "measures[].measure": "name of the measure, such as `accuracy`",
        "measures[].condition": "the condition",
        "measures[].reference": "for a difference: the condition that is subtracted. Otherwise null",
        **_prefix_field_names("measures[].pooled.", STUDY_ESTIMATE_FIELDS),
        **_prefix_field_names("measures[].for_these_readers.", STUDY_ESTIMATE_FIELDS),
        **_prefix_field_names("measures[].for_these_patients.", STUDY_ESTIMATE_FIELDS),
        "measures[].by_reader[].reader": "number of the reader",
        **_prefix_field_names("measures[].by_reader[].", STUDY_ESTIMATE_FIELDS),
        "agreement[].kind": "`between readers` or `within readers`",
        "agreement[].statistic": "`krippendorff-alpha` or `cohen-kappa`",
        "agreement[].conditions[]": "one condition, or the two that are compared",
        **_prefix_field_names("agreement[].", STUDY_ESTIMATE_FIELDS),
        "changes[].before": "the first condition",
        "changes[].after": "the second condition",
        "changes[].n_pairs": "cases that a reader answered under both",
        "changes[].n_changed": "pairs with another answer",
        "changes[].n_to_correct": "pairs from a wrong to the right answer",
        "changes[].n_to_wrong": "pairs from the right to a wrong answer",
        "changes[].n_to_wrong_model": "pairs from the right answer to the model's wrong answer",
        "changes[].n_wrong_model": "pairs of cases where the model is wrong",
        "median_seconds.*": "median seconds of a reading under each condition, or null",
        "statements[]": "the result as sentences",
        "folder": "folder of the report, or null",
        "figure": "file of the figure, or null",
    },
    "evaluate": {
        **METRIC_FIELDS,
        "evidence": "the ground truth, or null",
        "n_rows": "number of values",
        **FAILURE_FIELDS,
        "folder": "folder of the values",
        "figure": "file of the figure, or null",
    },
    "choose": {
        "candidates[].method": "name of the method",
        "candidates[].layer": "its layer, or null",
        "candidates[].title": "method and layer for display",
        "candidates[].n_images": "images that it explained",
        "candidates[].seconds_per_image": "time of a map, or null",
        "candidates[].drop_reason": "why it was dropped, or null",
        "candidates[].is_best": "whether it is recommended",
        **{f"candidates[].metrics.*.{name}": f"of each criterion: {text}" for name, text in ESTIMATE_FIELDS.items()},
        "recommendation": "the choice as a sentence",
        "chosen": "method and layer that `--save` writes: the best, or one of the cheapest if no winner is clear; null if none",
        "is_clear": "whether there is a clear winner, or two that do not differ",
        "evidence": "the ground truth with its first categories, or null",
        "n_images": "images that the best candidate explained",
        "notes[]": "images that were left out",
        "saved": "the written file, or null",
        "figure": "the written figure, or null",
    },
    "diff": {
        "first.folder": "folder of the first run",
        "first.model": "its model",
        "first.digest": "digest of its weights",
        "second.folder": "folder of the second run",
        "second.model": "its model",
        "second.digest": "digest of its weights",
        "n_images_first": "images of the first run",
        "n_images_second": "images of the second run",
        "n_compared": "images that both runs have",
        "n_only_first": "images that the second run lacks",
        "n_only_second": "images that the first run lacks",
        "n_changed_files": "images with one name and two digests, which are not compared",
        "n_answers_compared": "images with a predicted class in at least one run",
        "n_answers_changed": "images whose predicted class changed or is missing in one run",
        "n_status_changed": "images with a map whose status changed",
        "not_compared[]": "what only one run has, and settings that differ",
        "maps[].method": "name of the method",
        "maps[].layer": "its layer, or null",
        "maps[].target": "the target, or `top class`",
        "maps[].n_maps": "maps that both runs have",
        "maps[].n_correlations": "maps with a correlation",
        "maps[].median_spearman": "median rank correlation, or null",
        "maps[].lowest_spearman": "lowest rank correlation, or null",
        "maps[].n_shares": "maps with a mask in both runs",
        "maps[].mean_share_drop": "mean fall of the share of the map inside the mask, or null",
        "conditions[].text": "the condition",
        "conditions[].holds": "whether it holds, so that the gate fails; null if it cannot be checked",
        "conditions[].n_met": "images that fulfill it",
        "conditions[].n_compared": "images with this value in both runs",
        "conditions[].low": "lower end of the 95 % Clopper-Pearson interval of their share, or null",
        "conditions[].high": "upper end, or null",
        "conditions[].description": "the counts as text",
        "conditions[].ids[]": "images that fulfill it, at most 100",
        "failed": "whether a condition holds",
        "exit_code": "exit code of the command",
        "n_changed": "images whose answer or status changed, or that fulfill a condition",
        "images[].id": "an image that changed; those that changed most are first, at most 100",
        "images[].label_before": "predicted class in the first run, or null",
        "images[].label_after": "predicted class in the second run, or null",
        "images[].probability_before": "its probability, or null",
        "images[].probability_after": "its probability, or null",
        "images[].answer_changed": "whether the class changed, or null",
        "images[].status_before": "status of the maps in the first run",
        "images[].status_after": "status in the second run",
        "images[].status_changed": "whether the status of a map changed",
        "images[].maps[].method": "name of the method",
        "images[].maps[].layer": "its layer, or null",
        "images[].maps[].target": "the target, or `top class`",
        "images[].maps[].spearman": "rank correlation of both maps, or null",
        "images[].maps[].pearson": "Pearson's correlation, or null",
        "images[].maps[].share_before": "share of the first map inside the mask, or null",
        "images[].maps[].share_after": "share of the second map inside the mask, or null",
        "images[].maps[].reason": "why there is no correlation, or null",
    },
    "audit-init": {
        "config": "the written file",
        "fill_in[].line": "line of a setting to fill in before the audit can run, counted from 1",
        "fill_in[].text": "the text of the line",
        "notes[]": "settings that were made for you, such as the root of the paths",
    },
    "audit-run": {
        **_prefix_field_names("verdicts[].", VERDICT_FIELDS),
        "warnings[]": "warnings of the audit",
        "n_failures": "images without prediction or map",
        "summary": "file of the summary",
        "report": "file of the report",
    },
    "audit-verify": {
        "is_intact": "whether every check passed",
        "checks[].name": "file or part",
        "checks[].is_intact": "whether it is unchanged",
        "checks[].message": "the outcome",
        "not_recomputed[]": "parts that are never recomputed",
    },
    "audit-export": {
        "summary": "the written one-page summary, or null",
        "model_card": "the written model card, or null",
    },
}
OTHER_SCHEMAS = {
    "benchmark": "the object of `camscope evaluate`",
    "inspect-images": "the same object as the file of `--output`: see [Batches](../how-to/batch.md)",
    "audit compare": "the same object as the file of `--output`, with the field `schema_version`",
}


def describe_json_output() -> str:
    """Write a reference of the fields in each result, as Markdown."""
    sections = []
    for command, fields in RESULT_FIELDS.items():
        rows = "\n".join(f"| `{path}` | {text} |" for path, text in fields.items())
        heading = f"## `camscope/{command}/{SCHEMA_VERSION}`"
        sections.append(f"{heading}\n\n| field | content |\n|---|---|\n{rows}")
    other_schemas = "\n".join(f"- `camscope {command}`: {text}." for command, text in OTHER_SCHEMAS.items())
    return "\n\n".join([*sections, f"## Other schemas\n\n{other_schemas}"])
