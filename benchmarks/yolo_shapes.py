"""Maps of the boxes of a YOLO detector, which is trained on colored shapes pasted onto photographs: where do they peak?

    python -m benchmarks.yolo_shapes --train best.pt           # a quarter of an hour on one core
    python -m benchmarks.yolo_shapes --model best.pt --write   # figures into results/yolo_shapes.json

25 photographs are for training, 15 others are held out. Each scene has two to four shapes, often two of one class. A
detection is the best row that overlaps a shape by half or more. Needs the `yolo` extra and the photographs of the data folder.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.machine import machine
from benchmarks.trained import DATA

CLASSES = ("circle", "square", "triangle")
N_TRAINING_PHOTOS = 25
SCENE_SIZE = (320, 240)  # width, height in pixels
SIDE_PIXELS = (28, 160)  # shortest and longest side of a shape
N_TRAINING_SCENES, N_HELD_OUT_SCENES = 400, 120
INPUT_PIXELS = 192  # of the model
EPOCHS = 20
MIN_CONFIDENCE, MIN_IOU = 0.25, 0.5
N_SCENES_IN_PICTURE, GAP_PIXELS = 2, 4
METHODS_MEASURED = ("layercam", "hirescam", "gradcam")
ACTIVATIONS = "activations of visualize=True"
SAMPLED_METHOD, N_SAMPLES, N_SAMPLED_SCENES = "drise", 500, 15  # which takes a second or more per map
PUBLIC_PHOTO = Path(__file__).resolve().parents[1] / "assets" / "astronaut.jpg"
RESULTS = Path(__file__).parent / "results" / "yolo_shapes.json"
Corners = tuple[int, int, int, int]


@dataclass(frozen=True)
class Shape:
    """A pasted shape: its class, and its box (x0, y0, x1, y1) in pixels of the scene."""

    label: int
    corners: Corners


@dataclass(frozen=True)
class Scene:
    """A photograph with shapes on it."""

    image: Image.Image
    shapes: tuple[Shape, ...]


def list_photos(*, held_out: bool) -> list[Path]:
    """Return the photographs to train on, or those held out."""
    paths = sorted((DATA / "photos" / "images").iterdir())
    return paths[N_TRAINING_PHOTOS:] if held_out else paths[:N_TRAINING_PHOTOS]


def iter_scenes(photos: Sequence[Path], n_scenes: int, seed: int) -> Iterator[Scene]:
    """Draw scenes: each is a random part of a photograph with two to four shapes that do not touch."""
    rng, pictures = np.random.default_rng(seed), [Image.open(path).convert("RGB") for path in photos]
    for number in range(n_scenes):
        yield draw_scene(pictures[number % len(pictures)], rng)


def draw_scene(photo: Image.Image, rng: np.random.Generator) -> Scene:
    """Draw shapes on a random part of a photograph. Often the first two have the same class."""
    width, height = SCENE_SIZE
    share = rng.uniform(0.6, 1.0)
    part = (int(photo.width * share), int(photo.height * share))
    left, top = rng.integers(photo.width - part[0] + 1), rng.integers(photo.height - part[1] + 1)
    image = photo.crop((int(left), int(top), int(left) + part[0], int(top) + part[1])).resize(SCENE_SIZE)
    labels = list(rng.integers(len(CLASSES), size=rng.integers(2, 5)))
    if rng.random() < 0.7:
        labels[1] = labels[0]
    shapes: list[Shape] = []
    for label in labels:
        for _ in range(40):  # attempts to find a free place
            side = int(rng.integers(*SIDE_PIXELS))
            x, y = int(rng.integers(2, width - side - 2)), int(rng.integers(2, height - side - 2))
            corners = (x, y, x + side, y + side)
            if all(not _touches(corners, shape.corners) for shape in shapes):
                shapes.append(Shape(int(label), corners))
                break
    canvas = ImageDraw.Draw(image)
    for shape in shapes:
        _draw_shape(canvas, shape, rng)
    return Scene(image, tuple(shapes))


def _touches(a: Corners, b: Corners, margin: int = 6) -> bool:
    return a[0] < b[2] + margin and b[0] < a[2] + margin and a[1] < b[3] + margin and b[1] < a[3] + margin


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: Shape, rng: np.random.Generator) -> None:
    x0, y0, x1, y1 = shape.corners
    color = tuple(
        int(value) for value in rng.permutation([rng.integers(180, 256), rng.integers(256), rng.integers(80)])
    )
    if CLASSES[shape.label] == "circle":
        canvas.ellipse(shape.corners, fill=color)
    elif CLASSES[shape.label] == "square":
        canvas.rectangle(shape.corners, fill=color)
    else:
        canvas.polygon([(x0, y1), (x1, y1), ((x0 + x1) / 2, y0)], fill=color)


def write_training_data(folder: Path) -> Path:
    """Write scenes as files in the layout that Ultralytics reads. Return the file that describes them."""
    parts = {"train": (N_TRAINING_SCENES, 0), "val": (16, 1)}  # 16 of the same photographs, to follow the training
    for name, (n_scenes, seed) in parts.items():
        for kind in ("images", "labels"):
            (folder / kind / name).mkdir(parents=True)
        for number, scene in enumerate(iter_scenes(list_photos(held_out=False), n_scenes, seed)):
            scene.image.save(folder / "images" / name / f"{number:04}.png")
            lines = [" ".join(map(str, (shape.label, *_to_fractions(shape.corners)))) for shape in scene.shapes]
            (folder / "labels" / name / f"{number:04}.txt").write_text("\n".join(lines))
    description = folder / "shapes.yaml"
    names = "".join(f"  {index}: {name}\n" for index, name in enumerate(CLASSES))
    description.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return description


def _to_fractions(corners: Corners) -> tuple[float, ...]:
    (x0, y0, x1, y1), (width, height) = corners, SCENE_SIZE
    return (x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height


def train(destination: Path) -> None:
    """Train YOLO11n from random weights, on one core, and store the checkpoint."""
    import torch
    from ultralytics import YOLO

    torch.set_num_threads(1)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        data = write_training_data(Path(folder) / "data")
        model = YOLO("yolo11n.yaml")
        model.train(
            data=str(data),
            epochs=EPOCHS,
            imgsz=INPUT_PIXELS,
            batch=16,
            nbs=16,
            optimizer="AdamW",
            lr0=0.002,
            warmup_epochs=1,
            mosaic=0,
            workers=0,
            device="cpu",
            amp=False,
            plots=False,
            val=False,
            seed=0,
            pretrained=False,
            project=folder,
            name="run",
        )
        shutil.copy(Path(folder) / "run" / "weights" / "last.pt", destination)
    print(f"{destination}: {time.process_time() - start:.0f} s of processor time")


@dataclass
class Tally:
    """What was counted over the held-out scenes, for one method or for the activations alone."""

    peaks_in_own_box: int = 0
    peaks_in_another_of_its_class: int = 0
    told_apart: int = 0  # of pairs of one class: each of the two maps is brighter in its own box
    seconds: float = 0.0
    maps: int = 0
    pairs: int = 0


def measure(model_file: Path) -> dict[str, Any]:
    """Detect shapes on the held-out scenes, and explain every detection by each method."""
    from ultralytics import YOLO

    from camscope import METHODS, load_model
    from camscope.explainers import DRISE
    from camscope.targets import Box

    model = load_model(f"yolo:{model_file}")
    theirs = YOLO(model_file)
    explainers = {name: METHODS[name](model) for name in METHODS_MEASURED}
    sampled = DRISE(model, n_samples=N_SAMPLES)
    tallies = {name: Tally() for name in (*explainers, ACTIVATIONS, SAMPLED_METHOD)}
    n_shapes, n_detections, n_pairs, detections_by_stride = 0, 0, 0, dict[str, int]()
    for number, scene in enumerate(iter_scenes(list_photos(held_out=True), N_HELD_OUT_SCENES, seed=2)):
        n_shapes += len(scene.shapes)
        found = match_detections(scene, theirs)
        n_detections += len(found)
        pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :] if a.label == b.label]
        n_pairs += len(pairs)
        targets = [Box(*shape.corners, label=shape.label) for shape in found]
        if not targets:
            continue
        methods = explainers | ({SAMPLED_METHOD: sampled} if number < N_SAMPLED_SCENES else {})
        for name, explainer in methods.items():
            start = time.perf_counter()
            explanations = explainer.explain_classes(scene.image, targets)
            tallies[name].seconds += time.perf_counter() - start
            _count(tallies[name], found, pairs, [explanation.heatmap() for explanation in explanations])
            if name == METHODS_MEASURED[0]:
                for explanation in explanations:
                    stride = explanation.label.rpartition(" ")[2]
                    detections_by_stride[stride] = detections_by_stride.get(stride, 0) + 1
        _count(tallies[ACTIVATIONS], found, pairs, _mean_activations(theirs, scene, len(found)))
    return {
        "shapes": n_shapes,
        "detections": n_detections,
        "recall": round(n_detections / n_shapes, 3),
        "pairs_of_one_class": n_pairs,
        "detections_by_stride": dict(sorted(detections_by_stride.items(), key=lambda item: int(item[0]))),
        "methods": {
            name: {
                "maps": tally.maps,
                "peak_in_own_box": round(tally.peaks_in_own_box / tally.maps, 3),
                "peak_in_another_box_of_its_class": round(tally.peaks_in_another_of_its_class / tally.maps, 3),
                "pairs_told_apart": round(tally.told_apart / tally.pairs, 3),
                "seconds_per_map": round(tally.seconds / tally.maps, 3),
            }
            for name, tally in tallies.items()
        },
        "letterbox_error_pixels": round(compare_letterboxes(), 3),
    }


def match_detections(scene: Scene, theirs: Any) -> list[Shape]:
    """Return the shapes that `predict` of Ultralytics detects: of the same class, and overlapping by half or more."""
    result = theirs.predict(scene.image, imgsz=INPUT_PIXELS, conf=MIN_CONFIDENCE, verbose=False)[0]
    rows = list(zip(result.boxes.xyxy.tolist(), result.boxes.cls.int().tolist(), strict=True))
    return [
        shape
        for shape in scene.shapes
        if any(label == shape.label and compute_iou(box, shape.corners) >= MIN_IOU for box, label in rows)
    ]


def compute_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Compute the intersection over union of two boxes (x0, y0, x1, y1)."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def _count(tally: Tally, found: list[Shape], pairs: list[tuple[Shape, Shape]], maps: Sequence[Any]) -> None:
    """Add what the maps (H,W) of the detections of one scene show."""
    by_shape = dict(zip(found, maps, strict=True))
    tally.maps, tally.pairs = tally.maps + len(found), tally.pairs + len(pairs)
    for shape, values in by_shape.items():
        row, column = map(int, np.unravel_index(int(values.argmax()), values.shape))
        tally.peaks_in_own_box += _contains(shape, row, column)
        others = [other for other in found if other is not shape and other.label == shape.label]
        tally.peaks_in_another_of_its_class += any(_contains(other, row, column) for other in others)
    for a, b in pairs:
        tally.told_apart += all(
            _mean_inside(by_shape[own], own) > _mean_inside(by_shape[own], other) for own, other in ((a, b), (b, a))
        )


def _contains(shape: Shape, row: int, column: int) -> bool:
    x0, y0, x1, y1 = shape.corners
    return bool(x0 <= column <= x1 and y0 <= row <= y1)


def _mean_inside(values: Any, shape: Shape) -> float:
    x0, y0, x1, y1 = shape.corners
    return float(values[y0:y1, x0:x1].mean())


def _mean_activations(theirs: Any, scene: Scene, count: int) -> list[Any]:
    """Return the mean absolute activation of the finest level, which `visualize=True` draws by channel: equal for all boxes."""
    import torch

    from camscope import Preprocess

    x, placement = Preprocess.letterbox(INPUT_PIXELS)(np.asarray(scene.image))
    kept: list[Any] = []
    network = theirs.model
    handle = network.model[network.model[-1].f[0]].register_forward_hook(lambda *args: kept.append(args[2]))
    with torch.no_grad():
        network.eval()(x[None])
    handle.remove()
    values, _ = placement.project(kept[0][0].abs().mean(0).float().numpy())
    return [values] * count


def compare_letterboxes() -> float:
    """Return the largest distance, in pixels of the model's input, from where Ultralytics places points of an image."""
    from ultralytics.data.augment import LetterBox

    from camscope import Preprocess

    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(200):
        height, width = (int(length) for length in rng.integers(40, 1500, 2))
        _, placement = Preprocess.letterbox(INPUT_PIXELS)(np.zeros((height, width, 3), np.uint8))
        params = LetterBox(INPUT_PIXELS, auto=True).get_params({"img": np.empty((height, width, 3), np.uint8)})
        points = rng.uniform(0, 1, (20, 2)) * (height, width)
        expected = points * params["ratio"][0] + (params["top"], params["left"])
        worst = max(worst, float(np.abs(placement.to_input(points) - expected).max()))
    return worst


