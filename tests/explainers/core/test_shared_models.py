"""Models that something else works on meanwhile, and models whose samples affect one another."""

import copy
import inspect
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from camscope import BatchRun, Preprocess, run_batch
from camscope.errors import CamscopeWarning, ModelError, warn_caller
from camscope.explainers import METHODS, GradCAM, HiResCAM, IntegratedGradients, ScoreCAM
from camscope.explainers.core import find_constant_scores_and_interacting_samples
from camscope.explainers.core.find_constant_scores_and_interacting_samples import samples_interact
from camscope.explainers.fullgrad import completeness
from camscope.images.files.redacted_errors_and_file_pseudonyms import ignore_warnings
from camscope.metrics.model_scorer import scoring_scope
from camscope.targets.find_class_scores import ScoreRange
from tests.nets import CASES, Residual, plain
from tests.refusals import ATTENTION
from tests.tools import by_family, explainer
from tests.untouched import untouched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


def interrupted(tool, x, act):
    """The map of class 1, of a call in whose middle another thread does something to the model."""
    inside, leave, maps = threading.Event(), threading.Event(), []

    def target(output):
        inside.set()
        assert leave.wait(10)
        return output[:, 1]

    thread = threading.Thread(target=lambda: maps.append(tool.attribute(x, target)))
    thread.start()
    assert inside.wait(10)
    try:
        act()
    finally:
        leave.set()
        thread.join(10)
    return maps[0]


# --- modes


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_that_another_thread_sets_stays_and_the_map_is_of_eval_mode(training):
    torch.manual_seed(0)
    model, x = Residual().train(not training), torch.randn(2, 3, 12, 12)
    tool = ScoreCAM(model, "block")  # which runs the model again, after the other thread
    expected = ScoreCAM(copy.deepcopy(model).eval(), "block").attribute(x, lambda output: output[:, 1])
    heat = interrupted(tool, x, lambda: model.train(training))
    assert torch.equal(heat, expected)
    assert all(module.training is training for module in model.modules())
    assert "training" not in vars(nn.Module)


def test_a_training_step_of_another_thread_updates_the_statistics_and_meets_no_mode_but_its_own():
    torch.manual_seed(0)
    model, x = Residual().train(), torch.randn(2, 3, 12, 12)
    alone = copy.deepcopy(model)
    expected = GradCAM(model, "block").attribute(x, 1)
    state = torch.get_rng_state()
    alone(x).sum().backward()
    torch.set_rng_state(state)
    heat = interrupted(GradCAM(model, "block"), x, lambda: model(x).sum().backward())
    assert torch.equal(heat, expected)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_weights_that_another_thread_changes_during_a_call_are_reported():
    model, x = plain(samples=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(x).sum().backward()
        optimizer.step()

    with pytest.warns(CamscopeWarning, match="the model's weights changed during the call"):
        interrupted(ScoreCAM(model, "middle"), x, step)

    def target(output):
        with torch.no_grad():
            model.first.weight += 1
        return output[:, 1]

    notes = HiResCAM(model, "middle").explain(x[0], target).notes
    assert any(note.startswith("the model's weights changed during the call") for note in notes)
    with pytest.raises(ModelError, match=r"the model's weights changed during the call.*copy\.deepcopy"):
        IntegratedGradients(model, n_steps=2).attribute(x, target)
    assert not any("weights" in note for note in HiResCAM(model, "middle").explain(x[0], 1).notes)


class OwnMode(nn.Module):
    """Keeps its mode in a way of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.inner = nn.Conv2d(3, 4, 3), True

    training = property(lambda self: self.inner, lambda self, mode: vars(self).update(inner=mode))

    def forward(self, x):
        return self.conv(x) * (2 if self.training else 1)


@pytest.mark.parametrize("nested", [False, True])
def test_modes_that_are_no_plain_flag_are_set_and_put_back(nested):
    torch.manual_seed(0)
    stem = OwnMode() if not nested else nn.DataParallel(OwnMode())
    model = nn.Sequential(stem, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)).train()
    x = torch.randn(2, 3, 6, 6)
    expected = HiResCAM(copy.deepcopy(model).eval(), "1").attribute(x, 1)
    assert torch.equal(HiResCAM(model, "1").attribute(x, 1), expected)
    assert all(module.training for module in model.modules())


def test_what_a_model_does_to_its_modes_in_its_forward_counts_and_is_gone_afterwards():
    class MonteCarlo(Residual):
        def forward(self, x):
            self.dropout.train()
            return super().forward(x)

    torch.manual_seed(0)
    model, x = MonteCarlo().eval(), torch.randn(1, 3, 12, 12)
    maps = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        maps.append(HiResCAM(model, "block").attribute(x, 1))
    assert not torch.equal(*maps)
    assert not model.dropout.training


def test_a_deep_copy_is_made_in_the_mode_that_is_explained():
    """Methods of other packages run a copy: its dropout must be off, too."""
    torch.manual_seed(0)
    model, x = Residual().train(), torch.randn(1, 3, 12, 12)
    for method in {"lrp", "deeplift"} & METHODS.keys():
        expected = explainer(method, copy.deepcopy(model).eval(), "block").attribute(x, 1)
        assert torch.equal(explainer(method, model, "block").attribute(x, 1), expected)


@pytest.mark.parametrize("method", ["gradcam", "scorecam", "smoothgrad", "occlusion"])
def test_as_is_changes_no_statistics_and_no_random_numbers(method):
    class Drawing(Residual):
        """Draws from every generator, and replaces a buffer."""

        def forward(self, x):
            self.norm.running_mean = self.norm.running_mean * 0.9
            return super().forward(x) * (1 + 0 * np.random.rand())

    for kind in (Residual, Drawing):
        torch.manual_seed(0)
        model, x = kind().train(), torch.randn(3, 3, 12, 12)
        tool = explainer(method, model, "block", mode="as_is")
        with untouched(model, x):
            first = tool.attribute(x, 1)
        assert torch.equal(first, tool.attribute(x, 1)), "the same generator state, the same dropout"
        assert not torch.allclose(first, explainer(method, model, "block").attribute(x, 1))


# --- samples that affect one another


def normalized():
    """Batch norms without running statistics, in eval mode too."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(channels, track_running_stats=False) for channels in (6, 5)]
    layers = [nn.Conv2d(3, 6, 3), norms[0], nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3), norms[1], nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)).eval()


