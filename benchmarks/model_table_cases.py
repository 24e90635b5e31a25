"""The cases of the table of models: small models with random weights, a question to each, and the same map written out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from camscope import METHODS, EigenCAM, GradCAM, HiResCAM, LayerCAM, extract_patch_features
from camscope.targets import Box, Region, Token


@dataclass(frozen=True)
class Prepared:
    """A model that is ready: `explain` returns layer, grid and map; `compute` returns the same map by other means."""

    explain: Callable[[], Any]
    compute: Callable[[Any], np.ndarray]
    forward: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A model, a question, and how far the two maps may differ as a share of the maximum."""

    family: str
    name: str
    question: str
    prepare: Callable[[], Prepared]
    tolerance: float = 1e-4


def record_layer(model: nn.Module, explanation: Any, run: Callable[[], Any]) -> tuple[Any, Tensor]:
    """Run a model, and return its output and the tensor of the layer, connected with it, by a plain hook."""
    kept = []

    def keep(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            kept.append(find_map(output, explanation.grid))
            return None
        kept.append(output.detach().clone().requires_grad_())
        return kept[-1].clone()  # a later layer may work in place

    handle = model.get_submodule(explanation.layer).register_forward_hook(keep)
    try:
        return run(), kept[-1]
    finally:
        handle.remove()


def find_map(output: Any, grid: tuple[int, ...]) -> Any:
    """The first tensor in an output that can hold the grid."""
    if isinstance(output, Tensor):
        shape = tuple(output.shape)
        spatial = shape[2:] == grid or shape[1:-1] == grid
        return output if spatial or (output.ndim == 3 and shape[1] >= np.prod(grid)) else None
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (list, tuple)) else ()
    return next((found for value in values if (found := find_map(value, grid)) is not None), None)


def to_channels_first(tensor: Tensor, grid: tuple[int, ...], after: int = 0) -> Tensor:
    """(K, cells) of the first sample; `after` tokens follow those of the image."""
    sample = tensor.detach()[0]
    if sample.ndim == 2:
        end = len(sample) - after
        return sample[end - int(np.prod(grid)) : end].T
    return sample.flatten(1) if tuple(sample.shape[1:]) == grid else sample.flatten(0, -2).T


def combine(name: str, activation: Tensor, gradient: Tensor) -> Tensor:
    """The map of a method from (K, cells), as its paper writes it."""
    if name == "gradcam":
        return (gradient.mean(1, keepdim=True) * activation).sum(0).relu()
    return (gradient.relu() * activation).sum(0).relu() if name == "layercam" else (gradient * activation).sum(0)


def by_autograd(
    method: str, model: nn.Module, run: Callable[[], Any], score: Callable[[Any], Tensor], after: int = 0
) -> Any:
    """A function that computes the map of an explanation's layer with `torch.autograd.grad`."""

    def compute(explanation: Any) -> np.ndarray:
        output, tensor = record_layer(model, explanation, run)
        (gradient,) = torch.autograd.grad(score(output), tensor)
        parts = [to_channels_first(part, explanation.grid, after) for part in (tensor, gradient)]
        return np.asarray(combine(method, *parts).reshape(explanation.grid))

    return compute


def by_svd(model: nn.Module, run: Callable[[], Any]) -> Any:
    """A function that computes Eigen-CAM with NumPy; a singular vector has no sign, so it is that of the explanation."""

    def compute(explanation: Any) -> np.ndarray:
        with torch.no_grad():
            _, tensor = record_layer(model, explanation, run)
        cells = to_channels_first(tensor, explanation.grid).T.double().numpy()
        values = (cells @ np.linalg.svd(cells, full_matrices=False)[2][0]).reshape(explanation.grid)
        return np.asarray(values * np.sign((values * explanation.attribution).sum()))

    return compute


def detector(name: str) -> Prepared:
    """A box of a detector of Hugging Face."""
    nets = import_module("tests.targets.test_huggingface_detectors")
    model, (x, more) = nets.small(name), nets.inputs_of(name)
    is_softmax = name in ("DETR", "Table Transformer", "YOLOS")

    def probabilities(output: Any) -> Tensor:
        scores: Tensor = output.logits[0].softmax(1)[:, :-1] if is_softmax else output.logits[0].sigmoid()
        return scores

    def run() -> Any:
        return model(pixel_values=x.clone().requires_grad_(), **more)

    with torch.no_grad():
        output = run()
    scores = probabilities(output)
    query, label = divmod(int(scores.argmax()), scores.shape[1])
    cx, cy, width, height = (output.pred_boxes[0, query] * torch.tensor([x.shape[3], x.shape[2]] * 2)).tolist()
    box = Box(cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2, label=label)
    after = 5 if name == "YOLOS" else 0  # its detection tokens
    compute = by_autograd("layercam", model, run, lambda output: probabilities(output)[query, label], after)
    return Prepared(lambda: LayerCAM(model).explain(x[0], box, additional_forward_args=more or None), compute, run)