def draw_picture(model_file: Path, destination: Path) -> None:
    """Draw scenes on a photograph of NASA with two shapes of one class: the scene, and the LayerCAM map of each of the two."""
    from ultralytics import YOLO

    from camscope import LayerCAM, load_model
    from camscope.targets import Box

    cam, theirs = LayerCAM(load_model(f"yolo:{model_file}")), YOLO(model_file)
    rows: list[list[Image.Image]] = []
    for scene in iter_scenes([PUBLIC_PHOTO], N_HELD_OUT_SCENES, seed=2):
        found = match_detections(scene, theirs)
        pair = next(([a, b] for i, a in enumerate(found) for b in found[i + 1 :] if a.label == b.label), None)
        if pair is None or len(rows) == N_SCENES_IN_PICTURE:
            continue
        explanations = cam.explain_classes(scene.image, [Box(*shape.corners, label=shape.label) for shape in pair])
        pictures = [scene.image, *(Image.fromarray(explanation.overlay()) for explanation in explanations)]
        for picture, shapes in zip(pictures, (pair, *([shape] for shape in pair)), strict=True):
            for shape in shapes:
                ImageDraw.Draw(picture).rectangle(shape.corners, outline="white", width=2)
        rows.append(pictures)
    width, height = SCENE_SIZE
    page = Image.new("RGB", (3 * width + 2 * GAP_PIXELS, len(rows) * (height + GAP_PIXELS) - GAP_PIXELS), "white")
    for y, pictures in enumerate(rows):
        for x, picture in enumerate(pictures):
            page.paste(picture, (x * (width + GAP_PIXELS), y * (height + GAP_PIXELS)))
    page.save(destination, quality=75, method=6)


def main() -> None:
    """Run the command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, metavar="FILE.pt")
    parser.add_argument("--model", type=Path, metavar="FILE.pt")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="FILE.webp")
    options = parser.parse_args()
    if options.train:
        train(options.train)
    if options.model and options.picture:
        draw_picture(options.model, options.picture)
    elif options.model:
        figures = {"machine": machine("cpu"), "input_pixels": INPUT_PIXELS, "epochs": EPOCHS, **measure(options.model)}
        text = json.dumps(figures, indent=1)
        print(text)
        if options.write:
            RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
