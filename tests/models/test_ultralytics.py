"""YOLO and RT-DETR of Ultralytics: the same boxes and scores as its own `predict`, and the maps of a plain hook."""

import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

ultralytics = pytest.importorskip("ultralytics")

import camscope  # noqa: E402 - the line above skips the file without the package
from camscope import METHODS, GradCAM, LayerCAM, Preprocess, compare, load_model  # noqa: E402 - as above
from camscope.errors import CamscopeError, InputError, ModelError, TargetError, WeightsError  # noqa: E402 - as above
from camscope.model_card import get_card  # noqa: E402 - as above
from camscope.targets import BestBox, Box  # noqa: E402 - as above
from tests.untouched import untouched  # noqa: E402 - as above
from tests.zoo.asked import FEW  # noqa: E402 - as above
from tests.zoo.of_ultralytics import ROWS, section  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "models.md"
SIDE = 96
DETECTORS = ("yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n")
OTHERS = (
    *("yolov8n-seg", "yolov8n-pose", "yolov8n-obb", "yolo11n-seg", "yolo11n-pose", "yolo11n-obb"),
    *("yolo26n-seg", "yolo26n-pose", "yolo26n-obb", "yolov8n-rtdetr"),
)
RTDETR = "yolov8n-rtdetr"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def image():
    """(96,128,3): smooth blobs of color, unlike noise, so that the levels differ."""
    coarse = np.random.default_rng(3).integers(0, 256, (9, 12, 3), np.uint8)
    from PIL import Image

    return np.asarray(Image.fromarray(coarse).resize((128, 96), Image.Resampling.BICUBIC))


def make_lively(network):
    """Give BatchNorm the statistics of an image, and the class scores a spread: as they come, all are nearly the same."""
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    head, x = network.model[-1], Preprocess.letterbox(SIDE)(image())[0][None]
    is_rtdetr = type(head).__name__ == "RTDETRDecoder"
    last = [level[-1] for name in ("cv3", "one2one_cv3") for level in getattr(head, name, ())]
    sides = [level[-1] for name in ("cv2", "one2one_cv2") for level in getattr(head, name, ())]
    last += [*head.dec_score_head, head.enc_score_head] if is_rtdetr else []
    kept = []
    handles = [layer.register_forward_hook(lambda *args: kept.append((args[0], args[2]))) for layer in last + sides]
    with torch.no_grad():
        for mlp in (*head.dec_bbox_head, head.enc_bbox_head) if is_rtdetr else ():
            torch.nn.init.normal_(mlp.layers[-1].weight, std=0.02)
        for layer in last + sides:
            torch.nn.init.normal_(layer.weight, std=0.1)
        network.train()
        head.train(not is_rtdetr)
        network.predict(torch.cat([x, x.flip(3), 1 - x, x.flip(2)]))
        network.eval()
        kept.clear()
        network.predict(x)
        for layer, output in kept:
            is_side = any(layer is other for other in sides)
            layer.weight *= (0.3 if is_side else 1) / output.std()
            layer.bias.fill_(1.0 if is_side else -1.5)
            if is_side and head.reg_max > 1:  # the most probable distance is one or two cells
                layer.bias.copy_(-(torch.arange(head.reg_max) - 1.4).abs().repeat(4) * 2)
    for handle in handles:
        handle.remove()


@cache
def model_object(name):
    """A `YOLO` object with random weights, whose scores depend on the image."""
    kind = ultralytics.RTDETR if name == RTDETR else ultralytics.YOLO
    torch.manual_seed(0)
    made = kind(f"{name}.yaml")
    make_lively(made.model)
    return made


