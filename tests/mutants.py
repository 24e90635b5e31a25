"""Plausible slips, each a small change of one function's source, and for each a small check that must notice it."""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope.explainers import METHODS, Augmented, Fused, GradCAM, GradCAMPlusPlus, HiResCAM, ScoreCAM
from camscope.explainers.cam.shared_layer_pass import SharedLayerPass
from camscope.explainers.cam.weighted_channels_explainer import BaseWeightedChannels
from camscope.explainers.core import find_constant_scores_and_interacting_samples, maps_with_flags
from camscope.explainers.ensemble import augmentation_at_test_time, map_fusion
from camscope.explanation import Explanation
from camscope.hooks import Tap, restore_buffers_and_rng, thread_local_evaluation_mode
from camscope.layers.layout import Layout
from camscope.render import colors
from camscope.targets import Box, Difference, Score
from camscope.targets.detection_box import HuggingFaceDetectorSettings
from tests.nets import Flat, Plain, Residual, Tokens, plain, truth


@dataclass(frozen=True)
class Mutant:
    """In the function `name` of `owner` (a class or a module), `old` becomes `new`; `check` must fail then."""

    slip: str
    owner: object
    name: str
    old: str
    new: str
    check: Callable[[], None]

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put the changed function in the place of the right one, wherever it was imported to."""
        function = vars(self.owner)[self.name]
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.old!r} is {source.count(self.old)} times in {self.name}"
        names: dict[str, object] = {}
        exec(source.replace(self.old, self.new), inspect.unwrap(function).__globals__, names)
        holders = [m for key, m in list(sys.modules.items()) if key.startswith("camscope") and m is not self.owner]
        for holder in [self.owner, *(m for m in holders if vars(m).get(self.name) is function)]:
            patch.setattr(holder, self.name, names[self.name])


def flat_map(method: str, activation: list[list[float]], gradient: list[list[float]]) -> list[list[float]]:
    """The map of one channel under a flat linear head, whose row is the gradient."""
    A, g = torch.tensor([[activation]]), torch.tensor(gradient)
    model = Flat(nn.MaxPool2d(1), g.numel(), classes=1)
    model.head.weight.data[:] = g.flatten()
    return METHODS[method](model, "features").attribute(A, 0)[0].tolist()


def negative_evidence_is_cut_off() -> None:
    assert flat_map("gradcam", [[1.0, -2.0]], [[1.0, 3.0]]) == [[2.0, 0.0]]


def the_denominator_counts() -> None:
    found = flat_map("gradcam++", [[1.0, 1.0]], [[1.0, 3.0]])
    np.testing.assert_allclose(found, [[1 / (2 + 2) + 3 / (2 + 3 * 2)] * 2], rtol=1e-6)


class InPlace(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.elu_(self.before(x))
        return self.head(torch.sigmoid(self.last(y)).mean((2, 3)))


def an_in_place_operation_changes_nothing() -> None:
    model, x = plain(InPlace)
    found = HiResCAM(model, "middle").attribute(x, 1)
    torch.testing.assert_close(found, truth(model, x, 1), rtol=1e-9, atol=1e-12)


class Twice(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.middle(self.middle(torch.tanh(self.first(x)))[:, :4]))


def the_last_call_is_explained() -> None:
    model, x = plain(Twice)
    A = model.middle(model.middle(torch.tanh(model.first(x)))[:, :4]).detach().requires_grad_()
    gradient = torch.autograd.grad(model.after(A)[:, 1].sum(), A)[0]
    found = HiResCAM(model, "middle").attribute(x, 1)
    torch.testing.assert_close(found, (A * gradient).sum(1).detach(), rtol=1e-9, atol=1e-12)


class Half(Plain):
    """A part of the score's graph is recorded, another is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.before(x)
        seen = torch.sigmoid(self.last(F.elu(y))).mean((2, 3))
        with torch.enable_grad():
            return self.head(seen) + 0 * y.mean()


def gradients_that_were_switched_off_are_found() -> None:
    model, x = plain(Half)
    found = HiResCAM(model, "middle").attribute(x, 1)
    torch.testing.assert_close(found, truth(model, x, 1), rtol=1e-9, atol=1e-12)


def zero_is_displayed_as_zero() -> None:
    shown = Explanation(np.array([[-1.0, 0.0, 2.0]]), "gradcam", 0, "", 1.0).heatmap("grid")
    assert shown.tolist() == [[0.0, 0.0, 1.0]]


