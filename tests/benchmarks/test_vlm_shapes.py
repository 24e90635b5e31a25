"""The benchmark of vision-language models: its drawings, its training in small, and its figures."""

import json

import numpy as np
import pytest
import torch

from benchmarks import vlm_shapes
from benchmarks.vlm_shapes import (
    IMAGE_PIXELS,
    OBJECTS,
    RESULTS,
    build_model,
    build_processor,
    draw_object,
    measure,
    train,
)

pytest.importorskip("transformers")


def test_an_object_lies_in_its_box():
    for seed in range(20):
        drawing, again = (draw_object(np.random.default_rng(seed)) for _ in range(2))
        top, left, bottom, right = drawing.box
        assert np.array_equal(drawing.image, again.image)
        assert 0 <= top < bottom <= IMAGE_PIXELS
        assert 0 <= left < right <= IMAGE_PIXELS
        inside = drawing.image[top:bottom, left:right].reshape(-1, 3)
        _, count = np.unique(inside, axis=0, return_counts=True)
        area = {"square": 1, "disk": np.pi / 4, "cross": 1 - 0.68**2, "triangle": 0.5}[OBJECTS[drawing.label]]
        assert count.max() / len(inside) == pytest.approx(area, abs=0.09)


def test_held_out_drawings_are_not_in_the_training():
    training = {draw_object(np.random.default_rng(0)).image.tobytes()}
    assert training.isdisjoint(drawing.image.tobytes() for drawing in vlm_shapes.draw_held_out(5))


def test_a_short_training_learns_the_words_of_the_answer(tmp_path):
    torch.manual_seed(0)
    model, processor = build_model(), build_processor()
    drawing = draw_object(np.random.default_rng(0))
    inputs = processor(images=[drawing.image], text=["<image> what is this object"], return_tensors="pt")
    with torch.no_grad():
        untrained = -float(
            model(**inputs).logits[0, -1].log_softmax(0)[5 + vlm_shapes.WORDS.index(OBJECTS[drawing.label])]
        )
    figures = train(tmp_path / "model.safetensors", n_steps=30)
    assert figures["loss"] < untrained  # it knows that one of four words follows
    loaded = measure(vlm_shapes.load(tmp_path / "model.safetensors"), ("gradcam",), count=3)
    rows = loaded["prompts"]["around"]["methods"]["gradcam"]
    assert 0 <= rows["peak_in_box"] <= 1
    assert loaded["images"] == 3


def test_the_written_figures_reach_the_goal():
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert figures["images"] == vlm_shapes.N_HELD_OUT
    for prompt in figures["prompts"].values():
        assert prompt["methods"]["rise"]["peak_in_box"] >= vlm_shapes.MIN_SHARE_ON_OBJECT
        assert prompt["methods"]["gradcam"]["peak_in_box"] > 3 * figures["box_share_of_image"]
