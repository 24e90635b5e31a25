"""Image towers of CLIP and SigLIP from folders made here, and questions put to them in words."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import GradCAM, HiResCAM, load_model
from camscope.errors import ModelError, WeightsError
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.targets import Similarity, TextSimilarity

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of two layers a tower, with a tokenizer of letters."""
    path = tmp_path_factory.mktemp("clip")
    words = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *[f"{letter}</w>" for letter in LETTERS]]
    vocabulary = {word: i for i, word in enumerate(words)}
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\n")
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    texts = {"vocab_size": len(words), "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, **sizes}
    images = {"image_size": 32, "patch_size": 8, **sizes}
    config = transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=12)
    torch.manual_seed(0)
    model = transformers.CLIPModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    transformers.CLIPTokenizer.from_pretrained(path).save_pretrained(path)
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))


@pytest.mark.slow
def test_the_score_is_clips_own_similarity(folder: Path, photograph: Image.Image) -> None:
    model = load_model(f"clip:{folder}")
    found = HiResCAM(model).explain(photograph, TextSimilarity("a cat"))
    assert found.label == 'similarity to "a cat"'
    assert found.grid == (4, 4)
    assert found.placement is not None
    whole = transformers.CLIPModel.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(["a cat"], return_tensors="pt")
    pixels = transformers.CLIPImageProcessor.from_pretrained(folder)(photograph, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = whole(pixel_values=pixels, **tokens)
    expected = float(output.logits_per_image[0, 0] / whole.logit_scale.detach().exp())
    assert found.score == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_texts_are_told_apart_and_images_compared(folder: Path, photograph: Image.Image) -> None:
    model = load_model(f"clip:{folder}")
    tool = HiResCAM(model)
    cat, dog, both = (
        tool.explain(photograph, question)
        for question in (
            TextSimilarity("a cat"),
            TextSimilarity("a dog"),
            TextSimilarity("a cat", contrast_prompt="a dog"),
        )
    )
    np.testing.assert_allclose(both.attribution, cat.attribution - dog.attribution, rtol=1e-3, atol=1e-6)
    assert not np.allclose(cat.attribution, dog.attribution, rtol=1e-3)
    itself = tool.explain(photograph, Similarity(photograph))
    assert itself.score == pytest.approx(1.0, abs=1e-5)


def test_the_card_knows_the_way_and_the_words(folder: Path) -> None:
    card = get_loaded_model_metadata(load_model(f"clip:{folder}", weights="random"))
    assert card is not None
    assert card.preprocess is not None
    assert card.embed_text is not None
    assert card.embed_text("cat").shape == (12,)
    assert GradCAM(load_model(f"clip:{folder}")).preprocess is not None


def test_what_is_no_clip_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises((ModelError, WeightsError), match="clip:"):
        load_model(f"clip:{tmp_path}")
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=16, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no image and text encoders"):
        load_model(f"clip:{tmp_path}")
