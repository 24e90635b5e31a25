"""Columns from whose value the label follows."""

from types import SimpleNamespace

import pyarrow
import pytest

from camscope.audit.core.config import DataConfig
from camscope.audit.stages.columns_that_determine_label import find_columns_that_determine_label

N = 24
TRUTH = [n % 2 == 0 for n in range(N)]
COLUMNS = {
    "cell_type": ["lymphocyte" if true else ("neutrophil", "basophil")[n % 3 == 0] for n, true in enumerate(TRUTH)],
    "scanner": ["A" if true else "B" for true in TRUTH],  # as dangerous as a copy of the label, but no copy
    "diagnosis": ["Nodule" if true else "clear" for true in TRUTH],
    "is_positive": [int(true) for true in TRUTH],
    "sex": ["F" if n % 3 else "M" for n in range(N)],
    "partly": [None if n == 0 else f"type {true}" for n, true in enumerate(TRUTH)],
    "mostly_empty": [None if n < N // 2 + 1 else f"type {true}" for n, true in enumerate(TRUTH)],
    "boxes": [[1, 2] for _ in TRUTH],
    "number": list(range(N)),
    "site": ["X" if true else "Y" for true in TRUTH],
}


def context_of(columns: dict, truth: list) -> SimpleNamespace:
    table = pyarrow.table({"path": [f"{n}.png" for n in range(len(truth))], "label": truth, **columns})
    cohort = SimpleNamespace(
        manifest=SimpleNamespace(table=table),
        get_subgroup_level_by_row=lambda name: {
            n: None if v is None else str(v) for n, v in enumerate(table[name].to_pylist())
        },
        get_truth_by_row=lambda finding: dict(enumerate(truth)),
    )
    data = DataConfig(manifest="x.csv", label="label", subgroups=("site",))
    names = {"findings": [SimpleNamespace(name="nodule")], "class_names": ("clear", "nodule")}
    return SimpleNamespace(config=SimpleNamespace(data=data), cohort=cohort, **names)


def test_columns_that_determine_the_label_are_found():
    assert find_columns_that_determine_label(context_of(COLUMNS, TRUTH)) == {
        "nodule": {"cell_type": N, "scanner": N, "partly": N - 1, "site": N}
    }


@pytest.mark.parametrize("n_images", [4, 9])
def test_few_images_determine_nothing(n_images):
    columns = {name: values[:n_images] for name, values in COLUMNS.items()}
    assert find_columns_that_determine_label(context_of(columns, TRUTH[:n_images])) == {}