class Centered(nn.Module):
    """Subtracts the batch's mean: nothing in its modules says so."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 5, 3, stride=2), nn.Linear(5, 4)

    def forward(self, x):
        return {"logits": self.head((self.conv(x) - self.conv(x).mean(0)).relu().mean((2, 3)))}


@pytest.mark.parametrize("method", by_family(method for method in METHODS if method not in ATTENTION))
def test_the_map_of_a_sample_does_not_depend_on_its_batch(method):
    model, x = normalized(), torch.randn(3, 3, 14, 14)
    tool, targets = explainer(method, model, "6"), [1, None, 2]
    if method in ("deeplift", "deepliftshap"):
        with pytest.raises(ModelError, match="the samples of a batch affect one another"):
            tool.attribute(x, 1)
        return
    alone = [tool.explain(image, target) for image, target in zip(x, targets, strict=True)]
    together = tool.explain_batch(list(x), targets)
    heats = tool.attribute(x, targets)
    for n, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one.attribution.tobytes() == other.attribution.tobytes() == heats[n].numpy().tobytes()
        assert (one.target, one.label, one.score, one.status) == (other.target, other.label, other.score, other.status)
        assert interaction_note(other)
    if "batch_size" in inspect.signature(METHODS[method]).parameters:  # copies of one image affect one another, too
        apart = explainer(method, model, "6", batch_size=1).attribute(x[:1], 1)
        torch.testing.assert_close(apart, heats[:1], rtol=1e-4, atol=1e-6)


def interaction_note(explanation):
    return "the samples of a batch affect one another in this model: each was explained separately" in explanation.notes


class OfTheBatch(nn.Module):
    """Scales its input by what the whole batch holds."""

    def __init__(self, scale):
        super().__init__()
        self.layer, self.head, self.scale = nn.Conv2d(3, 5, 3), nn.Linear(5, 4), scale

    def forward(self, x):
        return self.head(self.layer(self.scale(x)).relu().mean((2, 3)))


@pytest.mark.parametrize(
    "scale",
    [
        lambda x: x / x.abs().max(),
        lambda x: (x - x.min()) / (x.max() - x.min()),
        lambda x: (x - x.mean()) / x.std(),
        lambda x: x / 255 if x.max() > 1.5 else x,
    ],
    ids=["maximum", "range", "deviation", "guard"],
)
@pytest.mark.parametrize("seed", range(3))
def test_extreme_values_of_a_batch_are_seen(scale, seed):
    torch.manual_seed(seed)
    model = OfTheBatch(scale).eval()
    x = torch.rand(4, 3, 16, 16) * torch.tensor([0.2, 0.5, 1, 2.0]).view(4, 1, 1, 1)
    assert samples_interact(model, x)
    together, alone = (
        HiResCAM(model, "layer").attribute(x, 1),
        [HiResCAM(model, "layer").attribute(one[None], 1)[0] for one in x],
    )
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-7)


def test_interaction_is_seen_in_any_model_once_per_shape_and_leaves_no_trace():
    model, x = Centered().eval(), torch.randn(4, 3, 8, 8)
    calls = []
    model.conv.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    with untouched(model, x):
        assert samples_interact(model, x)
        assert samples_interact(model, 2 * x[:1])
    assert not calls, "hooks of the user"
    assert len(find_constant_scores_and_interacting_samples._interaction_cache[model]) == 1
    assert not samples_interact(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2)).eval(), x)
    maps = GradCAM(model, "conv").attribute(x, [0, 1, lambda output: output["logits"][:, 2], None])
    alone = [GradCAM(model, "conv").attribute(x[i : i + 1], target)[0] for i, target in enumerate((0, 1, 2))]
    assert torch.equal(maps[:3], torch.stack(alone))
    model.conv.track_running_stats, gone = False, weakref.ref(model)
    del model
    assert gone() is None


def test_a_model_that_is_changed_is_looked_at_again():
    model, x = CASES["residual"].make(2)
    assert not samples_interact(model, x)
    model.norm.running_mean = model.norm.running_var = None
    assert samples_interact(model, x)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_independent_samples_are_told_as_such(case):
    model, x = case.make(2)
    assert not samples_interact(model.train(), x)


def test_a_random_model_is_not_taken_for_one_that_mixes():
    class Noisy(nn.Module):
        def forward(self, x):
            return (x + torch.randn_like(x)).mean((2, 3))

    model, x = Noisy(), torch.randn(2, 3, 4, 4)
    with untouched(model, x):
        assert not samples_interact(model, x)


def test_other_passes_of_a_model_that_mixes_are_one_by_one():
    model, x = normalized(), torch.randn(3, 3, 14, 14)
    with scoring_scope(model, x, 1) as scores:
        values = scores(torch.cat([x, x.flip(0)]), torch.tensor([0, 1, 2, 2, 1, 0]))
    with torch.no_grad():
        expected = torch.cat([model(one) for one in x.split(1)])[:, 1].double()
    torch.testing.assert_close(scores.clean_scores[0], expected)
    torch.testing.assert_close(values[0], torch.cat([expected, expected.flip(0)]))
    parts = completeness(model, x, 1)
    torch.testing.assert_close(parts.score.double(), expected)


def test_a_run_of_a_model_that_mixes_has_the_rows_of_single_images(tmp_path):
    draw = np.random.default_rng(0)
    for name in "abc":
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    tool = GradCAM(normalized(), "6", preprocess=Preprocess(resize=(14, 14), mean=(0.5,) * 3, std=(0.25,) * 3))
    heats = []
    for size in (1, 3):
        run_batch(tool, tmp_path, tmp_path / f"run{size}", [1], batch_size=size)
        heats.append([one.attribution for one in BatchRun(tmp_path / f"run{size}")])
    np.testing.assert_array_equal(*heats)


# --- scores that do not change


@pytest.mark.parametrize(("step", "constant"), [(1, True), (3, True), (40, False)])
def test_a_score_is_constant_up_to_a_few_steps_of_its_own_precision(step, constant):
    eps = torch.finfo(torch.float32).eps
    scores, owners = torch.tensor([8.0, 8.0 * (1 + step * eps), -2.0, -2.0]), torch.tensor([0, 0, 1, 1])
    found = ScoreRange()
    found.include_scores("score", torch.tensor([8.0, -2.0]), None, 2)
    assert found.is_constant(eps) is None, "nothing was altered"
    found.include_scores("score", scores, owners, 2)
    assert found.is_constant(eps).tolist() == [constant, True]
    found.include_scores("probability", torch.tensor([0.5, 0.25, 0.5, 0.25]), owners, 2)
    assert found.is_constant(eps).tolist() == [False, False]


# --- warnings


def test_a_warning_is_shown_once_at_the_callers_own_line():
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).eval()
    nn.init.constant_(net[4].weight, -1)
    cam = GradCAM(net, "1", preprocess=Preprocess(resize=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3))
    image = Image.new("RGB", (9, 9), (90, 120, 40))

    def serve():
        for _ in range(5):
            cam.explain(image, 1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python's own rule: once for each line
        threads = [threading.Thread(target=serve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [str(one.message)[:44] for one in caught] == ["Grad-CAM: nothing in the map is positive: no"]
    assert (caught[0].filename, caught[0].lineno) == (__file__, serve.__code__.co_firstlineno + 2)


def test_a_warning_points_behind_whatever_of_ours_and_of_torch_lies_between():
    def callback(module, args, output):
        warn_caller("from a hook")

    module = nn.Identity()
    module.register_forward_hook(callback)
    with pytest.warns(CamscopeWarning, match="from a hook") as caught:
        module(torch.ones(1))
    assert caught[0].filename == __file__
    model, x = plain(samples=1)
    tool = IntegratedGradients(nn.Sequential(model, nn.Softmax(1)), n_steps=2)
    with pytest.warns(CamscopeWarning) as caught:
        tool.attribute(x, 1)
    assert {one.filename for one in caught} == {__file__}


def test_a_library_is_silenced_in_one_thread_and_python_forgets_nothing():
    heard = []

    def elsewhere():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("told", stacklevel=1)
        heard.extend(caught)

    with ignore_warnings(message_pattern="told"):
        warnings.warn("told", stacklevel=1)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    with pytest.warns(UserWarning, match="told"):
        warnings.warn("told", stacklevel=1)
    assert [str(one.message) for one in heard] == ["told"]
    filters = list(warnings.filters)
    with ignore_warnings(module_pattern="anything"):
        assert list(warnings.filters)[-len(filters) :] == filters
