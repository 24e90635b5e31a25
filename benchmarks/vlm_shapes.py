"""Maps of the word that a small vision-language model writes, which is trained to name a drawn object: are they on the object?

    python -m benchmarks.vlm_shapes --train model.safetensors           # 40 minutes on one core
    python -m benchmarks.vlm_shapes --model model.safetensors --write   # figures into results/vlm_shapes.json

The model is a LLaVA of transformers with a CLIP tower and a Llama decoder, both from random weights. Each image has one
object, a square, a disk, a cross or a triangle, at a random place of a texture. Short bars distract. The prompt has the image
before, inside or behind the question. A map is right if its peak lies in the object's box. By chance, a peak is there as
often as the box covers the image. Needs the `hub` extra.
"""

import argparse
import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.machine import machine

OBJECTS = ("square", "disk", "cross", "triangle")
WORDS = ("what", "is", "this", "object", *OBJECTS)
IMAGE_PIXELS, PATCH_PIXELS = 64, 8
SIDE_PIXELS = (16, 25)  # of an object
N_BARS = 6
PROMPTS = {
    "before": "<image> what is this object",
    "around": "what is <image> this object",
    "behind": "what is this object <image>",
}
N_STEPS, BATCH_SIZE, LEARNING_RATE = 12_000, 32, 1e-3
N_HELD_OUT = 100
METHODS_MEASURED = (
    "gradcam", "layercam", "hirescam", "gradcam++", "chefer", "gradrollout", "rollout", "eigencam", "occlusion", "rise",
)  # fmt: skip
METHODS_FOR_ALL_PROMPTS = ("gradcam", "layercam", "chefer", "rise")
SETTINGS: dict[str, dict[str, Any]] = {"rise": {"n_samples": 500}}
RESULTS = Path(__file__).parent / "results" / "vlm_shapes.json"
MIN_SHARE_ON_OBJECT = 0.9  # of the held-out images: the goal, fixed before the first measurement


class Drawing(NamedTuple):
    """An image with one object, the object's name, and its box (top, left, bottom, right) in pixels."""

    image: NDArray[np.uint8]
    label: int
    box: tuple[int, int, int, int]


def draw_object(rng: np.random.Generator) -> Drawing:
    """Draw one object in a random color at a random place, on a texture with bars that are no objects."""
    size = IMAGE_PIXELS
    image = rng.normal(110, 25, (size, size, 3))
    for _ in range(N_BARS):
        length, y, x = int(rng.integers(5, 12)), *(int(at) for at in rng.integers(0, size - 12, 2))
        shape = (length, 2) if rng.random() < 0.5 else (2, length)
        image[y : y + shape[0], x : x + shape[1]] = rng.integers(0, 256, 3)
    label, side = int(rng.integers(len(OBJECTS))), int(rng.integers(*SIDE_PIXELS))
    top, left = (int(at) for at in rng.integers(0, size - side, 2))
    y, x = np.mgrid[:side, :side] + 0.5
    y, x = y / side, x / side
    mask = {
        "square": np.ones((side, side), bool),
        "disk": (y - 0.5) ** 2 + (x - 0.5) ** 2 <= 0.25,
        "cross": (abs(y - 0.5) < 0.16) | (abs(x - 0.5) < 0.16),
        "triangle": abs(x - 0.5) <= y / 2,
    }[OBJECTS[label]]
    color = rng.integers(0, 256, 3)
    color[int(rng.integers(3))] = 255 if rng.random() < 0.5 else 0
    image[top : top + side, left : left + side][mask] = color
    return Drawing(image.clip(0, 255).astype(np.uint8), label, (top, left, top + side, left + side))


