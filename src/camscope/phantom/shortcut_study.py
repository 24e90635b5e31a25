"""Studies with a planted shortcut, and nets that learn it.

Studies: radiographs of two classes in whose corner a token travels with the finding, as often as one chooses.

What the image shows is known to the pixel: the lesion, the token, the lungs. Chest, grain and lesion of an image hang on
the seed alone, so that two studies of one seed differ in their tokens.

Nets that learn a study in seconds, and with it the shortcut that it offers: how far an audit finds it is then known.

From the command line: `--model camscope.phantom.shortcut_study:shortcut_net --weights net.safetensors`.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator, Philox, SeedSequence
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.phantom.chest_anatomy import Field, band, clouds, ramp
from camscope.phantom.train import packed, reproducible
from camscope.phantom.volume_phantom import draw_volume
from camscope.plurals import plural
from camscope.safe_files import write_generated

Site = Literal["A", "B"]
Bools = NDArray[np.bool_]

FINDINGS: Final = ("clear", "lesion")
SIZE: Final = 64
LEAST: Final = 0.02  # of the grey scale: a lesion ends where it adds less, so that its mask has an edge
TOKEN: Final = np.array([[c == "#" for c in row] for row in ("#...", "#...", "#...", "#...", "####")])
PAGES: Final = {"mask": "lesion_masks", "region_token": "token_masks", "region_lungs": "lung_masks"}


@dataclass(frozen=True, eq=False)
class Study:
    """N images of `FINDINGS`, what is true of them, and whose they are; *S is (H,W), of volumes (D,H,W).

    `images` (N,*S) uint8, of volumes float32; `labels` (N,) int64, places in `FINDINGS`; `lesion_masks`, `token_masks`,
    `lung_masks` (N,*S) bool, all False where there is none; `patients`, `sites`, `sexes` (N,) str, `ages` (N,) int64.
    """

    images: NDArray[Any]
    labels: NDArray[np.int64]
    lesion_masks: Bools
    token_masks: Bools
    lung_masks: Bools
    patients: tuple[str, ...]
    sites: tuple[str, ...]
    sexes: tuple[str, ...]
    ages: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def tokens(self) -> Bools:
        """(N,): whether an image carries the token."""
        carried: Bools = self.token_masks.reshape(len(self), -1).max(1)
        return carried

    def chosen(self, rows: NDArray[Any]) -> "Study":
        """Some of the images, by their numbers or a mask (N,)."""
        places = np.arange(len(self))[rows].tolist()
        lesions, tokens, lungs = (masks[places] for masks in (self.lesion_masks, self.token_masks, self.lung_masks))
        patients, sites, sexes = (
            tuple(column[i] for i in places) for column in (self.patients, self.sites, self.sexes)
        )
        images, labels, ages = self.images[places], self.labels[places], self.ages[places]
        return Study(images, labels, lesions, tokens, lungs, patients, sites, sexes, ages)


def draw_study(
    n: int, seed: int, p: float = 0.5, *, token_site: Site | None = None, mixed: bool = False, site_tint: float = 0.0
) -> Study:
    """N radiographs (64,64), half of them with a lesion, of patients with one to three images of the same class.

    `p`: the share of lesions with a token, and 1 - p that of clear images; 0.5 tells nothing, 1 - p is the reverse.
    `token_site`: the token occurs at this site alone, and the shares are of it. `mixed`: of the positives one half shows a
    lesion and no token, the other the token and no lesion, and no negative has either: two ways to be right, whatever
    `p`. `site_tint`: how much brighter site B is, of 1.
    InputError for a number out of its range.
    """
    _check(n, seed, p)
    people, labels, random = _people(n, seed)
    sites = np.array(people.sites)
    lesions, tokens = labels == 1, _marked(labels, p, random, np.isin(sites, token_site or list(get_args(Site))))
    if mixed:
        tokens = lesions & (np.cumsum(lesions) % 2 == 0)
        lesions = lesions & ~tokens
    tints = np.where(sites == "B", site_tint, 0.0)
    drawn = [_drawn(seed, int(people.numbers[i]), i, bool(lesions[i]), bool(tokens[i]), tints[i]) for i in range(n)]
    return _study([np.stack(part) for part in zip(*drawn, strict=True)], labels, people)


def draw_volume_study(n: int, seed: int, p: float = 0.5) -> Study:
    """N volumes (32,32,32) as `draw_volume` makes them, half with a lesion, and a marker in one corner; see `draw_study`.

    `lung_masks` are the ellipsoid of tissue: where a lesion may be.
    """
    _check(n, seed, p)
    people, labels, random = _people(n, seed)
    markers = _marked(labels, p, random, np.ones(n, np.bool_))
    drawn = [draw_volume((seed << 32) + i, bool(labels[i]), marker=bool(markers[i])) for i in range(n)]
    parts = [(one.values, one.mask, one.marker, one.tissue) for one in drawn]
    return _study([np.stack(part) for part in zip(*parts, strict=True)], labels, people)


def write_study(study: Study, folder: Path, *, overwrite: bool = True) -> Path:
    """PNG images and masks (of volumes TIFF, a page a slice) and, written last, `manifest.csv`, whose path is returned.

    Columns: id, path, label (a name of `FINDINGS`), patient, site, sex, age, mask (the lesion's), region_token,
    region_lungs; paths are relative to the folder, and empty where there is nothing to mask. Without `overwrite` a file that
    is there with other content is an OutputError.
    """
    suffix = "png" if study.images.ndim == 3 else "tiff"
    table = io.StringIO()
    columns = ["id", "path", "label", "patient", "site", "sex", "age", *PAGES]
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    for i in range(len(study)):
        name = f"{i:05d}"
        row = {"id": name, "path": f"images/{name}.{suffix}", "label": FINDINGS[study.labels[i]]}
        row |= {"patient": study.patients[i], "site": study.sites[i], "sex": study.sexes[i], "age": str(study.ages[i])}
        write_generated(folder / row["path"], _picture(study.images[i], suffix), overwrite=overwrite)
        for column, field in PAGES.items():
            mask = getattr(study, field)[i]
            row[column] = f"{column}/{name}.{suffix}" if mask.any() else ""
            if row[column]:
                mask_file = _picture(mask.astype(np.uint8) * 255, suffix)
                write_generated(folder / row[column], mask_file, overwrite=overwrite)
        writer.writerow(row)
    return write_generated(folder / "manifest.csv", table.getvalue().encode(), overwrite=overwrite)


@dataclass(frozen=True, eq=False)
class _People:
    """Whose each image is: the patient's number (N,), and what the manifest says of them."""

    numbers: NDArray[np.int64]
    sites: tuple[str, ...]
    sexes: tuple[str, ...]
    ages: NDArray[np.int64]


def _check(n: int, seed: int, p: float) -> None:
    if n < 2 or seed < 0 or not 0 <= p <= 1:
        raise InputError(f"n={n}, seed={seed}, p={p}; expected two images at least, a seed from 0 up, and p in 0..1")


def _people(n: int, seed: int) -> tuple[_People, NDArray[np.int64], Generator]:
    """Patients of one to three images, in a row; half of the images are positive, and those of a patient alike."""
    random = Generator(Philox(SeedSequence(seed, spawn_key=(0,))))
    numbers = np.repeat(np.arange(n), random.integers(1, 4, n))[:n]
    ranks = random.permutation(n)[numbers]
    labels = np.zeros(n, np.int64)
    labels[np.argsort(ranks, kind="stable")[: n // 2]] = 1
    sites, sexes = np.array(["A", "B"])[random.integers(0, 2, n)], np.array(["F", "M"])[random.integers(0, 2, n)]
    ages = random.integers(20, 90, n)[numbers]
    return _People(numbers, tuple(sites[numbers].tolist()), tuple(sexes[numbers].tolist()), ages), labels, random


def _marked(labels: NDArray[np.int64], p: float, random: Generator, allowed: Bools) -> Bools:
    """(N,): drawn among those allowed, of each class as large a share as it should be: at 0.5 chance tells nothing either."""
    marked = np.zeros(len(labels), np.bool_)
    for label, share in ((1, p), (0, 1 - p)):
        rows = random.permutation(np.flatnonzero(allowed & (labels == label)))
        marked[rows[: round(share * len(rows))]] = True
    return marked


def _study(parts: list[NDArray[Any]], labels: NDArray[np.int64], people: _People) -> Study:
    images, lesions, tokens, lungs = parts
    patients = tuple(f"P{number:04d}" for number in people.numbers.tolist())
    return Study(images, labels, lesions, tokens, lungs, patients, people.sites, people.sexes, people.ages)


def _drawn(
    seed: int, patient: int, number: int, lesion: bool, token: bool, tint: float
) -> tuple[NDArray[np.uint8], Bools, Bools, Bools]:
    """(64,64) the image, and where lesion, token and lungs are."""
    build, film, finding = (
        Generator(Philox(SeedSequence(seed, spawn_key=key))) for key in ((1, patient), (2, number), (3, number))
    )
    chest, lungs = _chest(build, film)
    change = _lesion(finding, lungs) if lesion else np.zeros_like(chest)
    image = np.clip((chest + change + tint) * 255, 0, 250).astype(np.uint8)
    stamp = _stamp(film) & token
    image[stamp] = 255
    return image, change > 0, stamp, lungs > 0


def _chest(build: Generator, film: Generator) -> tuple[Field, Field]:
    """Grey values 0..1 of a body with spine and lungs, and how deep in a lung each pixel lies; negative outside."""
    axis = ((np.arange(SIZE, dtype=np.float32) + 0.5) * (2 / SIZE) - 1).astype(np.float32)
    x, y = axis[None, :] - film.uniform(-0.06, 0.06), axis[:, None] - film.uniform(-0.06, 0.06)
    wide, high = build.uniform(0.74, 0.86), build.uniform(1.05, 1.2)
    body = ramp(1 - ((np.abs(x) / wide) ** 2.5 + (np.abs(y - 0.35) / high) ** 2.5) ** 0.4, 0.12)
    across, tall, apart = build.uniform(0.26, 0.31), build.uniform(0.56, 0.68), build.uniform(0.36, 0.40)
    lungs = 1 - np.sqrt(((np.abs(x) - apart) / across) ** 2 + ((y - 0.05) / tall) ** 2)
    light = build.uniform(0.56, 0.66) + 0.10 * band(x, 0.2, 0.1) - build.uniform(0.28, 0.34) * ramp(lungs, 0.3)
    texture = clouds(film, 6, SIZE, 0.035) + clouds(film, 16, SIZE, 0.025)
    grain = film.standard_normal((SIZE, SIZE), dtype=np.float32) * 0.02
    chest: Field = 0.06 + body * (light + texture) + grain
    return chest, np.minimum(lungs, body - 0.5).astype(np.float32)


def _lesion(random: Generator, lungs: Field) -> Field:
    """A soft bright spot in a lung: a Gaussian, cut off where it is faint."""
    places = np.flatnonzero(lungs > 0.35)
    row, column = np.divmod(places[int(random.random() * len(places))], SIZE)
    width, strength = random.uniform(2.6, 3.6), random.uniform(0.30, 0.42)
    down, right = np.arange(SIZE)[:, None] - row, np.arange(SIZE)[None, :] - column
    spot = strength * np.exp(-(down**2 + right**2) / (2 * width**2))
    return np.where(spot > LEAST, spot, 0).astype(np.float32)


def _stamp(random: Generator) -> Bools:
    """An L in the top left corner, moved by a pixel or two."""
    stamp = np.zeros((SIZE, SIZE), np.bool_)
    top, left = random.integers(2, 5, 2)
    stamp[top : top + TOKEN.shape[0], left : left + TOKEN.shape[1]] = TOKEN
    return stamp


def _picture(values: NDArray[Any], suffix: str) -> bytes:
    from PIL import Image

    first, *others = [Image.fromarray(page) for page in (values if values.ndim == 3 else values[None])]
    file = io.BytesIO()
    if suffix == "png":
        first.save(file, "PNG")
    else:
        first.save(file, "TIFF", save_all=True, append_images=others)
    return file.getvalue()


MEAN, STD = 0.4, 0.25
BATCH: Final = 32
RATE: Final = 2e-2

PREPROCESSING: Final = {"shortcut_net": ((SIZE, SIZE), (MEAN,), (STD,))}
CATEGORIES: Final = {"shortcut_net": list(FINDINGS), "shortcut_volume_net": list(FINDINGS)}
TARGET_LAYER: Final = {"shortcut_net": "layer3", "shortcut_volume_net": "layer3"}


class ShortcutNet(nn.Module):
    """Grey images (N,1,*S) -> (N,2): three convolutions, each of which halves the resolution, the mean, a linear layer.

    A cell of `layer3` is 8 pixels wide and sees 22: a token of 5 pixels is below its resolution. `axes`: 2 or 3 of space.
    """

    def __init__(self, axes: int = 2) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = _halving(axes, 1, 8), _halving(axes, 8, 16), _halving(axes, 16, 16)
        self.fc = nn.Linear(16, len(FINDINGS))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        scores: Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))).flatten(2).mean(2))
        return scores


