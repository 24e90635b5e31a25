"""Draw synthetic radiographs with a marker that is correlated with the lesion, and train small networks on them.

The masks of lesion, marker and lungs are exact. Two datasets with the same seed differ only in their markers.
From the command line: `--model camscope.phantom.shortcut_study:create_shortcut_model --weights net.safetensors`.
"""

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator, Philox, SeedSequence
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.atomic_writes_and_folder_locks import write_unless_identical
from camscope.errors import InputError
from camscope.phantom.draw_chest_attenuation import FloatImage, draw_smooth_noise, smooth_band, smooth_step
from camscope.plurals import plural

Site = Literal["A", "B"]
BoolArray = NDArray[np.bool_]

STUDY_CLASSES: Final = ("clear", "lesion")
STUDY_SIDE_PIXELS: Final = 64
MIN_LESION_BRIGHTNESS: Final = 0.02  # of the gray scale: a lesion ends where it adds less, so that its mask has an edge
MARKER_SHAPE: Final = np.array([[c == "#" for c in row] for row in ("#...", "#...", "#...", "#...", "####")])
MASKS_BY_COLUMN: Final = {"mask": "lesion_masks", "region_marker": "marker_masks", "region_lungs": "lung_masks"}


@dataclass(frozen=True, eq=False)
class ShortcutStudy:
    """A synthetic dataset of N images with their masks and patients. *S is (H,W), or (D,H,W) for volumes.

    `images` (N,*S) are uint8, or float32 for volumes. `lesion_masks`, `marker_masks` and `lung_masks` (N,*S) are bool.
    `labels` (N,) int64 are indices of `STUDY_CLASSES`. `patients`, `sites` and `sexes` (N,) are str. `ages` (N,) are int64.
    """

    images: NDArray[Any]
    lesion_masks: BoolArray
    marker_masks: BoolArray
    lung_masks: BoolArray
    labels: NDArray[np.int64]
    patients: tuple[str, ...]
    sites: tuple[str, ...]
    sexes: tuple[str, ...]
    ages: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def has_marker(self) -> BoolArray:
        """Whether each image (N,) has the marker."""
        has_marker: BoolArray = self.marker_masks.reshape(len(self), -1).max(1)
        return has_marker

    def select(self, rows: NDArray[Any]) -> "ShortcutStudy":
        """Return a dataset that contains only the selected images. `rows` holds their indices, or is a boolean mask (N,)."""
        positions = np.arange(len(self))[rows].tolist()
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, values in columns.items():
            is_array = isinstance(values, np.ndarray)
            columns[name] = values[positions] if is_array else tuple(values[i] for i in positions)
        return ShortcutStudy(**columns)


def draw_study(
    n_images: int, seed: int, marker_share: float = 0.5, *, marker_site: Site | None = None, mixed: bool = False
) -> ShortcutStudy:
    """Draw N radiographs (64,64). Half of them have a lesion. Each patient has one to three images of the same class.

    `marker_share` is the share of lesion images with a marker. Clear images have a marker with the share
    1 - `marker_share`. At 0.5 the marker is uninformative. If `marker_site` is set, only images of that site get a marker.
    If `mixed` is true, `marker_share` is ignored: one half of the positives shows a lesion, the other half a marker, and
    negatives show neither. Raises InputError for a number out of range.
    """
    numbers, people, random = draw_patients(n_images, seed, marker_share)
    allowed = np.isin(people["sites"], marker_site or list(get_args(Site)))
    lesions, markers = people["labels"] == 1, choose_images_with_marker(people["labels"], marker_share, random, allowed)
    if mixed:
        markers = lesions & (np.cumsum(lesions) % 2 == 0)
        lesions = lesions & ~markers
    drawn = [_draw_study_image(seed, int(numbers[i]), i, bool(lesions[i]), bool(markers[i])) for i in range(n_images)]
    images, lesion_masks, marker_masks, lung_masks = map(np.stack, zip(*drawn, strict=True))
    return ShortcutStudy(images, lesion_masks, marker_masks, lung_masks, **people)


