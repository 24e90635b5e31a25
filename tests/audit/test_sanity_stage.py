"""The randomization test of an audit: one seed gives the curve, all seeds give the verdict."""

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from camscope import GradCAM
from camscope.audit.stages.map_quality import (
    N_RANDOMIZATION_DEPTHS,
    RANDOMIZATION_SEEDS,
    run_cascade_and_last_step,
)
from camscope.metrics import run_randomization_test
from camscope.metrics.explain_changed_inputs import clean_maps_and_predictions_shared
from tests.nets import CASES


def test_the_verdict_is_that_of_the_whole_test_with_fewer_passes():
    model, _ = CASES["residual"].make()
    x = torch.rand(5, 3, 12, 12, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")
    explainer, targets, n_explained = GradCAM(model, "block"), [1] * 5, []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: n_explained.append(len(args[0])) if isinstance(module, type(model)) else None
    )
    whole = run_randomization_test(explainer, x, targets, seeds=RANDOMIZATION_SEEDS, n_depths=N_RANDOMIZATION_DEPTHS)
    n_whole = sum(n_explained)
    n_explained.clear()
    with clean_maps_and_predictions_shared():
        cascade, last = run_cascade_and_last_step(explainer, x, targets)
    handle.remove()
    assert last.seeds == RANDOMIZATION_SEEDS
    assert last.verdicts == whole.verdicts
    assert (cascade.part_names, last.part_names) == (whole.part_names, whole.part_names[-1:])
    for name, similarities in whole.similarities.items():
        np.testing.assert_array_equal(last.similarities[name], similarities[:, -1:])
        np.testing.assert_array_equal(cascade.similarities[name], similarities[:1])
    assert sum(n_explained) < 0.7 * n_whole
