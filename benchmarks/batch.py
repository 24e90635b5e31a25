"""A folder of photographs: images per second of `run_batch`, of a bare decode + forward loop, and of a script with grad-cam."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks import trained
from benchmarks.report import OURS, Figure
from benchmarks.timing import Spread, collector_off, in_turns

COPIES, BATCH, SIDE, ROUNDS = 4, 16, 224, 3
FLOORS = {"raw maps": 0.85, "overlays (JPEG)": 0.70}
BARE, PEER, ONE = "decode + forward", "script with grad-cam, batches", "script with grad-cam, one by one"
PREPARE = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(SIDE),
        transforms.ToTensor(),
        transforms.Normalize(trained.MEAN, trained.STD),
    ]
)


class Files(Dataset[Tensor]):
    """Photographs, decoded and prepared as torchvision does it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            prepared: Tensor = PREPARE(image.convert("RGB"))
        return prepared


def figures(rounds: int, device: str) -> Iterator[list[Figure]]:
    """Images per second, and how many of the bare loop's they are."""
    if not trained.here():
        return
    for name in ("resnet18",):
        model, layer = trained.model_and_layer(name)
        model = model.to(device).eval()
        with tempfile.TemporaryDirectory() as folder, collector_off():
            paths = _photographs(Path(folder, "images"))
            for work, floor in FLOORS.items():
                yield _rows(
                    trained.TITLES[name], work, floor, rounds, partial(_tasks, model, layer, paths, Path(folder))
                )


def _photographs(folder: Path) -> list[Path]:
    """Several copies of each, as files of their own."""
    folder.mkdir()
    every = sorted(trained.PHOTOS.iterdir())
    made = [folder / f"{copy}-{path.name}" for copy in range(COPIES) for path in every]
    for place, path in zip(made, every * COPIES, strict=True):
        shutil.copyfile(path, place)
    return made


def _rows(
    title: str, work: str, floor: float, rounds: int, tasks: Callable[[str], dict[str, Callable[[], int]]]
) -> list[Figure]:
    todo = tasks(work)
    images = {name: run() for name, run in todo.items()}  # once for nothing: caches, threads, lazy imports
    times = in_turns({name: partial(_seconds, run) for name, run in todo.items()}, rounds)
    rates = {name: [images[name] / taken for taken in taken_each] for name, taken_each in times.items()}
    shares = {
        name: Spread.of([own / bare for own, bare in zip(values, rates[BARE], strict=True)])
        for name, values in rates.items()
    }
    made = [
        Figure.of("batch", f"{title}, {work}: images per second", name, Spread.of(values))
        for name, values in rates.items()
    ]
    for name, spread in shares.items():
        if name != BARE:
            one = Figure.of("batch", f"{title}, {work}: of the bare loop's", name, spread)
            made.append(replace(one, floor=floor) if name == OURS else one)
    return made


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _tasks(
    model: nn.Module, layer: str, paths: Sequence[Path], folder: Path, work: str
) -> dict[str, Callable[[], int]]:
    drawn = work != "raw maps"
    tasks: dict[str, Callable[[], int]] = {
        BARE: partial(_bare, model, paths),
        OURS: partial(_ours, model, layer, paths, folder / "ours", drawn),
    }
    try:
        import pytorch_grad_cam
    except ModuleNotFoundError:
        return tasks
    cam = pytorch_grad_cam.GradCAM
    return tasks | {
        PEER: partial(_script, cam, model, layer, paths, folder / "peer", drawn, BATCH),
        ONE: partial(_script, cam, model, layer, paths[: len(paths) // 4], folder / "peer", drawn, 1),
    }


def _bare(model: nn.Module, paths: Sequence[Path]) -> int:
    """As many processes decode as there are cores; the model runs in this one."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        for x in DataLoader(Files(paths), BATCH, num_workers=os.cpu_count() or 1):
            model(x.to(device)).argmax(1).tolist()
    return len(paths)


def _ours(model: nn.Module, layer: str, paths: Sequence[Path], folder: Path, drawn: bool) -> int:
    from camscope import GradCAM
    from camscope.batch import BatchOptions, run_batch

    tool = GradCAM(model, layer, preprocess=_preprocess())
    outcome = run_batch(
        tool,
        list(paths),
        folder,
        batch_size=BATCH,
        overlays="jpg" if drawn else None,
        options=BatchOptions(chunk_size=64),
        overwrite=True,
    )
    return outcome.n_processed


def _preprocess() -> Any:
    from camscope.images.preprocess import Preprocess

    return Preprocess.from_preset("imagenet")


def _script(
    cam: Any, model: nn.Module, layer: str, paths: Sequence[Path], folder: Path, drawn: bool, batch: int
) -> int:
    """What its documentation shows, over a folder: a map an image, saved as numbers or laid over the picture."""
    import cv2
    from pytorch_grad_cam.utils.image import show_cam_on_image

    folder.mkdir(exist_ok=True)
    files = Files(paths)
    with cam(model=model, target_layers=[model.get_submodule(layer)]) as explained:
        for start in range(0, len(paths), batch):
            some = paths[start : start + batch]
            x = torch.stack([files[start + i] for i in range(len(some))])
            for path, heat in zip(some, explained(input_tensor=x, targets=None), strict=True):
                if not drawn:
                    np.save(folder / f"{path.stem}.npy", heat)
                    continue
                with Image.open(path) as image:
                    picture = np.asarray(image.convert("RGB"), np.float32) / 255
                laid = show_cam_on_image(picture, cv2.resize(heat, picture.shape[1::-1]), use_rgb=True)
                cv2.imwrite(str(folder / f"{path.stem}.jpg"), cv2.cvtColor(laid, cv2.COLOR_RGB2BGR))
    return len(paths)
