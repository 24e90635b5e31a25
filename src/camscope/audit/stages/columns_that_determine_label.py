"""Columns of the manifest from whose value the label follows: a model may have learned them instead of the finding."""

from collections import Counter
from collections.abc import Mapping

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Cohort
from camscope.audit.core.subgroup_levels import MAX_LEVELS_PER_SUBGROUP
from camscope.batch.image_manifest import import_arrow

NAMING_COLUMNS = ("row", "id", "path")
COPIED_LABELS = {"0", "1", "true", "false", "yes", "no"}  # levels of a column that repeats the label
MIN_IMAGES_WITH_AND_WITHOUT_FINDING = 5  # in one level each: fewer may follow a column by chance
MIN_SHARE_WITH_VALUE = 0.5  # of the images; a column that is mostly empty is a note


def find_columns_that_determine_label(context: AuditContext) -> dict[str, dict[str, int]]:
    """Return finding -> column -> the number of images with a value, for columns from whose value the label follows.

    Only the names of the columns are reported. A copy of the label is left out.
    """
    config, cohort = context.config.data, context.cohort
    named = {config.label, config.patient, config.split, *config.labels.values(), *NAMING_COLUMNS}
    columns = [name for name in cohort.manifest.table.column_names if name not in named]
    levels_by_column = {
        name: cohort.get_subgroup_level_by_row(name) for name in columns if _has_flat_values(cohort, name)
    }
    class_names = {name.casefold() for name in (*context.class_names, *(item.name for item in context.findings))}
    determining: dict[str, dict[str, int]] = {}
    for finding in context.findings:
        truth = cohort.get_truth_by_row(finding)
        for name, levels in levels_by_column.items():
            level_by_row = {row: level for row, level in levels.items() if level is not None}
            if {level.casefold() for level in level_by_row.values()} <= class_names | COPIED_LABELS:
                continue
            if len(level_by_row) >= MIN_SHARE_WITH_VALUE * len(levels) and _determines_truth(level_by_row, truth):
                determining.setdefault(finding.name, {})[name] = len(level_by_row)
    return determining


def _has_flat_values(cohort: Cohort, name: str) -> bool:
    """Whether a column holds no lists, such as boxes."""
    return not import_arrow().types.is_nested(cohort.manifest.table[name].type)


def _determines_truth(level_by_row: Mapping[int, str], truth: Mapping[int, bool | None]) -> bool:
    """Whether no level has both images with the finding and images without it.

    There are few levels. One with the finding and one without it have enough images that this is hardly by chance.
    """
    counts = Counter((level, truth[row]) for row, level in level_by_row.items())
    n_levels = len({level for level, _ in counts})
    if not 1 < n_levels <= MAX_LEVELS_PER_SUBGROUP or len(counts) > n_levels:
        return False
    return all(
        any(n >= MIN_IMAGES_WITH_AND_WITHOUT_FINDING for (_, value), n in counts.items() if value is has_finding)
        for has_finding in (True, False)
    )