def predictions(made, **settings):
    """What the package's own `predict` finds: boxes (D,4) on the image, scores (D,), classes (D,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = made.predict(
            np.ascontiguousarray(image()[..., ::-1]), imgsz=SIDE, conf=0.05, max_det=100, verbose=False, **settings
        )[0]
    found = result.boxes if result.boxes is not None else result.obb
    return found.xyxy.clone(), found.conf.clone(), found.cls.long().clone()


def preprocess(name):
    return get_card(load_model(model_object(name))).preprocess if name == RTDETR else Preprocess.letterbox(SIDE)


def rows_on_image(name):
    """Boxes (A,4) on the image and probabilities (A,K), from the wrapper."""
    model = load_model(model_object(name)).eval()
    if name == RTDETR:
        way = Preprocess(resize=(SIDE, SIDE), mean=(0,) * 3, std=(1,) * 3, interpolation="opencv-bilinear")
    else:
        way = Preprocess.letterbox(SIDE)
    x, place = way(image())
    with torch.no_grad():
        rows = model(x[None])
    ends = [place.to_image(rows.boxes[0, :, [column + 1, column]].numpy()) for column in (0, 2)]
    boxes = torch.tensor(np.concatenate([end[:, ::-1] for end in ends], 1))
    return boxes, rows.probabilities[0]


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


def pick_box(name, stride):
    """A row of a level with a moderate score: its box, its class, and its number."""
    x, _ = preprocess(name)(image())
    with torch.no_grad():
        rows = load_model(model_object(name)).eval()(x[None])
    boxes = rows.boxes[0]
    is_inside = (boxes > -SIDE / 2).all(1) & (boxes < SIDE * 1.5).all(1) & (boxes[:, 2:] - boxes[:, :2] > 4).all(1)
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    is_inside &= ((middle > 16) & (middle < 60)).all(1)
    of_level = ((rows.strides[0] == stride) & is_inside).nonzero()[:, 0]
    scores, labels = rows.probabilities[0, of_level].max(1)
    place = int((scores - 0.6).abs().argmin())
    return rows.boxes[0, of_level[place]].tolist(), int(labels[place]), int(of_level[place])


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
    assert get_card(load_model("yolo:yolo11n-cls.yaml")).preprocess.resize == 224


# --- every method

FEW_PASSES = (
    *("gradcam", "hirescam", "layercam", "gradcam++", "eigencam", "fem", "reciprocam", "liftcam", "scorecam", "dff"),
    *("fullgrad", "saliency", "integratedgradients", "smoothgrad", "occlusion", "rise", "drise", "randomcam"),
)
WITHOUT_MAP = {
    "cam": "uses the classifier weights",
    "finercam": "compares a class",
    "rollout": "no self-attention ran",
    "excitationbackprop": "no rule for some operations",
    "guidedbackprop": "no ReLU can be reached",
}


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


def test_drise_of_a_box_is_bright_where_masks_hide_its_score():
    """D-RISE by hand: the mean of the masks, weighed by the score of the box on each masked image."""
    made, (x, _) = model_object("yolov8n"), Preprocess.letterbox(SIDE)(image())
    corners, label, _ = pick_box("yolov8n", 8)
    explanation = METHODS["drise"](made, n_samples=64).explain(x, Box(*corners, label=label))
    assert explanation.status == "ok"
    again = METHODS["drise"](made, n_samples=64, batch_size=3).explain(x, Box(*corners, label=label))
    np.testing.assert_allclose(
        explanation.attribution, again.attribution, atol=1e-4 * float(explanation.attribution.max())
    )


def test_the_page_of_models_has_the_section():
    assert PAGE.read_text("utf-8").endswith(section())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_page_of_models_has_the_layers_and_grids(row):
    explanation = GradCAM(model_object(row.name)).explain(torch.rand(3, *row.size), 0)
    assert (explanation.layer, explanation.grid) == (row.layer, row.grid)


# --- files


class Evil:
    """Pickled, it is a call that writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def save(content, path, **settings):
    torch.save(content, path, **settings)
    return path


def poisoned(kind, folder, mark):
    """A malicious file of each kind, which would write `mark`, and what the error says."""
    network = ultralytics.YOLO("yolo11n.yaml").model
    code = f"open({str(mark)!r}, 'w').close() or nn.SiLU()"
    description = {"nc": 2, "activation": code, "backbone": [[-1, 1, "Conv", [8, 3, 2]]], "head": []}
    path = folder / "best.pt"
    if kind == "object":
        save({"model": Evil(mark)}, path)
        return path, r"names .*exec"
    if kind == "attribute":
        network.model[0].extra = Evil(mark)
        save({"model": network}, path)
        return path, r"names .*exec"
    if kind == "old format":
        save({"model": Evil(mark)}, path, _use_new_zipfile_serialization=False)
        return path, r"names .*exec"
    if kind == "pickle":
        import pickle

        path.write_bytes(pickle.dumps({"model": Evil(mark)}))
        return path, "is not read|cannot be read"
    if kind == "call of a layer":
        from ultralytics.nn.tasks import DetectionModel

        class Call:
            def __reduce__(self):
                return DetectionModel, (description,)

        save({"model": Call()}, path)
        return path, "cannot be read|is not read"
    if kind == "getattr":

        class Call:
            def __reduce__(self):
                return getattr, (torch.nn.Module, "__subclasses__")

        save({"model": Call()}, path)
        return path, "cannot be read|is not read|names"
    if kind == "TorchScript":
        torch.jit.script(torch.nn.ReLU()).save(str(path))
        return path, "TorchScript"
    path = folder / "net.yaml"
    if kind == "activation":
        path.write_text(
            f"nc: 2\nactivation: {code!r}\nbackbone:\n- [-1, 1, Conv, [8, 3, 2]]\nhead:\n- [[0], 1, Detect, [nc]]\n"
        )
        return path, "is code"
    if kind == "function":
        path.write_text("nc: 2\nbackbone:\n- [-1, 1, check_requirements, [evil]]\nhead:\n- [[0], 1, Detect, [nc]]\n")
        return path, "is not a layer"
    path.write_text(f"nc: !!python/object/apply:os.system ['touch {mark}']\nbackbone: []\nhead: []\n")
    return path, "cannot be built"