def write_study(study: ShortcutStudy, folder: Path, *, overwrite: bool = True) -> Path:
    """Write the images and masks of a dataset into a folder. Return the path of `manifest.csv`.

    Images and masks are PNG files. Volumes are TIFF files with one page for each slice. The columns are id, path, label (a
    name of `STUDY_CLASSES`), patient, site, sex, age, mask (of the lesion), region_marker and region_lungs. Paths are
    relative to the folder. The path of an empty mask is empty. If `overwrite` is false, an existing file with other content
    raises OutputError.
    """
    suffix = "png" if study.images.ndim == 3 else "tiff"
    table = io.StringIO()
    columns = ["id", "path", "label", "patient", "site", "sex", "age", *MASKS_BY_COLUMN]
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    for i in range(len(study)):
        name = f"{i:05d}"
        row = {"id": name, "path": f"images/{name}.{suffix}", "label": STUDY_CLASSES[study.labels[i]]}
        row |= {"patient": study.patients[i], "site": study.sites[i], "sex": study.sexes[i], "age": str(study.ages[i])}
        write_unless_identical(folder / row["path"], _encode_image(study.images[i], suffix), overwrite=overwrite)
        for column, field in MASKS_BY_COLUMN.items():
            mask = getattr(study, field)[i]
            row[column] = f"{column}/{name}.{suffix}" if mask.any() else ""
            if row[column]:
                mask_file = _encode_image(mask.astype(np.uint8) * 255, suffix)
                write_unless_identical(folder / row[column], mask_file, overwrite=overwrite)
        writer.writerow(row)
    return write_unless_identical(folder / "manifest.csv", table.getvalue().encode(), overwrite=overwrite)


class RandomPatients(NamedTuple):
    """Random patients: the patient's number for each image (N,), fields of `ShortcutStudy` by name, and the generator."""

    numbers: NDArray[np.int64]
    study_fields: dict[str, Any]
    random: Generator


