"""YOLO and RT-DETR of Ultralytics: the same boxes and scores as its own `predict`, and the maps of a plain hook."""

from pathlib import Path

import numpy as np
import pytest
import torch

ultralytics = pytest.importorskip("ultralytics")

from camscope import GradCAM, LayerCAM, Preprocess, compare, load_model  # noqa: E402 - the line above skips the file without the package
from camscope.errors import InputError, ModelError, TargetError  # noqa: E402 - as above
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata  # noqa: E402 - as above
from camscope.targets import BestBox, Box  # noqa: E402 - as above
from tests.ultralytics_nets import RTDETR, SIDE, image, model_object, pick_box, predictions, preprocess, rows_on_image  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "models.md"
DETECTORS = ("yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n")
OTHERS = (
    *("yolov8n-seg", "yolov8n-pose", "yolov8n-obb", "yolo11n-seg", "yolo11n-obb"),
    *("yolo26n-pose", "yolo26n-obb", "yolov8n-rtdetr"),
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", DETECTORS + OTHERS)
def test_every_box_of_predict_is_a_row_with_its_score(name):
    end_to_end = {"nms": False} if "26" in name or "v10" in name else {}  # the one-to-one rows, without suppression
    boxes, scores, classes = predictions(model_object(name), **end_to_end)
    assert len(boxes) >= 3
    rows, probabilities = rows_on_image(name)
    height, width = image().shape[:2]
    if not name.endswith(("obb", "rtdetr")):  # whose boxes predict does not clip
        rows = rows.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    for box, score, label in zip(boxes, scores, classes, strict=True):
        distance = (rows - box).abs().amax(1) + 1e3 * (probabilities[:, label] - score).abs()
        best = int(distance.argmin())
        assert float((rows[best] - box).abs().max()) < 0.5
        assert float((probabilities[best, label] - score).abs()) < 1e-4


@pytest.mark.parametrize("name", ["yolov8n", "yolo11n", "yolov10n", "yolo26n"])
@pytest.mark.parametrize("stride", [8, 16, 32])
def test_the_map_of_a_box_is_that_of_a_plain_hook_at_its_level(name, stride):
    made, (corners, label, row) = model_object(name), pick_box(name, stride)
    x, _ = Preprocess.letterbox(SIDE)(image())
    network, level = made.model, {8: 0, 16: 1, 32: 2}[stride]
    kept = []
    handle = network.model[network.model[-1].f[level]].register_forward_hook(lambda *args: kept.append(args[2]))
    raw = network(x[None])[1]
    handle.remove()
    logits = raw.get("one2one", raw)["scores"]
    probability = logits[0, label, row].sigmoid()
    (gradient,) = torch.autograd.grad(probability, kept[0])
    probability = probability.detach()
    activation = kept[0].detach()
    share = (8 / stride) ** 2  # the gradient is spread over so many cells of the finest grid
    plain = {
        GradCAM: (gradient.mean((2, 3), keepdim=True) * activation).sum(1).relu()[0] * share,
        LayerCAM: (gradient.relu() * activation).sum(1).relu()[0] * share,
    }
    for method, expected in plain.items():
        explanation = method(made).explain(x, Box(*corners, label=label))
        assert explanation.layer == "neck"
        assert explanation.label.endswith(f"of the image, predicted at stride {stride}")
        assert explanation.score == pytest.approx(float(probability), rel=1e-4)
        repeated = expected.repeat_interleave(stride // 8, 0).repeat_interleave(stride // 8, 1).numpy()
        assert float(repeated.max()) > 0
        np.testing.assert_allclose(explanation.attribution, repeated, atol=1e-4 * float(repeated.max()))


@pytest.mark.parametrize("name", ["yolo11n", "yolo26n", RTDETR])
def test_a_class_alone_explains_its_best_box(name):
    made, way = model_object(name), preprocess(name)
    x, place = way(image())
    with torch.no_grad():
        rows = load_model(made).eval()(x[None])
    label = int(rows.probabilities[0].amax(0).argmin())  # a class whose best row is not saturated
    best = int(rows.probabilities[0, :, label].argmax())
    x0, y0, x1, y1 = rows.boxes[0, best].tolist()
    (top, left), (bottom, right) = place.to_image([[y0, x0], [y1, x1]]).tolist()
    explanation = LayerCAM(made, preprocess=way).explain(image(), label)
    corners = ", ".join(f"{round(value, 1):zg}" for value in (left, top, right, bottom))
    assert explanation.label.startswith(f"class {label} in the box ({corners}) of the image")
    assert explanation.score == pytest.approx(float(rows.probabilities[0, best, label]), rel=1e-4)
    assert float(explanation.attribution.max()) > 0
    assert explanation.status == "ok"


def test_the_object_has_one_wrapper_until_it_gets_another_model():
    made = ultralytics.YOLO("yolo11n.yaml")
    first = GradCAM(made).model
    assert LayerCAM(made).model is first
    assert load_model(made) is first
    made.model.names = {i: f"kind {i}" for i in range(80)}
    assert GradCAM(made).class_names[3] == "kind 3"
    made.model = ultralytics.YOLO("yolo11n.yaml").model
    assert GradCAM(made).model is not first
    figure = compare(
        model_object("yolov8n"),
        image(),
        methods=["gradcam", "layercam"],
        targets=[3],
        preprocess=Preprocess.letterbox(SIDE),
    )
    assert len({explanation.label for explanation in figure.explanations}) == 1


def test_a_class_of_a_run_is_restored(tmp_path):
    from PIL import Image

    Image.fromarray(image()).save(tmp_path / "a.png")
    made = model_object("yolov8n")
    explanation = LayerCAM(made, preprocess=Preprocess.letterbox(SIDE)).explain(tmp_path / "a.png", 3)
    assert explanation.target == 3
    (alone,) = LayerCAM(made, preprocess=Preprocess.letterbox(SIDE)).explain_batch([tmp_path / "a.png"], [None])
    assert alone.label.startswith(f"class {alone.target} in the box")


def test_a_batch_has_a_box_for_each_image():
    x = torch.stack([Preprocess.letterbox(SIDE)(picture)[0] for picture in (image(), image()[:, ::-1].copy())])
    cam = LayerCAM(model_object("yolo11n"))
    maps = cam.attribute(x, [3, None])
    alone = [cam.attribute(part[None], label)[0] for part, label in zip(x, [3, None], strict=True)]
    torch.testing.assert_close(maps, torch.stack(alone), rtol=1e-3, atol=1e-3 * float(maps.abs().max()))
    labels = [explanation.label for explanation in cam.explain_batch(list(x), 3)]
    assert len(set(labels)) == 2
    assert all(label.startswith("class 3 in the box") for label in labels)


def test_two_boxes_of_one_class_have_two_maps():
    x, _ = Preprocess.letterbox(SIDE)(image())
    made = model_object("yolo11n")
    with torch.no_grad():
        rows = load_model(made).eval()(x[None])
    middle = (rows.boxes[0, :, :2] + rows.boxes[0, :, 2:]) / 2
    found = [
        int(torch.where((rows.strides[0] == 8) & part, rows.probabilities[0, :, 3], 0).argmax())
        for part in ((middle < 40).all(1), (middle[:, 0] > 56) & (middle[:, 1] < 40))
    ]
    peaks = []
    for row in found:
        values = LayerCAM(made).explain(x, Box(*rows.boxes[0, row].tolist(), label=3)).attribution
        peaks.append(np.unravel_index(values.argmax(), values.shape)[1] * 8)
    assert peaks[0] < 48 < peaks[1]


def test_a_box_without_a_class_has_that_of_its_most_probable_row():
    (x0, y0, x1, y1), _, _ = pick_box("yolo11n", 8)
    x, _ = Preprocess.letterbox(SIDE)(image())
    with torch.no_grad():
        rows = load_model(model_object("yolo11n")).eval()(x[None])
    boxes = rows.boxes[0]
    low, high = boxes[:, :2].maximum(torch.tensor([x0, y0])), boxes[:, 2:].minimum(torch.tensor([x1, y1]))
    shared = (high - low).clamp(min=0).prod(1)
    overlap = shared / ((boxes[:, 2:] - boxes[:, :2]).prod(1) + (x1 - x0) * (y1 - y0) - shared)
    best = int(torch.where(overlap >= 0.5, rows.probabilities[0].amax(1), 0).argmax())
    explanation = LayerCAM(model_object("yolo11n")).explain(x, Box(x0, y0, x1, y1))
    assert explanation.label.startswith(f"class {int(rows.probabilities[0, best].argmax())} in the box")


@pytest.mark.parametrize("size", [(90, 128), (97, 61), (33, 640), (500, 375), (64, 64), (1, 300)])
@pytest.mark.parametrize("side", [96, 320])
def test_the_letterbox_is_that_of_ultralytics(size, side):
    from ultralytics.data.augment import LetterBox

    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    x, place = Preprocess.letterbox(side)(pixels)
    expected = LetterBox((side, side), auto=True, stride=32)(image=pixels)
    np.testing.assert_array_equal((x * 255).round().numpy().astype(np.uint8), expected.transpose(2, 0, 1))
    params = LetterBox((side, side), auto=True, stride=32).get_params({"img": pixels})
    corners = np.array([[0, 0], [size[0], size[1]]])
    inside = place.to_input(corners)
    start = np.array([params["top"], params["left"]])
    np.testing.assert_allclose(inside, [start, start + params["new_unpad"][::-1]])
    square, _ = Preprocess.letterbox(side, multiple=None)(pixels)
    np.testing.assert_array_equal(
        (square * 255).round().numpy().astype(np.uint8), LetterBox((side, side))(image=pixels).transpose(2, 0, 1)
    )


def test_a_classifier_explains_the_logits_that_predict_makes_probabilities_of():
    made = ultralytics.YOLO("yolo11n-cls.yaml")
    made.model.names = {i: f"kind {i}" for i in range(1000)}
    explanation = GradCAM(made, preprocess=Preprocess(resize=64, crop=64, mean=(0,) * 3, std=(1,) * 3)).explain(
        image(), 7
    )
    result = made.predict(np.ascontiguousarray(image()[..., ::-1]), imgsz=64, verbose=False)[0]
    assert explanation.label == "kind 7"
    assert explanation.probability == pytest.approx(float(result.probs.data[7]), rel=1e-3)
    assert get_loaded_model_metadata(load_model("yolo:yolo11n-cls.yaml")).preprocess.resize == 224


def test_a_model_of_open_vocabulary_is_one_error():
    with pytest.raises(ModelError, match="has the head YOLOEDetect; expected a model that detects"):
        GradCAM(ultralytics.YOLOE("yoloe-11n.yaml"))


def test_an_input_of_odd_sides_is_one_error():
    with pytest.raises(InputError, match="multiples of 32"):
        LayerCAM(model_object("yolo11n")).explain(torch.rand(3, 96, 80), 3)


def test_a_class_that_does_not_exist_is_one_error():
    with pytest.raises(TargetError, match="out of range"):
        LayerCAM(model_object("yolo11n"), preprocess=Preprocess.letterbox(SIDE)).explain(image(), 80)
    with pytest.raises(TargetError, match="resolved by the first"):
        BestBox(0)(None)
