"""Train the bundled model: `python -m benchmarks.train_phantom`, about a minute on two cores, the same bytes every time."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.random import Generator, Philox, SeedSequence
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.phantom.phantom_net import PhantomNet, to_model_input
from camscope.phantom.radiograph_drawing import (
    CATEGORIES,
    DEFAULT_SIDE_PIXELS,
    Corner,
    check_draw_arguments,
    draw_radiograph,
    find_class_index_of_finding,
)
from camscope.phantom.shortcut_study import reproducible_scope
from camscope.plurals import plural

TRAINING_SEED_START: Final = 2**31  # training draws `dataset` seeds from here up, the held-out set from below
HELD_OUT_SEED: Final = 2**30
DEFAULT_TRAINING_STEPS: Final = 1000
DEFAULT_TRAINING_IMAGES: Final = 4000
BATCH_SIZE: Final = 32
WEIGHTS_VERSION: Final = "1"  # of the drawing and the net together: raise it when either changes


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A trained net in eval mode, and the loss of every step."""

    model: PhantomNet
    losses: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class PhantomDataset:
    """N drawn radiographs: `images` (N,H,W) uint8, `masks` and `marker_masks` (N,H,W) bool, `labels` (N,) int64."""

    images: NDArray[np.uint8]
    masks: NDArray[np.bool_]
    labels: NDArray[np.int64]
    marker_masks: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labels)


def draw_dataset(
    n_images: int,
    seed: int,
    *,
    marker_class: str | int | None = None,
    marker_correlation: float = 0.0,
    size: int = DEFAULT_SIDE_PIXELS,
) -> PhantomDataset:
    """N phantoms (N,size,size), the classes as even as N allows, in random order.

    With `marker_class` given, the marker in the top left corner is correlated with that class: with K classes and
    r = `marker_correlation` (0..1), P(marker | class) = 1/K + r (1 - 1/K) and P(marker | another class) = (1 - r)/K.
    One image in K then has the marker whatever r is, and r is the correlation (phi) of marker and class: at 0
    the marker is uninformative, at 1 it is the class. Image i is `draw_radiograph(seed * 2**32 + i, ...)`.
    Raises TargetError for an unknown class and InputError for a bad number.
    """
    if n_images < 1:
        raise InputError(f"n is {n_images}; expected at least one image")
    if not 0 <= marker_correlation <= 1 or (marker_correlation and marker_class is None):
        raise InputError(
            f"marker_correlation is {marker_correlation} (marker_class={marker_class!r}); give 0..1 and a class"
        )
    check_draw_arguments(seed, None, size)
    random, kinds = Generator(Philox(SeedSequence(seed, spawn_key=(1,)))), len(CATEGORIES)
    labels = random.permutation(np.arange(n_images) % kinds)
    probability = np.zeros(n_images)
    if marker_class is not None:
        probability = (1 - marker_correlation) / kinds + marker_correlation * (
            labels == find_class_index_of_finding(marker_class)
        )
    marker_corners: list[Corner | None] = [
        "top left" if marked else None for marked in random.random(n_images) < probability
    ]
    phantoms = [
        draw_radiograph((seed << 32) + i, int(labels[i]), marker_corner=marker_corners[i], size=size)
        for i in range(n_images)
    ]
    images, masks = np.stack([phantom.image for phantom in phantoms]), np.stack([phantom.mask for phantom in phantoms])
    return PhantomDataset(
        images, masks, labels.astype(np.int64), np.stack([phantom.marker_mask for phantom in phantoms])
    )


def train_phantom_model(
    seed: int = 0,
    *,
    n_steps: int = DEFAULT_TRAINING_STEPS,
    n_images: int = DEFAULT_TRAINING_IMAGES,
    marker_class: str | int | None = None,
    marker_correlation: float = 0.0,
) -> TrainingResult:
    """A net trained on `n_images` phantoms for `n_steps` batches of 32; the same arguments give the same weights.

    `seed` fixes phantoms, first weights and order; `marker_class` and `marker_correlation` are those of `draw_dataset`: with
    them the net is offered a shortcut. Threads, determinism and the random state of the process are put back.
    Raises InputError and TargetError as `draw_dataset` does.
    """
    if n_steps < 1:
        raise InputError(f"steps is {n_steps}; expected at least 1")
    drawn = draw_dataset(
        n_images, TRAINING_SEED_START + seed, marker_class=marker_class, marker_correlation=marker_correlation
    )
    with reproducible_scope(seed):
        model = PhantomNet().to(memory_format=torch.channels_last)  # a third faster here
        losses = tuple(_show_progress(_run_training_steps(model, drawn, n_steps, seed), n_steps))
    return TrainingResult(model.to(memory_format=torch.contiguous_format).eval(), losses)


