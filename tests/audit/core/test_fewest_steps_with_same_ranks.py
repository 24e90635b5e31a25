"""Fewer path steps where only ranks are compared."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("pydantic")

from camscope import GradCAM, IntegratedGradients
from camscope.audit.core.fewest_steps_with_same_ranks import MIN_RANK_CORRELATION, reduce_integration_steps
from camscope.metrics.explain_changed_inputs import ExplainerProbe


class Waves(nn.Module):
    """Scores whose gradients change so fast along the path that few steps miss them."""

    def __init__(self, speed):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 144).view(1, 1, 12, 12))
        self.speed = speed

    def forward(self, x):
        total = torch.sin(self.speed * self.weight * x).flatten(1).sum(1)
        return torch.stack([total, -total], 1)


def context(explainers, n_images=3):
    x = torch.rand(n_images, 1, 12, 12, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")
    maps = [ExplainerProbe.from_explainer(explainer, x[:1], 0).clean_maps[0] for explainer in explainers]
    return SimpleNamespace(
        explainers=explainers,
        findings=[SimpleNamespace(class_index=0)],
        rank_explainers=None,
        cohort=SimpleNamespace(rows=[4, 5, 6][:n_images]),
        first_maps=[{"row": 4, "attribution": each.ravel().tolist(), "grid": each.shape} for each in maps],
        iter_batches=lambda rows: iter([rows]),
        stack_on_device=lambda batch: x[[row - 4 for row in batch]],
    )


def test_as_few_steps_as_keep_the_ranks():
    audit = context([IntegratedGradients(Waves(1.0), n_steps=40)])
    (tool,), (record,), seconds = reduce_integration_steps(audit)
    assert (tool.n_steps, record.n_steps, record.configured_n_steps, record.n_images) == (8, 8, 40, 2)
    assert record.rank_correlation >= MIN_RANK_CORRELATION
    assert reduce_integration_steps(audit) is reduce_integration_steps(audit)  # chosen once
    assert min(seconds["integratedgradients"]) > 0


def test_the_map_of_the_first_image_is_not_computed_again():
    model = Waves(1.0)
    audit, counts = context([IntegratedGradients(model, n_steps=40)]), []
    forward = model.forward
    model.forward = lambda x: counts.append(len(x) * torch.is_grad_enabled()) or forward(x)
    reduce_integration_steps(audit)
    assert sum(counts) == 40 + 2 * 8  # the other image with all steps, and both with the fewest


def test_one_image_is_compared_but_gives_no_time():
    (_,), (record,), seconds = reduce_integration_steps(
        context([IntegratedGradients(Waves(1.0), n_steps=40)], n_images=1)
    )
    assert (record.n_images, seconds) == (1, {})


def test_where_ranks_change_the_steps_stay():
    (tool,), records, _ = reduce_integration_steps(context([IntegratedGradients(Waves(300.0), n_steps=40)]))
    assert (tool.n_steps, records) == (40, ())


@pytest.mark.parametrize("options", [{"n_steps": 8}, {"n_steps": 15}, {"n_steps": 40, "tolerance": 0.01}])
def test_few_steps_and_a_tolerance_stay(options):
    tools = [IntegratedGradients(Waves(1.0), **options)]
    assert reduce_integration_steps(context(tools)) == (tools, (), {})


def test_methods_without_a_path_stay():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(200, 2))
    tools = [GradCAM(net, "0")]
    assert reduce_integration_steps(context(tools)) == (tools, (), {})