class AllTokens(Tokens):
    """Returns its tokens: two prefix tokens, then 6 x 4 patches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        return self.block(torch.cat([self.prefix.expand(len(x), -1, -1), patches], 1))


def a_patch_lies_in_its_row_and_column() -> None:
    torch.manual_seed(0)
    model, x = AllTokens(prefix=2), torch.randn(1, 3, 24, 16)
    heat = HiResCAM(model, "block").attribute(x, lambda tokens: tokens[:, 2 + 3 * 4 + 1].sum(1))[0]
    expected = torch.zeros(6, 4)
    expected[3, 1] = model(x)[0, 2 + 3 * 4 + 1].sum().detach()
    torch.testing.assert_close(heat, expected)


def a_frame_lies_in_its_place() -> None:
    tokens = torch.arange(6).view(1, 6, 1)  # three patches of two frames
    maps = Layout("tokens", (2, 1, 3), time_last=True).to_maps(tokens)
    assert maps.flatten().tolist() == [0, 2, 4, 1, 3, 5]


def no_target_has_no_score() -> None:
    score = Score(nn.Identity(), None, optional_target=True)
    score.read_score([torch.ones(1, 2, 3)], 1)
    assert score.values is not None
    assert bool(score.values.isnan().all())


def a_prepared_box_keeps_its_detector() -> None:
    heads = (HuggingFaceDetectorSettings(3),)
    assert Box(0, 0, 4, 4, detector_settings=heads).prepare_for_model(nn.Identity()).detector_settings == heads


def a_constant_score_is_flagged() -> None:
    model, x = plain(samples=1)
    nn.init.zeros_(model.head.weight)
    assert ScoreCAM(model, "middle").explain(x[0], 1).status == "constant_score"


def a_batch_of_a_model_that_mixes_has_the_maps_of_its_samples() -> None:
    model, x = Residual().eval(), torch.randn(3, 3, 12, 12)
    model.norm.running_mean = model.norm.running_var = None
    tool = GradCAM(model, "block")
    one = tool.attribute(x[:1], lambda output: output.square().sum(1))
    assert torch.equal(tool.attribute(x, lambda output: output.square().sum(1))[:1], one)


def nobodys_statistics_change() -> None:
    model = Residual().train()
    before = model.norm.running_mean.clone()
    GradCAM(model, "block", mode="as_is").attribute(torch.randn(2, 3, 12, 12), 1)
    assert torch.equal(model.norm.running_mean, before)


def modes_come_back() -> None:
    model = Residual().train()
    model.norm.eval()
    GradCAM(model, "block").attribute(torch.ones(1, 3, 12, 12), lambda output: output.square().sum(1))
    assert [name for name, module in model.named_modules() if not module.training] == ["norm"]


def none_is_each_items_own_class() -> None:
    model, x = plain(samples=8)
    with torch.no_grad():
        model.head.bias -= model(x).mean(0)
        top = model(x).argmax(1).tolist()
    assert len(set(top)) > 1
    assert [one.target for one in HiResCAM(model, "middle").explain_batch(list(x))] == top


def several_classes_share_one_graph() -> None:
    model, x = plain(samples=1)
    maps = [one.attribution for one in HiResCAM(model, "middle").explain_classes(x, [0, 2])]
    expected = [truth(model, x, target)[0].numpy() for target in (0, 2)]
    np.testing.assert_allclose(maps, expected, rtol=1e-9, atol=1e-12)


class Faint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MaxPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().flatten(1).sum(1, keepdim=True) * 2.0**-30


def a_faint_float16_gradient_has_its_size() -> None:
    x = torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float16)
    assert HiResCAM(Faint(), "layer").attribute(x, 0).tolist() == [[[2.0**-30, 2.0**-29]]]


def a_flipped_map_is_flipped_back() -> None:
    model, x = plain()
    found = Augmented(HiResCAM(model, "middle")).attribute(x, 1)
    expected = (truth(model, x, 1) + truth(model, x.flip(-1), 1).flip(-1)) / 2
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def a_difference_has_a_sign() -> None:
    model, x = plain()
    found = HiResCAM(model, "middle").attribute(x, Difference(1, 0))
    torch.testing.assert_close(found, truth(model, x, 1) - truth(model, x, 0), rtol=1e-9, atol=1e-12)


def every_fused_map_counts_alike() -> None:
    model, x = plain()
    heat = truth(model, x, 1).relu()
    found = Fused([HiResCAM(model, "middle")] * 2, "mean").attribute(x, 1)
    torch.testing.assert_close(found, heat / heat.amax((1, 2), keepdim=True), rtol=1e-9, atol=1e-12)


MUTANTS = [
    Mutant(
        "no relu",
        BaseWeightedChannels,
        "compute_layer_map",
        "cells.relu() if self.relu else cells",
        "cells",
        negative_evidence_is_cut_off,
    ),
    Mutant(
        "no denominator",
        GradCAMPlusPlus,
        "quotient_terms",
        "2 + gradient * activation.sum(SPATIAL_AXIS, keepdim=True)",
        "torch.full_like(gradient, 2)",
        the_denominator_counts,
    ),
    Mutant("no clone", Tap, "_record_output", "snapshot.clone())", "snapshot)", an_in_place_operation_changes_nothing),
    Mutant(
        "the wrong call",
        Tap,
        "select_call",
        "is not None] or calls)[-1]",
        "is not None] or calls)[0]",
        the_last_call_is_explained,
    ),
    Mutant(
        "no second pass",
        Tap,
        "run",
        "if not torch.is_grad_enabled():",
        "if False:",
        gradients_that_were_switched_off_are_found,
    ),
    Mutant(
        "min-max",
        colors,
        "compute_clipping_range",
        "0.0, float(values.max(initial=0.0))",
        "float(values.min()), float(values.max())",
        zero_is_displayed_as_zero,
    ),
    Mutant(
        "prefix tokens kept",
        Layout,
        "to_maps",
        "[:, self.prefix : self.prefix + math.prod(self.grid)]",
        "[:, : math.prod(self.grid)]",
        a_patch_lies_in_its_row_and_column,
    ),
    Mutant(
        "patches before frames",
        Layout,
        "order_tokens",
        ".movedim(len(self.grid), 1)",
        "",
        a_frame_lies_in_its_place,
    ),
    Mutant(
        "a target that is dropped has a score",
        Score,
        "_read_full_precision",
        "not isinstance(self.target, NoTarget)",
        "True",
        no_target_has_no_score,
    ),
    Mutant(
        "boxes forget the detector",
        Box,
        "prepare_for_model",
        "if detector_settings else self",
        "",
        a_prepared_box_keeps_its_detector,
    ),
    Mutant(
        "columns first",
        Layout,
        "to_maps",
        "unflatten(1, self.grid)",
        "unflatten(1, self.grid[::-1]).transpose(1, 2)",
        a_patch_lies_in_its_row_and_column,
    ),
    Mutant(
        "constant is ok",
        maps_with_flags,
        "_determine_status",
        "if constant_score:",
        "if False:",
        a_constant_score_is_flagged,
    ),
    Mutant(
        "one batch for all",
        find_constant_scores_and_interacting_samples,
        "_is_output_changed_by_other_samples",
        "tensor.shape != other.shape or _differ_beyond_rounding(tensor, other)",
        "tensor.shape != other.shape",
        a_batch_of_a_model_that_mixes_has_the_maps_of_its_samples,
    ),
    Mutant(
        "statistics of the model",
        restore_buffers_and_rng,
        "buffers_and_rng_restored",
        ", BufferCopyMode(model)",
        "",
        nobodys_statistics_change,
    ),
    Mutant(
        "modes stay",
        thread_local_evaluation_mode,
        "evaluation_mode",
        "del flags[key], inside[key]",
        "pass",
        modes_come_back,
    ),
    Mutant(
        "one class for all",
        Score,
        "_resolve_class_pairs",
        "zip(targets, top, strict=True)",
        "zip(targets, top[:1] * len(top), strict=True)",
        none_is_each_items_own_class,
    ),
    Mutant(
        "graph freed early",
        SharedLayerPass,
        "_compute_gradients",
        "not is_last_backward or self._needs_curvature",
        "False",
        several_classes_share_one_graph,
    ),
    Mutant(
        "scale left in",
        SharedLayerPass,
        "_compute_gradients",
        "(_require_gradient(tap, name)) / boost",
        "(_require_gradient(tap, name))",
        a_faint_float16_gradient_has_its_size,
    ),
    Mutant(
        "flip left in",
        augmentation_at_test_time,
        "_undo_flip",
        "maps.attribution.flip([axis + 1 for axis in axes])",
        "maps.attribution",
        a_flipped_map_is_flipped_back,
    ),
    Mutant(
        "b rather than a",
        Score,
        "_read_unconverted_score",
        "values - contrast_scores",
        "contrast_scores - values",
        a_difference_has_a_sign,
    ),
    Mutant(
        "layers as they come",
        map_fusion,
        "_divide_by_maximum",
        "maps.relu() / peak",
        "maps.relu()",
        every_fused_map_counts_alike,
    ),
]