def compute_accuracy_by_class(model: nn.Module, phantoms: PhantomDataset) -> dict[str, float]:
    """Share of phantoms whose top class is right, for each class by name."""
    labels = torch.from_numpy(phantoms.labels)
    with torch.no_grad():
        parts = [model(to_model_input(phantoms.images[i : i + 100])).argmax(1) for i in range(0, len(phantoms), 100)]
    right = torch.cat(parts) == labels
    return {name: right[labels == label].double().mean().item() for label, name in enumerate(CATEGORIES)}


def save_weights(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Weights in half precision, as safetensors; the file is whole or not there."""
    state = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("xb") as file:
            file.write(encode_safetensors(state, metadata))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def encode_safetensors(state: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """A safetensors file with its header in the order of the keys: the library's own order changes from call to call."""
    from safetensors.torch import save as pack

    data = pack(state, metadata)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:start]), sort_keys=True, separators=(",", ":")).encode()
    return data[:8] + header.ljust(start - 8) + data[start:]


def _run_training_steps(model: PhantomNet, phantoms: PhantomDataset, n_steps: int, seed: int) -> Iterator[float]:
    """The loss of each step: AdamW, one cycle of the learning rate, every batch moved, mirrored and re-exposed."""
    random = Generator(Philox(seed))
    inputs, labels = to_model_input(phantoms.images), torch.from_numpy(phantoms.labels)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=n_steps + 1)
    for _ in range(n_steps):
        rows = torch.from_numpy(random.choice(len(labels), BATCH_SIZE, replace=len(labels) < BATCH_SIZE))
        loss = nn.functional.cross_entropy(model(_augment_batch(inputs[rows], random)), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


def _augment_batch(inputs: Tensor, random: Generator) -> Tensor:
    """A batch (N,1,H,W) moved by up to a cell of the last layer, mirrored half of the time, re-exposed image by image."""
    moved = torch.roll(inputs, random.integers(-8, 9, 2).tolist(), (2, 3))
    shape = (len(inputs), 1, 1, 1)
    gain = torch.from_numpy(random.normal(1, 0.1, shape)).float()
    shift = torch.from_numpy(random.normal(0, 0.2, shape)).float()
    return (moved.flip(3) if random.random() < 0.5 else moved) * gain + shift


def _show_progress(losses: Iterator[float], n_steps: int) -> Iterator[float]:
    """The losses as they come, behind a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return iter(track(losses, "training", n_steps, console=console, transient=True, disable=not console.is_terminal))


def main(arguments: list[str] | None = None) -> None:
    """Draw, train, judge on phantoms never seen, and write the weights."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_phantom", description=__doc__)
    bundled = Path(__file__).parents[1] / "src" / "camscope" / "phantom" / "phantom.safetensors"
    parser.add_argument("--output", type=Path, default=bundled, help="where the weights go (default: the package)")
    parser.add_argument("--seed", type=int, default=0, help="phantoms, first weights and order (default: 0)")
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_TRAINING_STEPS,
        help=f"batches of {BATCH_SIZE} (default: {DEFAULT_TRAINING_STEPS})",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=DEFAULT_TRAINING_IMAGES,
        help=f"drawn to train on; half as many judge ({DEFAULT_TRAINING_IMAGES})",
    )
    chosen = parser.parse_args(arguments)
    model = train_phantom_model(chosen.seed, n_steps=chosen.steps, n_images=chosen.images).model
    by_class = compute_accuracy_by_class(model, draw_dataset(chosen.images // 2, HELD_OUT_SEED))
    mean = sum(by_class.values()) / len(by_class)
    facts = {
        "accuracy": f"{mean:.4f}",
        "seed": str(chosen.seed),
        "steps": str(chosen.steps),
        "version": WEIGHTS_VERSION,
    }
    save_weights(model, chosen.output, facts)
    lines = [f"{name:>14}  {share:.1%}" for name, share in by_class.items()]
    title = f"accuracy on {plural(chosen.images // 2, 'phantom')} never seen"
    report = "\n".join([title, *lines, f"{'all':>14}  {mean:.1%}"])
    Console(highlight=False).print(f"{report}\nwritten to {chosen.output}", soft_wrap=True)


if __name__ == "__main__":
    main()