def _halving(axes: int, before: int, after: int) -> nn.Sequential:
    """An even kernel, so that each cell stays centred on its own pixels."""
    convolution, norm = (nn.Conv2d, nn.BatchNorm2d) if axes == 2 else (nn.Conv3d, nn.BatchNorm3d)
    return nn.Sequential(convolution(before, after, 4, 2, 1, bias=False), norm(after), nn.ReLU())


def shortcut_net() -> ShortcutNet:
    """A net for radiographs (N,1,64,64), whose weights come from a file that `write_net` wrote."""
    return ShortcutNet().eval()


def shortcut_volume_net() -> ShortcutNet:
    """A net for volumes (N,1,32,32,32), whose weights come from a file that `write_net` wrote."""
    return ShortcutNet(3).eval()


def as_input(images: NDArray[Any]) -> Tensor:
    """A study's images (N,H,W) uint8 or volumes (N,D,H,W) float32 as the net takes them: (N,1,*S) float32."""
    one = torch.from_numpy(images).unsqueeze(1).float()
    return (one / 255 - MEAN) / STD if images.ndim == 3 else one


def train_shortcut_net(study: Study, seed: int = 0, epochs: int = 8) -> ShortcutNet:
    """A net in eval mode that has seen every image `epochs` times; the same arguments give the same weights.

    Of 1,000 radiographs, 8 epochs take about 2 s of one core; 400 volumes need 5 and a minute. Threads, determinism and
    the random state of the process are put back.
    """
    if epochs < 1 or len(study) < BATCH:
        raise InputError(
            f"epochs={epochs} of {plural(len(study), 'image')}; expected one at least, and a batch of {BATCH}"
        )
    x, labels = as_input(study.images), torch.from_numpy(study.labels)
    with reproducible(seed, threads=1):
        net = ShortcutNet(x.ndim - 2)
        descent = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.01)
        batches = [
            rows
            for _ in range(epochs)
            for rows in torch.randperm(len(x), device="cpu").split(BATCH)
            if len(rows) == BATCH
        ]
        schedule = torch.optim.lr_scheduler.OneCycleLR(descent, RATE, total_steps=len(batches) + 1)
        for rows in batches:
            loss = F.cross_entropy(net(x[rows]), labels[rows])
            descent.zero_grad()
            loss.backward()
            descent.step()
            schedule.step()
    return net.eval()


def write_net(net: nn.Module, folder: Path, *, overwrite: bool = True) -> Path:
    """`net.safetensors` in a folder, the same bytes for the same weights; its path. The model: `shortcut_net` here."""
    state = {name: value.detach().contiguous() for name, value in net.state_dict().items()}
    return write_generated(folder / "net.safetensors", packed(state), overwrite=overwrite)