def segmentation(build: Any, label: int, extra: dict[str, Tensor], field: str) -> Prepared:
    """A region of a segmentation model."""
    heads = import_module("tests.targets.test_segmentation_heads")
    model, extra = heads.seeded(build), heads.in_float64(extra)
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def score(output: Any) -> Tensor:
        maps = output if isinstance(output, Tensor) else getattr(output, field)
        maps = maps[:, 0] if field == "pred_masks" else maps
        return maps[0, label, 20 * maps.shape[2] // 64, 40 * maps.shape[3] // 64]

    def run() -> Any:
        return model(x.clone().requires_grad_(), **extra)

    asked = Region(label, point=(40, 20))
    return Prepared(
        lambda: HiResCAM(model).explain(x[0], asked, additional_forward_args=extra or None),
        by_autograd("hirescam", model, run, score),
        run,
    )


def smp(name: str) -> Prepared:
    """A region of a model of segmentation_models_pytorch."""
    library = import_module("segmentation_models_pytorch")
    return segmentation(lambda: getattr(library, name)("resnet18", encoder_weights=None, classes=3), 1, {}, "")


def video(name: str) -> Prepared:
    """A class of a video model."""
    nets = import_module("tests.explainers.test_huggingface_videos")
    build, *order = nets.FAMILIES[name]
    model, x = build(), nets.video()

    def compute(explanation: Any) -> np.ndarray:
        output, tokens = nets.record(model, explanation.layer, lambda: model(x.clone().requires_grad_()).logits)
        (gradient,) = torch.autograd.grad(output[0, 1], tokens)
        parts = [nets.by_hand(part.detach(), *order)[0].flatten(1) for part in (tokens, gradient)]
        return np.asarray(combine("gradcam", *parts).reshape(explanation.grid))

    return Prepared(lambda: GradCAM(model).explain(x[0], 1), compute, lambda: model(x))


def encoder(name: str) -> Prepared:
    """The cosine of every patch with the patch at a point."""
    row = import_module("tests.encoders").BY_NAME[name]
    model, x = row.model(), row.image()

    def compute(explanation: Any) -> np.ndarray:
        kept: list[Any] = []
        handle = model.get_submodule(row.layer).register_forward_hook(lambda *call: kept.append(call[2]))
        with torch.no_grad():
            model(x[None])
        handle.remove()
        tokens = (kept[-1] if isinstance(kept[-1], Tensor) else kept[-1][0])[0, row.prefix :]
        return np.asarray(nn.functional.cosine_similarity(tokens, tokens[6][None], dim=1).reshape(4, 4))

    point = (row.side * 0.6, row.side * 0.3)  # column 2, row 1
    return Prepared(
        lambda: extract_patch_features(model, [x]).similarity_to_point(point)[0], compute, lambda: model(x[None])
    )


def without_target(name: str) -> Prepared:
    """Eigen-CAM of a model without class scores."""
    nets = import_module("tests.explainers.test_methods_without_target")
    torch.manual_seed(0)
    build = getattr(nets, name)
    model = build().eval()
    x = torch.rand(1, 3, *(nets.PUBLISHED[build][0],) * 2, generator=torch.Generator().manual_seed(1))
    return Prepared(lambda: EigenCAM(model).explain(x[0]), by_svd(model, lambda: model(x)), lambda: model(x))


def language(name: str) -> Prepared:
    """A word of a vision-language model."""
    nets = import_module("tests.explainers.vision_language.test_vision_language_models")
    (model, processor), image = nets.built(name), nets.draw_noise()
    prompt = nets.write_prompt(name)

    def compute(explanation: Any) -> np.ndarray:
        inputs = nets.run_processor(name, image)
        features, gradients, _ = nets.plain_features(name, inputs)
        features, gradients = features.flatten(0, -2), gradients.flatten(0, -2)
        if name in ("blip_2", "florence2"):  # a class token, or the mean of all cells, comes first
            features, gradients = features[1:], gradients[1:]
        if name == "llava_next":  # its padding has no gradient
            used = gradients.any(1)
            features, gradients = features[used], gradients[used]
        values, size = nets.plain_gradcam(features, gradients), explanation.attribution.size
        cells = values[:size] if name.startswith("llava") else values[-size:]
        return np.asarray(cells.reshape(explanation.grid))

    options = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
    single = name in nets.SINGLE_GRIDS or name == "idefics2"
    return Prepared(
        lambda: GradCAM(model).explain(
            image, Token("cat"), prompt=prompt, processor=processor, views="all" if single else "overview"
        ),
        compute,
        lambda: model(**nets.run_processor(name, image), use_cache=False, **options),
    )


def no_gradients(form: str) -> Prepared:
    """Occlusion of a model that has only scores."""
    nets = import_module("tests.models.test_models_without_gradients")
    model, x = nets.in_form(form, Path(mkdtemp())), nets.image()
    settings = nets.SETTINGS["occlusion"]
    network = nets.network()

    def compute(explanation: Any) -> np.ndarray:
        return np.asarray(METHODS["occlusion"](network, **settings).explain(x[0], 1).attribution)

    return Prepared(lambda: METHODS["occlusion"](model, **settings).explain(x[0], 1), compute, lambda: network(x))


def yolo(name: str) -> Prepared:
    """A box at the finest level of an Ultralytics model, whose layer is the output of its neck."""
    nets = import_module("tests.ultralytics_nets")
    made, (corners, label, row) = nets.model_object(name), nets.pick_box(name, 8)
    x, network = nets.preprocess(name)(nets.image())[0], made.model

    def compute(explanation: Any) -> np.ndarray:
        kept: list[Tensor] = []
        handle = network.model[network.model[-1].f[0]].register_forward_hook(lambda *call: kept.append(call[2]))
        raw = network(x[None].clone().requires_grad_())
        handle.remove()
        raw = next(part for part in (raw[1], *raw) if isinstance(part, dict))
        score = raw.get("one2one", raw)["scores"][0, label, row].sigmoid()
        (gradient,) = torch.autograd.grad(score, kept[0])
        parts = [to_channels_first(part, explanation.grid) for part in (kept[0], gradient)]
        return np.asarray(combine("gradcam", *parts).reshape(explanation.grid))

    return Prepared(
        lambda: GradCAM(made).explain(x, Box(corners[0], corners[1], corners[2], corners[3], label=label)),
        compute,
        lambda: network(x[None]),
    )


def list_cases() -> list[Case]:
    """All cases, in the order of the table."""
    detectors = import_module("tests.targets.test_huggingface_detectors").FAMILIES
    heads = import_module("tests.targets.test_segmentation_heads")
    cases = [Case("detection transformer", name, "box", partial(detector, name)) for name in detectors]
    cases += [
        Case("vision-language model", name, "word", partial(language, name))
        for name in import_module("tests.vision_language_families").FAMILIES
        if name != "llava_onevision"
    ]
    for row in heads.CASES:
        build, label, extra, _, field = row.values
        prepare = lambda b=build, k=label, e=extra, f=field: segmentation(b, k, e, f)  # noqa: E731 - bound in a loop
        cases.append(Case("segmentation", row.id, "region", prepare, 1e-7))
    cases += [Case("segmentation", f"smp {name}", "region", partial(smp, name), 1e-7) for name in heads.SMP]
    cases += [
        Case("video", name, "class", partial(video, name), 1e-7)
        for name in import_module("tests.explainers.test_huggingface_videos").FAMILIES
    ]
    cases += [
        Case("encoder", row.name, "similarity to a point", partial(encoder, row.name))
        for row in import_module("tests.encoders").ENCODERS
    ]
    cases += [
        Case("without target", name, "no target", partial(without_target, name))
        for name in ("sam", "mask2former", "vit", "faster_rcnn")
    ]
    forms = import_module("tests.models.test_models_without_gradients").FORMS
    cases += [Case("without gradients", form, "class", partial(no_gradients, form)) for form in forms]
    return cases


def list_yolo_cases() -> list[Case]:
    """The cases that need Ultralytics."""
    names = (
        "yolov5n",
        "yolov8n",
        "yolov9t",
        "yolov10n",
        "yolo11n",
        "yolo12n",
        "yolo26n",
        "yolov8n-seg",
        "yolov8n-pose",
        "yolov8n-obb",
        "yolo11n-seg",
        "yolo11n-obb",
        "yolo26n-pose",
        "yolo26n-obb",
    )
    return [Case("yolo", name, "box", partial(yolo, name)) for name in names]
