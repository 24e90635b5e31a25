"""`python -m benchmarks.training_callbacks`: what `MapLogger` costs in a training with Lightning and with transformers.

A small CNN is trained on synthetic radiographs with and without the callback, alternately. The callback logs Grad-CAM of four
images after each epoch to TensorBoard. The time of its calls is taken inside the training, and the weights of both trainings
are compared bit by bit. `--write` keeps the figures in results/training_callbacks.json. Needs Lightning, transformers,
accelerate and TensorBoard.
"""

import argparse
import importlib
import json
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.machine import machine
from camscope.phantom import CATEGORIES, draw_radiograph, to_model_input

RESULTS = Path(__file__).parent / "results" / "training_callbacks.json"
N_IMAGES, N_EPOCHS, BATCH_SIZE, N_LOGGED = 1024, 10, 32, 4
TRAINERS = ("lightning", "transformers")


class Radiographs(Dataset[dict[str, Tensor]]):
    """Synthetic radiographs with their findings, as items for both trainers."""

    def __init__(self, n_images: int) -> None:
        findings = [CATEGORIES[i % len(CATEGORIES)] for i in range(n_images)]
        drawings = [draw_radiograph(seed, finding).image for seed, finding in enumerate(findings)]
        self.images = to_model_input(np.stack(drawings))
        self.labels = torch.tensor([CATEGORIES.index(finding) for finding in findings])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one image and its label."""
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def build_cnn() -> nn.Sequential:
    """Build a CNN of four convolutions. Dropout and batch norm would show every additional pass in train mode."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n_in, n_out in ((1, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(n_in, n_out, 3, 2, 1), nn.BatchNorm2d(n_out), nn.ReLU()]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, len(CATEGORIES)))
    return nn.Sequential(nn.Sequential(*layers), *head)


class OutputWithLoss(nn.Module):
    """The CNN with the call that the Trainer of transformers expects."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = build_cnn()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits, and the loss if there are labels."""
        logits = self.cnn(pixel_values)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        )


def time_log_calls(callback: Any) -> list[float]:
    """Return a list that receives the seconds of each call that logs maps."""
    log, seconds = callback.maps.log, []

    def timed_log(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return log(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    callback.maps.log = timed_log
    return seconds


def train_with_lightning(data: Radiographs, n_epochs: int, folder: Path, callbacks: list[Any]) -> nn.Module:
    """Train the CNN with Lightning."""
    pl = importlib.import_module("lightning.pytorch")
    loggers = importlib.import_module("lightning.pytorch.loggers")

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.cnn = build_cnn()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.cnn(batch["pixel_values"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=n_epochs, accelerator="cpu", logger=loggers.TensorBoardLogger(folder), callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, BATCH_SIZE, shuffle=True))
    return module.cnn


def train_with_transformers(data: Radiographs, n_epochs: int, folder: Path, callbacks: list[Any]) -> nn.Module:
    """Train the CNN with the Trainer of transformers."""
    transformers = importlib.import_module("transformers")
    model = OutputWithLoss()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=n_epochs, per_device_train_batch_size=BATCH_SIZE, learning_rate=1e-3, seed=1,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    return model.cnn


def build_callback(trainer: str, data: Radiographs, folder: Path) -> tuple[Any, Any]:
    """Return the callback of a trainer, and the writer that has to be closed."""
    names = {"targets": data.labels[:N_LOGGED].tolist(), "class_names": CATEGORIES}
    map_logger = importlib.import_module(f"camscope.integrations.{trainer}").MapLogger
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "maps"))
    layer = "0" if trainer == "lightning" else "cnn.0"
    model = {"model": "cnn"} if trainer == "lightning" else {}
    return map_logger(data.images[:N_LOGGED], writer=writer, layer=layer, **model, **names), writer


def measure(trainer: str, n_images: int = N_IMAGES, n_epochs: int = N_EPOCHS, n_rounds: int = 2) -> dict[str, Any]:
    """Train without and with the callback, alternately.

    Returns:
        Seconds of each training, seconds of each call of the callback, how many values of the weights differ, and how many
        differ from the start.

    """
    train = {"lightning": train_with_lightning, "transformers": train_with_transformers}[trainer]
    data, start = Radiographs(n_images), build_cnn().state_dict()
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    call_seconds: list[list[float]] = []
    states: list[dict[str, Tensor]] = []
    with TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(Radiographs(BATCH_SIZE), 1, Path(place), [])  # imports are not timed
    for _ in range(n_rounds):
        for kind, times in seconds.items():
            with TemporaryDirectory() as place, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # hints of the trainers about workers and devices
                callback, writer = build_callback(trainer, data, Path(place))
                calls = time_log_calls(callback)
                begin = time.perf_counter()
                model = train(data, n_epochs, Path(place), [callback] if kind == "with" else [])
                times.append(round(time.perf_counter() - begin, 2))
                writer.close()
                states.append(model.state_dict())
                if kind == "with":
                    call_seconds.append([round(value, 4) for value in calls])
    first, *others = states
    epoch_seconds = float(np.median([value for calls in call_seconds for value in calls[1:]]))
    plain_seconds = float(np.median(seconds["without"])) / n_epochs
    return {
        "training_seconds": seconds,
        "call_seconds": call_seconds,  # the first is before the training
        "seconds_per_epoch": round(epoch_seconds, 4),
        "percent_of_an_epoch": round(100 * epoch_seconds / plain_seconds, 2),
        "different_values": sum(int((state[name] != first[name]).sum()) for state in others for name in first),
        "trained_values": sum(int((first[name] != start[name]).sum()) for name in first),
    }


def main() -> None:
    """Run the command line of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_callbacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS, help="--write keeps the others")
    parser.add_argument("--images", type=int, default=N_IMAGES)
    parser.add_argument("--epochs", type=int, default=N_EPOCHS)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    facts = {
        "machine": machine("cpu"), "images": options.images, "epochs": options.epochs, "maps_per_epoch": N_LOGGED,
    }  # fmt: skip
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    figures: dict[str, Any] = {name: value for name, value in kept.items() if name in TRAINERS} | facts
    if any(kept.get(name, value) != value for name, value in facts.items()) and set(options.trainers) != set(TRAINERS):
        parser.error("the figures that are kept have other settings or another machine: measure all trainers")
    for trainer in options.trainers:
        figures[trainer] = measure(trainer, options.images, options.epochs, options.rounds)
        print(json.dumps({trainer: figures[trainer]}), flush=True)
    if options.write:
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