def draw_patients(n_images: int, seed: int, marker_share: float) -> RandomPatients:
    """Draw random patients. Each has one to three images of the same class. Half of all images are positive."""
    if n_images < 2 or seed < 0 or not 0 <= marker_share <= 1:
        raise InputError(
            f"n_images={n_images}, seed={seed}, marker_share={marker_share}; expected at least two images, "
            "a seed of 0 or more, and a share in 0..1"
        )
    random = Generator(Philox(SeedSequence(seed, spawn_key=(0,))))
    numbers = np.repeat(np.arange(n_images), random.integers(1, 4, n_images))[:n_images]
    ranks = random.permutation(n_images)[numbers]
    labels = np.zeros(n_images, np.int64)
    labels[np.argsort(ranks, kind="stable")[: n_images // 2]] = 1
    sites, sexes = (np.array(values)[random.integers(0, 2, n_images)] for values in (["A", "B"], ["F", "M"]))
    people = {
        "labels": labels,
        "patients": tuple(f"P{number:04d}" for number in numbers.tolist()),
        "sites": tuple(sites[numbers].tolist()),
        "sexes": tuple(sexes[numbers].tolist()),
        "ages": random.integers(20, 90, n_images)[numbers],
    }
    return RandomPatients(numbers, people, random)


def choose_images_with_marker(
    labels: NDArray[np.int64], marker_share: float, random: Generator, allowed: BoolArray
) -> BoolArray:
    """Choose at random which images (N,) get a marker. Only images that are `allowed` can get one.

    Of the allowed positive images, the share `marker_share` gets a marker. Of the allowed negative images, the share
    1 - `marker_share` gets one.
    """
    marked = np.zeros(len(labels), np.bool_)
    for label, share in ((1, marker_share), (0, 1 - marker_share)):
        rows = random.permutation(np.flatnonzero(allowed & (labels == label)))
        marked[rows[: round(share * len(rows))]] = True
    return marked


class StudyImage(NamedTuple):
    """An image (64,64) and the masks (64,64) of its lesion, marker and lungs."""

    image: NDArray[np.uint8]
    lesion_mask: BoolArray
    marker_mask: BoolArray
    lung_mask: BoolArray


def _draw_study_image(seed: int, patient: int, image_number: int, lesion: bool, marker: bool) -> StudyImage:
    """Draw one image of a patient. It may contain a lesion and a marker."""
    build, film, finding = (
        Generator(Philox(SeedSequence(seed, spawn_key=key)))
        for key in ((1, patient), (2, image_number), (3, image_number))
    )
    chest, lungs = _draw_chest_and_lung_distance(build, film)
    change = _draw_lesion(finding, lungs) if lesion else np.zeros_like(chest)
    image = np.clip((chest + change) * np.float64(255), 0, 250).astype(np.uint8)
    stamp = np.zeros_like(change, np.bool_)
    top, left = film.integers(2, 5, 2)
    if marker:
        stamp[top : top + MARKER_SHAPE.shape[0], left : left + MARKER_SHAPE.shape[1]] = MARKER_SHAPE
    image[stamp] = 255
    return StudyImage(image, change > 0, stamp, lungs > 0)


def _draw_chest_and_lung_distance(
    anatomy_random: Generator, exposure_random: Generator
) -> tuple[FloatImage, FloatImage]:
    """Draw a chest with gray values 0..1. Also return each pixel's distance from the lungs' edge, negative outside the lungs."""
    axis = ((np.arange(STUDY_SIDE_PIXELS, dtype=np.float32) + 0.5) * (2 / STUDY_SIDE_PIXELS) - 1).astype(np.float32)
    x, y = axis[None, :] - exposure_random.uniform(-0.06, 0.06), axis[:, None] - exposure_random.uniform(-0.06, 0.06)
    wide, high = anatomy_random.uniform(0.74, 0.86), anatomy_random.uniform(1.05, 1.2)
    body = smooth_step(1 - ((np.abs(x) / wide) ** 2.5 + (np.abs(y - 0.35) / high) ** 2.5) ** 0.4, 0.12)
    across, tall = anatomy_random.uniform(0.26, 0.31), anatomy_random.uniform(0.56, 0.68)
    apart = anatomy_random.uniform(0.36, 0.40)
    lungs = 1 - np.sqrt(((np.abs(x) - apart) / across) ** 2 + ((y - 0.05) / tall) ** 2)
    light = anatomy_random.uniform(0.56, 0.66) + 0.10 * smooth_band(x, 0.2, 0.1)
    light = light - anatomy_random.uniform(0.28, 0.34) * smooth_step(lungs, 0.3)
    texture = draw_smooth_noise(exposure_random, 6, STUDY_SIDE_PIXELS, 0.035)
    texture += draw_smooth_noise(exposure_random, 16, STUDY_SIDE_PIXELS, 0.025)
    grain = exposure_random.standard_normal((STUDY_SIDE_PIXELS, STUDY_SIDE_PIXELS), dtype=np.float32) * 0.02
    chest: FloatImage = 0.06 + body * (light + texture) + grain
    return chest, np.minimum(lungs, body - 0.5).astype(np.float32)


def _draw_lesion(random: Generator, lung_distance: FloatImage) -> FloatImage:
    """Draw a lesion. It is a bright Gaussian spot in a lung."""
    places = np.flatnonzero(lung_distance > 0.35)
    row, column = np.divmod(places[int(random.random() * len(places))], STUDY_SIDE_PIXELS)
    width, strength = random.uniform(2.6, 3.6), random.uniform(0.30, 0.42)
    down, right = np.arange(STUDY_SIDE_PIXELS)[:, None] - row, np.arange(STUDY_SIDE_PIXELS)[None, :] - column
    spot = strength * np.exp(-(down**2 + right**2) / (2 * width**2))
    return np.where(spot > MIN_LESION_BRIGHTNESS, spot, 0).astype(np.float32)


def _encode_image(values: NDArray[Any], suffix: str) -> bytes:
    """Encode an image as PNG, or a volume as a TIFF of several pages."""
    from PIL import Image

    first, *other_pages = [Image.fromarray(page) for page in (values if values.ndim == 3 else values[None])]
    file = io.BytesIO()
    if suffix == "png":
        first.save(file, "PNG")
    else:
        first.save(file, "TIFF", save_all=True, append_images=other_pages)
    return file.getvalue()


MEAN, STD = 0.4, 0.25
BATCH_SIZE: Final = 32
LEARNING_RATE: Final = 2e-2

PREPROCESSING: Final = {"create_shortcut_model": ((STUDY_SIDE_PIXELS, STUDY_SIDE_PIXELS), (MEAN,), (STD,))}
CATEGORIES: Final = {"create_shortcut_model": list(STUDY_CLASSES)}
TARGET_LAYER: Final = {"create_shortcut_model": "layer3"}


class ShortcutNet(nn.Module):
    """A small convolutional network from gray images (N,1,*S) to two class scores (N,2).

    Each of three convolutions halves the resolution. A spatial mean and a linear layer follow. A cell of `layer3` is
    8 pixels wide and sees 22, so that a marker of 5 pixels is below its resolution. `n_axes` is 2 for images and 3 for
    volumes.
    """

    def __init__(self, n_axes: int = 2) -> None:
        super().__init__()
        convolution, norm = (nn.Conv2d, nn.BatchNorm2d) if n_axes == 2 else (nn.Conv3d, nn.BatchNorm3d)
        blocks = [  # with even kernels, each cell stays centered on its own pixels
            nn.Sequential(convolution(n_inputs, n_outputs, 4, 2, 1, bias=False), norm(n_outputs), nn.ReLU())
            for n_inputs, n_outputs in ((1, 8), (8, 16), (16, 16))
        ]
        self.layer1, self.layer2, self.layer3 = blocks
        self.fc = nn.Linear(16, len(STUDY_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N,2)."""
        scores: Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))).flatten(2).mean(2))
        return scores


def create_shortcut_model() -> ShortcutNet:
    """Create an untrained network for radiographs (N,1,64,64). Weights for it come from a file that `write_weights` wrote."""
    return ShortcutNet().eval()


def to_study_input(images: NDArray[Any]) -> Tensor:
    """Convert uint8 images (N,H,W) or float32 volumes (N,D,H,W) to the network's float32 input."""
    x = torch.from_numpy(images).unsqueeze(1).float()
    return (x / 255 - MEAN) / STD if images.ndim == 3 else x


def train_shortcut_model(study: ShortcutStudy, seed: int = 0, n_epochs: int = 8) -> ShortcutNet:
    """Train a network on a dataset for `n_epochs` epochs. Equal arguments give equal weights.

    For 1,000 radiographs, 8 epochs take about 2 s on one core. The random state of the process stays unchanged.
    """
    if n_epochs < 1 or len(study) < BATCH_SIZE:
        raise InputError(
            f"received n_epochs={n_epochs} and {plural(len(study), 'image')}; expected at least 1 epoch and {BATCH_SIZE} images"
        )
    x, labels = to_study_input(study.images), torch.from_numpy(study.labels)
    with reproducible_scope(seed, num_threads=1):
        model = ShortcutNet(x.ndim - 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        epochs = [torch.randperm(len(x), device="cpu").split(BATCH_SIZE) for _ in range(n_epochs)]
        batches = [rows for epoch in epochs for rows in epoch if len(rows) == BATCH_SIZE]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=len(batches) + 1)
        for rows in batches:
            loss = F.cross_entropy(model(x[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@contextmanager
def reproducible_scope(seed: int, num_threads: int = 2) -> Iterator[None]:
    """Make results reproducible inside the `with` block. The seed and threads are fixed, and algorithms are deterministic.

    The former state is restored afterwards.
    """
    before, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its only attribute is not typed
    fill = memory.fill_uninitialized_memory
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        try:
            torch.manual_seed(seed)
            torch.set_num_threads(num_threads)
            torch.use_deterministic_algorithms(True)
            memory.fill_uninitialized_memory = False  # nothing here reads it, and filling costs a third
            yield
        finally:
            memory.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            torch.set_num_threads(before)


def write_weights(model: nn.Module, folder: Path, *, overwrite: bool = True) -> Path:
    """Write the weights of a model to `net.safetensors` in a folder. Return the path of the file."""
    from safetensors.torch import save

    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    return write_unless_identical(folder / "net.safetensors", save(state), overwrite=overwrite)