def build_model() -> Any:
    """Return the model with random weights."""
    transformers: Any = import_module("transformers")

    tower = {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": IMAGE_PIXELS, "patch_size": PATCH_PIXELS, "projection_dim": 64,
    }  # fmt: skip
    decoder = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 5 + len(WORDS), "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=tower, text_config=decoder, image_token_id=4, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def build_processor() -> Any:
    """Return the processor of the model, with one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers: Any = import_module("transformers")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", "<image>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    side = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    images = transformers.CLIPImageProcessor(size=side, do_center_crop=False)
    return transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def train(destination: Path, n_steps: int = N_STEPS, seed: int = 0) -> dict[str, float]:
    """Train the model and save its weights. Return the number of steps, the last losses and the seconds."""
    from safetensors.torch import save_model

    torch.manual_seed(seed)
    rng, start = np.random.default_rng(seed), time.perf_counter()
    model, processor = build_model().train(), build_processor()
    rate = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(rate, LEARNING_RATE, total_steps=n_steps)
    mean, std = (
        torch.tensor(getattr(processor.image_processor, name)).view(3, 1, 1) for name in ("image_mean", "image_std")
    )
    blank = [np.zeros((IMAGE_PIXELS, IMAGE_PIXELS, 3), np.uint8)] * BATCH_SIZE
    prompts = [processor(images=blank, text=[text] * BATCH_SIZE, return_tensors="pt") for text in PROMPTS.values()]
    losses = []
    for step in range(n_steps):
        drawings = [draw_object(rng) for _ in range(BATCH_SIZE)]
        inputs = dict(prompts[step % len(prompts)])
        pixels = torch.from_numpy(np.stack([d.image for d in drawings])).permute(0, 3, 1, 2)
        inputs["pixel_values"] = (pixels / 255 - mean) / std  # what the processor computes, several times faster
        targets = torch.tensor([5 + WORDS.index(OBJECTS[d.label]) for d in drawings])
        logits = model(**inputs).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, targets)
        rate.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 200 == 199:
            print(
                f"step {step + 1}: loss {np.mean(losses[-100:]):.3f}, {time.perf_counter() - start:.0f} s", flush=True
            )
    save_model(model, str(destination))
    return {"steps": n_steps, "loss": float(np.mean(losses[-100:])), "seconds": time.perf_counter() - start}


def load(model_file: Path) -> Any:
    """Return the trained model in eval mode."""
    from safetensors.torch import load_model

    model = build_model()
    load_model(model, str(model_file))
    return model.eval()


def draw_held_out(count: int = N_HELD_OUT) -> list[Drawing]:
    """Return drawings that were not in the training."""
    rng = np.random.default_rng(10_000)
    return [draw_object(rng) for _ in range(count)]


def measure(model: Any, methods: tuple[str, ...] = METHODS_MEASURED, count: int = N_HELD_OUT) -> dict[str, Any]:
    """Explain the name of each held-out object. Return the share of peaks in the object's box, and the share of the map."""
    from camscope import METHODS, targets

    processor, drawings = build_processor(), draw_held_out(count)
    area = [(d.box[2] - d.box[0]) * (d.box[3] - d.box[1]) / IMAGE_PIXELS**2 for d in drawings]
    figures: dict[str, Any] = {
        "images": count,
        "goal": MIN_SHARE_ON_OBJECT,
        "box_share_of_image": float(np.mean(area)),
        "prompts": {},
    }
    for place, prompt in PROMPTS.items():
        correct = 0
        rows: dict[str, Any] = {}
        for name in methods if place == "before" else [name for name in methods if name in METHODS_FOR_ALL_PROMPTS]:
            explainer, peaks, shares, flagged = METHODS[name](model, **SETTINGS.get(name, {})), 0, [], 0
            correct = 0
            for drawing in drawings:
                target = targets.Token(OBJECTS[drawing.label])
                explanation = explainer.explain(drawing.image, target, prompt=prompt, processor=processor)
                correct += explanation.top_classes[0].label.strip() == OBJECTS[drawing.label]
                flagged += explanation.status != "ok"
                top, left, bottom, right = drawing.box
                row, column = explanation.peak
                peaks += top <= row < bottom and left <= column < right
                heat = np.clip(explanation.heatmap(scale=None), 0, None)
                shares.append(float(heat[top:bottom, left:right].sum() / heat.sum()) if heat.any() else 0.0)
            rows[name] = {"peak_in_box": peaks / count, "map_in_box": float(np.mean(shares)), "flagged": flagged}
        figures["prompts"][place] = {"accuracy": correct / count, "methods": rows}
    return figures


def draw_picture(model: Any, destination: Path) -> None:
    """Draw held-out images, and the maps of the word that the model writes."""
    from PIL import Image

    from camscope import METHODS, render, targets

    processor, drawings, panels, captions = build_processor(), draw_held_out(40), [], []
    chosen = [next(d for d in drawings if d.label == label) for label in range(len(OBJECTS))]
    for name in (None, "gradcam", "chefer", "rise"):
        for drawing in chosen:
            if name is None:
                panels.append(drawing.image)
                captions.append("image")
                continue
            target = targets.Token(OBJECTS[drawing.label])
            explanation = METHODS[name](model, **SETTINGS.get(name, {})).explain(
                drawing.image, target, prompt=PROMPTS["before"], processor=processor
            )
            panels.append(explanation.overlay())
            captions.append(f"{explanation.label_and_score} · {explanation.method_title}")
    page = render.draw_image_grid(panels, captions, columns=len(chosen), height=192)
    Image.fromarray(page).save(destination, quality=80, method=6)


def main() -> None:
    """Run the command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--steps", type=int, default=N_STEPS)
    parser.add_argument("--model", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="FILE.webp")
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(options.train, options.steps)))
    if options.model and options.picture:
        draw_picture(load(options.model), options.picture)
    if options.model and (options.write or not options.picture):
        figures = {"machine": machine("cpu"), "training_steps": options.steps, **measure(load(options.model))}
        text = json.dumps(figures, indent=1)
        print(text)
        if options.write:
            RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
