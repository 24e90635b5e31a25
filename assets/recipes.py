"""Draw the pictures of docs/recipes again: run the code of each page, keep the `why.png` that it writes, and files named after
the page, such as `inputs-video.png`.

python assets/recipes.py cnn transformers --weights resnet18=FILE --weights timm:deit_tiny_patch16_224=FILE

Weights that are not passed are random, as in the tests, which run the same code.
"""

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import camscope
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import CamscopeWarning
from camscope.models import load_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "recipes"
PHOTO = ROOT / "assets" / "astronaut.jpg"  # Eileen Collins, NASA, public domain
NOT_RUN = "<!-- not run: "  # before a block, with the reason
NEEDS = "<!-- needs: "  # before the first block of a page, with a package that not every environment has
MAX_WIDTH, QUALITY = 1200, 82


def find_blocks(text: str) -> tuple[list[str], list[str]]:
    """Return the Python blocks of a page that run, at their lines, and those that are marked as not run."""
    run: list[str] = []
    not_run: list[str] = []
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        code = "\n" * text[: block.start(1)].count("\n") + block[1]
        is_marked = text[: block.start()].rstrip().rpartition("\n")[2].startswith(NOT_RUN)
        (not_run if is_marked else run).append(code)
    return run, not_run


def find_needs(text: str) -> list[str]:
    """Return the packages that the code of a page needs and that no extra installs."""
    return re.findall(rf"^{NEEDS}(\w+) -->$", text, re.MULTILINE)


def create_offline_loader(folder: Path, weights: Mapping[str, Path]) -> Callable[..., nn.Module]:
    """Return a `load_model` that downloads nothing: what is not in `weights` has random weights.

    Args:
        folder: Where the files with random weights are written.
        weights: Checkpoints by the name of the model, such as "resnet18".

    """

    def load(spec: str, *, weights: str | Path | None = None) -> nn.Module:
        kind, _, name = spec.rpartition(":")
        if weights is None:
            weights = checkpoints.get(spec)
        if kind == "clip" and not Path(name).is_dir():
            return load_model(f"clip:{_write_small_clip(folder / 'clip')}")
        if weights is None and kind in ("", "torchvision", "timm") and name != "phantom":
            weights = folder / f"{name}.safetensors"
            torch.manual_seed(0)
            save_file(_build_randomly(kind, name).state_dict(), weights)
        return load_model(spec, weights=weights)

    checkpoints = dict(weights)
    return load


def _build_randomly(kind: str, name: str) -> nn.Module:
    if kind == "timm":
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model
    from torchvision import models

    built: nn.Module = models.get_model(name)
    return built


def _write_small_clip(folder: Path) -> Path:
    """Write a CLIP with the depth and the grid of ViT-B/32, random weights, and a tokenizer of letters."""
    import transformers

    folder.mkdir(exist_ok=True)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *[f"{letter}</w>" for letter in letters]]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 2}
    texts = {"vocab_size": len(words), "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={**sizes, **texts, "num_hidden_layers": 2},
        vision_config={**sizes, "image_size": 224, "patch_size": 32, "num_hidden_layers": 12},
        projection_dim=12,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    transformers.CLIPTokenizer.from_pretrained(folder).save_pretrained(folder)
    transformers.CLIPImageProcessor().save_pretrained(folder)
    return folder


def draw(page: Path, weights: Mapping[str, Path]) -> None:
    """Run the blocks of a page in an empty folder and write its pictures beside it."""
    run, _ = find_blocks(page.read_text(encoding="utf-8"))
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("assets").mkdir()
        shutil.copy(PHOTO, "assets")
        torch.manual_seed(0)
        camscope.load_model = create_offline_loader(Path(folder), weights)
        names = {"__name__": "__main__"}
        for code in run:
            exec(compile(code, str(page), "exec"), names)  # noqa: S102 - the project's own pages
        if Path("why.png").is_file():
            _write_webp(Path("why.png"), page.with_suffix(".webp"))
        for picture in Path().glob(f"{page.stem}-*.png"):
            _write_webp(picture, page.with_name(f"{picture.stem}.webp"))


def _write_webp(source: Path, target: Path) -> None:
    with Image.open(source) as opened:
        picture = opened.convert("RGB")
    if picture.width > MAX_WIDTH:
        picture = picture.resize((MAX_WIDTH, round(picture.height * MAX_WIDTH / picture.width)))
    with TemporaryDirectory() as folder:
        picture.save(Path(folder) / "picture.webp", quality=QUALITY, method=6)
        write_bytes(target, (Path(folder) / "picture.webp").read_bytes())


def main(
    pages: Annotated[list[str] | None, typer.Argument(help="Names of pages, such as cnn; default: all.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help="MODEL=FILE, for trained weights of a model.")] = None,
) -> None:
    """Run the pages and write their pictures."""
    warnings.simplefilter("ignore", CamscopeWarning)  # flags are drawn
    checkpoints = {model: Path(file) for model, _, file in (item.partition("=") for item in weights or [])}
    for page in sorted(PAGES.glob("*.md")):
        if page.stem != "index" and (not pages or page.stem in pages):
            draw(page, checkpoints)


if __name__ == "__main__":
    typer.run(main)
