"""YOLO and RT-DETR of Ultralytics: maps of every method, and what they leave as it was."""

from pathlib import Path

import numpy as np
import pytest
import torch

ultralytics = pytest.importorskip("ultralytics")

from camscope import METHODS, GradCAM, LayerCAM, Preprocess  # noqa: E402 - the line above skips the file without the package
from camscope.errors import CamscopeError  # noqa: E402 - as above
from camscope.targets import Box  # noqa: E402 - as above
from tests.ultralytics_nets import RTDETR, SIDE, image, model_object, pick_box, predictions, preprocess  # noqa: E402 - as above
from tests.untouched import untouched  # noqa: E402 - as above
from tests.zoo.asked import FEW  # noqa: E402 - as above
from tests.zoo.of_ultralytics import ROWS, section  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "models.md"
FEW_PASSES = (
    *("gradcam", "hirescam", "layercam", "eigencam", "reciprocam", "scorecam", "fullgrad"),
    *("saliency", "integratedgradients", "occlusion", "drise", "randomcam"),
)
WITHOUT_MAP = {
    "cam": "uses the classifier weights",
    "finercam": "compares a class",
    "rollout": "no self-attention ran",
    "excitationbackprop": "no rule for some operations",
    "guidedbackprop": "no ReLU can be reached",
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", FEW_PASSES)
def test_each_method_has_a_repeatable_map_and_leaves_no_trace(method):
    made, (x, _) = model_object("yolov8n"), Preprocess.letterbox(SIDE)(image())
    cls = METHODS[method]
    settings = {key: value for key, value in FEW.items() if key in cls.__dataclass_fields__}
    corners, label, _ = pick_box("yolov8n", 16)
    tool, target = cls(made, **settings), Box(*corners, label=label)
    for parameter in made.model.parameters():
        parameter.requires_grad_(False)
    try:
        with untouched(made.model, x):
            first = tool.explain(x, target)
        frozen = tool.explain(x, target)
    finally:
        for parameter in made.model.parameters():
            parameter.requires_grad_(True)
    for values in (first.attribution, frozen.attribution):
        assert values.dtype == np.float32
        assert np.isfinite(values).all()
    np.testing.assert_allclose(
        frozen.attribution, first.attribution, atol=1e-5 * float(np.abs(first.attribution).max())
    )


@pytest.mark.parametrize("method", WITHOUT_MAP)
def test_a_method_without_a_map_says_why(method):
    made, (x, _) = model_object("yolov8n"), Preprocess.letterbox(SIDE)(image())
    with untouched(made.model, x), pytest.raises(CamscopeError, match=WITHOUT_MAP[method]):
        METHODS[method](made).explain(x, 3)


def test_drise_of_a_box_is_the_same_in_batches_of_any_size():
    made, (x, _) = model_object("yolov8n"), Preprocess.letterbox(SIDE)(image())
    corners, label, _ = pick_box("yolov8n", 8)
    explanation = METHODS["drise"](made, n_samples=64).explain(x, Box(*corners, label=label))
    assert explanation.status == "ok"
    again = METHODS["drise"](made, n_samples=64, batch_size=3).explain(x, Box(*corners, label=label))
    np.testing.assert_allclose(
        explanation.attribution, again.attribution, atol=1e-4 * float(explanation.attribution.max())
    )


def state(made):
    """Everything of a model that a call could change: attributes, modes, hooks, tensors and their versions."""
    return [
        (
            name,
            {key: id(value) for key, value in vars(module).items() if not isinstance(value, dict)},
            {
                key: [(k, id(v)) for k, v in value.items()]
                for key, value in vars(module).items()
                if isinstance(value, dict)
            },
            [(value._version, value.requires_grad) for value in module.parameters(recurse=False)],
        )
        for name, module in made.named_modules()
    ]


@pytest.mark.parametrize("name", ["yolo11n", "yolov10n", RTDETR])
@pytest.mark.parametrize("training", [False, True])
def test_the_object_of_the_user_stays_as_it_is(name, training):
    made = model_object(name)
    made.model.train(training)
    before = state(made.model)
    LayerCAM(made, preprocess=preprocess(name)).explain(image(), 3)
    assert state(made.model) == before
    made.model.eval()


def test_a_fused_model_has_the_same_boxes_and_nearly_the_same_map():
    made = ultralytics.YOLO("yolo26n.yaml")
    made.model.load_state_dict(model_object("yolo26n").model.state_dict())
    x, _ = Preprocess.letterbox(SIDE)(image())
    corners, label, _ = pick_box("yolo26n", 16)
    before = LayerCAM(made).explain(x, Box(*corners, label=label))
    made.model.model[-1].end2end = True  # so that fuse() keeps the one-to-one branch
    made.fuse()
    assert made.model.is_fused()
    after = LayerCAM(made).explain(x, Box(*corners, label=label))
    assert after.score == pytest.approx(before.score, rel=1e-3)
    peak = float(before.attribution.max())
    np.testing.assert_allclose(after.attribution, before.attribution, atol=0.01 * peak)


def test_predict_before_does_not_change_the_map():
    made, (corners, label, _) = model_object(RTDETR), (None, 3, None)
    cam = LayerCAM(made, preprocess=preprocess(RTDETR))
    before = cam.explain(image(), label)
    predictions(made)  # in inference mode, which leaves tensors of it in the head
    np.testing.assert_array_equal(cam.explain(image(), label).attribution, before.attribution)
    assert corners is None


def test_the_page_of_models_has_the_section():
    assert PAGE.read_text("utf-8").endswith(section())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_page_of_models_has_the_layers_and_grids(row):
    explanation = GradCAM(model_object(row.name)).explain(torch.rand(3, *row.size), 0)
    assert (explanation.layer, explanation.grid) == (row.layer, row.grid)
