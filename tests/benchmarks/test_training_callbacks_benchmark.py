"""The benchmark of the training callbacks in small, and what its figures have to show."""

import json
from statistics import median

import pytest

from benchmarks import training_callbacks
from benchmarks.training_callbacks import RESULTS, measure

PACKAGES = {"lightning": ["lightning"], "transformers": ["transformers", "accelerate"]}


@pytest.mark.parametrize("trainer", PACKAGES)
def test_the_callback_is_timed_and_changes_no_weight(trainer):
    for package in (*PACKAGES[trainer], "tensorboard"):
        pytest.importorskip(package)
    figures = measure(trainer, n_images=40, n_epochs=2, n_rounds=1)
    (calls,) = figures["call_seconds"]
    assert len(calls) == 3  # before the training, and after each epoch
    assert sum(calls) < figures["training_seconds"]["with"][0]
    assert figures["different_values"] == 0
    assert figures["trained_values"] > 50_000


def test_another_weight_is_noticed(monkeypatch):
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    train = training_callbacks.train_with_lightning

    def train_and_change_a_bias(data, n_epochs, folder, callbacks):
        model = train(data, n_epochs, folder, callbacks)
        model[-1].bias.data += bool(callbacks)
        return model

    monkeypatch.setattr(training_callbacks, "train_with_lightning", train_and_change_a_bias)
    assert measure("lightning", n_images=8, n_epochs=1, n_rounds=1)["different_values"] == 4  # one for each class


def test_the_weights_of_the_long_trainings_are_equal_to_the_bit():
    figures = json.loads(RESULTS.read_text("utf-8"))
    for trainer in PACKAGES:
        row = figures[trainer]
        assert row["different_values"] == 0
        seconds = median(value for calls in row["call_seconds"] for value in calls[1:])
        assert all(len(calls) == figures["epochs"] + 1 for calls in row["call_seconds"])
        assert row["seconds_per_epoch"] == pytest.approx(seconds, abs=1e-4)
        epoch = median(row["training_seconds"]["without"]) / figures["epochs"]
        assert row["percent_of_an_epoch"] == pytest.approx(100 * seconds / epoch, abs=0.02)