KINDS = (
    *("object", "attribute", "old format", "pickle", "call of a layer", "getattr", "TorchScript"),
    *("activation", "function", "yaml object"),
)


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of TorchScript
@pytest.mark.parametrize("kind", KINDS)
def test_a_malicious_file_executes_nothing(kind, tmp_path):
    allowed = set(map(str, torch.serialization.get_safe_globals()))
    mark = tmp_path / "mark"
    path, expected = poisoned(kind, tmp_path, mark)
    with pytest.raises((WeightsError, ModelError), match=expected):
        load_model(f"yolo:{path}")
    assert not mark.exists()
    added = set(map(str, torch.serialization.get_safe_globals())) - allowed
    assert not [entry for entry in added if "ultralytics" in entry or "getattr" in entry or "torch.nn" in entry]


@pytest.mark.parametrize("name", ["yolov8n-pose", "yolov10n", "yolo26n", RTDETR])
def test_a_checkpoint_of_the_package_is_read_without_trust(name, tmp_path):
    made = model_object(name)
    made.model.names = {i: f"kind {i}" for i in range(len(made.model.names))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save(tmp_path / "best.pt")
        theirs = type(made)(tmp_path / "best.pt")  # in half precision, as in the file
    model, (x, _) = load_model(f"yolo:{tmp_path}/best.pt"), Preprocess.letterbox(SIDE)(image())
    assert get_card(model).class_names == tuple(made.model.names.values())
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(vars(model(x[None])), vars(load_model(theirs)(x[None])))
    made.model.names = {i: str(i) for i in range(len(made.model.names))}


def test_trust_executes_and_says_so(tmp_path):
    network = ultralytics.YOLO("yolo11n.yaml").model
    network.extra = Evil(tmp_path / "mark")
    save({"model": network}, tmp_path / "best.pt")
    with pytest.warns(match="code in it is executed"):
        load_model(f"yolo:{tmp_path}/best.pt", trust_code=True)
    assert (tmp_path / "mark").exists()


def test_the_command_line_trusts_only_by_its_option(tmp_path):
    network = ultralytics.YOLO("yolo11n.yaml").model
    network.extra = Evil(tmp_path / "mark")
    save({"model": network}, tmp_path / "best.pt")
    command = [sys.executable, "-m", "camscope", "layers", f"yolo:{tmp_path}/best.pt", "--size", "64"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "--trust-code" in refused.stderr
    assert not (tmp_path / "mark").exists()
    trusted = subprocess.run([*command, "--trust-code"], capture_output=True, text=True, check=True)
    assert "code in the file is executed" in " ".join(trusted.stderr.split())
    assert (tmp_path / "mark").exists()
    assert "neck" in trusted.stdout


def test_no_run_config_or_page_can_trust():
    from camscope.audit.core.config import Config

    folder = Path(camscope.__file__).parent
    texts = {
        path: path.read_text("utf-8")
        for part in ("audit", "batch", "evaluation", "integrations")
        for path in (folder / part).rglob("*.*")
        if path.suffix in (".py", ".html", ".js", ".toml")
    }
    assert len(texts) > 50
    assert not [path for path, text in texts.items() if "trust" in text and "trust_code" in text.replace("-", "_")]
    assert "trust_code" not in Config.model_fields


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("yolo:nowhere.pt", {}, "downloads none"),
        ("yolo:yolo11n.onnx", {}, r"expected a checkpoint FILE\.pt, or NAME\.yaml"),
        ("yolo:nowhere.yaml", {}, "cannot be built"),
        ("yolo:yolo26n-depth.yaml", {}, "depth"),
        ("yolo:yoloe-11n.yaml", {}, "cannot be built"),
        ("yolo:https://example.org/best.yaml", {}, "downloads none"),
        ("resnet18", {"trust_code": True}, r"trust_code is for yolo:FILE\.pt"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(spec, settings, message):
    with pytest.raises((ModelError, WeightsError), match=message):
        load_model(spec, **settings)


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
