"""Callbacks in real trainings: weights equal to the bit with and without, event files that are read back, and errors."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from camscope import GradCAM
from camscope.errors import CamscopeWarning, InputError, LayerError, OutputError
from camscope.integrations.log_maps_of_samples import SampleMaps, random_numbers_restored, split_sample
from tests.test_log_explanation import read_events


def build_net():
    """A network with batch norm and dropout, which notice every further pass in train mode."""
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU()
    )
    return nn.Sequential(features, nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def build_data():
    labels = torch.arange(32) % 2
    images = torch.rand(32, 1, 24, 24, generator=torch.Generator().manual_seed(1))
    images[labels == 1, :, 8:14, 8:14] += 1
    return TensorDataset(images, labels)


class NoisyData(torch.utils.data.Dataset):
    """A data set with a random augmentation, which draws from all three generators."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return image + 0.01 * torch.rand(1) + 0.01 * random.random() + 0.01 * np.random.rand(), label


def get_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_equal_to_the_bit(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def train_with_lightning(callbacks, folder, *, logger=True, epochs=3):
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = build_net()

        def training_step(self, batch):
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    loader = DataLoader(NoisyData(build_data()), 8, shuffle=True)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=callbacks,
        logger=TensorBoardLogger(folder, name="", version="") if logger else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
    )
    trainer.fit(module, loader)
    assert module.model.training
    assert not any(part._forward_hooks for part in module.modules())
    return module, torch.rand(1)


# the data loader without workers, and what this version of Lightning deprecates in PyTorch, are not the subject
quiet = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def with_marks(function):
    for mark in quiet:
        function = mark(function)
    return function


@with_marks
def test_lightning_trains_the_same_weights_and_its_event_file_has_the_maps(tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    from camscope.integrations.lightning import MapLogger

    callback = MapLogger(
        NoisyData(build_data()),
        indices=[1, 3],
        methods=["gradcam", "saliency"],
        layer="0",
        model="model",
        every_n_epochs=2,
    )
    without, draw_without = train_with_lightning([], tmp_path / "without")
    module, draw = train_with_lightning([callback], tmp_path / "with")
    check_equal_to_the_bit(get_state(without), get_state(module))
    assert torch.equal(draw, draw_without)  # the random numbers after the training, too
    pictures, scalars, _ = read_events(tmp_path / "with")
    tags = [f"maps/{method}/{index}" for method in ("gradcam", "saliency") for index in (1, 3)]
    assert sorted(pictures) == tags
    for tag in tags:
        assert [step for step, _ in pictures[tag]] == [
            0,
            8,
        ]  # before the training, and after the second epoch of 4 steps
        assert pictures[tag][0][1].shape[0] >= 256
    assert [step for step, _ in scalars["maps/gradcam/1/score"]] == [0, 8]
    _, untouched_scalars, _ = read_events(tmp_path / "without")
    assert scalars["loss"] == untouched_scalars["loss"]


@with_marks
def test_the_map_of_lightning_is_the_direct_one(tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    from camscope.integrations.lightning import MapLogger

    images = build_data().tensors[0][:2]
    module, _ = train_with_lightning(
        [MapLogger(images, targets=[1, 0], layer="0", model="model", height=None)], tmp_path, epochs=1
    )
    pictures, scalars, _ = read_events(tmp_path)
    for index, target in enumerate([1, 0]):
        direct = GradCAM(module.model, "0").explain(images[index], target)
        np.testing.assert_array_equal(pictures[f"maps/gradcam/{index}"][-1][1], direct.annotated_image())
        assert scalars[f"maps/gradcam/{index}/score"][-1][1] == pytest.approx(direct.score, abs=1e-6)


@with_marks
def test_lightning_reports_a_mistake_before_the_training(tmp_path):
    pytest.importorskip("lightning")
    from camscope.integrations.lightning import MapLogger

    images = build_data().tensors[0][:2]
    with pytest.raises(OutputError, match="the trainer has no logger; pass writer="):
        train_with_lightning([MapLogger(images, model="model")], tmp_path, logger=False)
    with pytest.raises(LayerError, match="layer5"):
        train_with_lightning([MapLogger(images, layer="layer5", model="model")], tmp_path)
    with pytest.raises(LayerError, match="backbone"):
        train_with_lightning([MapLogger(images, model="backbone")], tmp_path)


class ImageModel(nn.Module):
    """A model as the Trainer takes it: keywords in, a dict with the loss out."""

    def __init__(self):
        super().__init__()
        self.net = build_net()

    def forward(self, pixel_values, labels=None):
        logits = self.net(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


class DictData(NoisyData):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"pixel_values": image, "labels": int(label)}


def train_with_transformers(callbacks, folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
        dataloader_pin_memory=False,
        logging_strategy="no",
    )
    model = ImageModel()
    trainer = transformers.Trainer(model, arguments, train_dataset=DictData(build_data()), callbacks=callbacks)
    random.seed(5), np.random.seed(5)
    trainer.train()
    assert model.training
    assert not any(part._forward_hooks for part in model.modules())
    return model


@with_marks
def test_the_trainer_trains_the_same_weights_and_its_event_file_has_the_maps(tmp_path, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    from camscope.integrations.transformers import MapLogger

    without = train_with_transformers([], tmp_path / "a")
    writer = SummaryWriter(tmp_path / "events")
    callback = MapLogger(DictData(build_data()), writer, indices=[1], layer="net.0", tag="validation")
    model = train_with_transformers([callback], tmp_path / "b")
    writer.close()
    check_equal_to_the_bit(get_state(without), get_state(model))
    pictures, scalars, _ = read_events(tmp_path / "events")
    assert [step for step, _ in pictures["validation/gradcam/1"]] == [0, 4, 8, 12]
    assert len(scalars["validation/gradcam/1/ok"]) == 4


def test_a_later_error_is_a_warning_and_the_training_continues(tmp_path):
    class Full:
        def add_image(self, *args, **kwargs):
            raise OutputError("the disk is full")

    maps, model = SampleMaps(build_data().tensors[0], layer="0"), build_net()
    with pytest.raises(OutputError, match="the disk is full"):
        maps.log(model, [Full()], 0, first=True)
    with pytest.warns(CamscopeWarning, match="no maps at step 9: the disk is full"):
        assert maps.log(model, [Full()], 9) == 0


def test_samples_and_settings():
    with pytest.raises(InputError, match="every_n_epochs=0, 1 method: expected 1 or more"):
        SampleMaps([1], every_n_epochs=0)
    with pytest.raises(InputError, match="there is no sample"):
        SampleMaps([])
    with pytest.raises(InputError, match="1 target for 2 samples: give one for each"):
        SampleMaps(build_data(), indices=[0, 1], targets=[1])._read_samples()
    assert SampleMaps(build_data())._read_samples()[1] == [0, 1, 0, 1]
    assert SampleMaps(build_data(), targets=1)._read_samples()[1] == [1] * 4
    assert split_sample((torch.zeros(1), torch.tensor(3)))[1] == 3
    assert split_sample({"img": "a.png", "label": 2}) == ("a.png", 2)
    assert split_sample(["a.png", "a text"]) == ("a.png", None)
    with pytest.raises(InputError, match="a sample has the keys a, b; expected pixel_values or image or img"):
        split_sample({"a": 1, "b": 2})


def test_random_numbers_are_restored_after_an_error():
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()

    def draw_and_fail():
        with random_numbers_restored():
            raise RuntimeError(f"{random.random()} {np.random.rand()} {torch.rand(1)}")

    with pytest.raises(RuntimeError):
        draw_and_fail()
    after = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    assert before[0] == after[0]
    assert np.array_equal(before[1], after[1])
    assert torch.equal(before[2], after[2])
