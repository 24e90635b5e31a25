"""Draw docs/explanation/attention.webp: the attention methods on two photographs (CC0, public domain), beside Grad-CAM.

python assets/attention.py --model models.py:deit_tiny
"""

import io
import warnings
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from sheets import HEIGHT
from subjects import photograph
from torchvision.models import ViT_B_16_Weights

from camscope import Explanation, GradCAM, load_model
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import CamscopeWarning
from camscope.render import draw_image_grid

ASKED = (("chelsea.png", "Egyptian cat"), ("rocket.jpg", "crane"), ("rocket.jpg", "missile"))
CATEGORIES: list[str] = ViT_B_16_Weights.DEFAULT.meta["categories"]
METHODS = ("gradcam", "legrad", "chefer", "gradeclip", "gradrollout", "rollout")


def main(
    model: Annotated[str, typer.Option(help="A transformer, as in camscope explain.")] = "vit_b_16",
    output: Annotated[Path, typer.Option(help="The picture.")] = Path(__file__).parents[1]
    / "docs/explanation/attention.webp",
) -> None:
    """Draw a row a question, a column a method."""
    warnings.simplefilter("ignore", CamscopeWarning)  # flags are drawn
    tool = GradCAM(load_model(model), class_names=CATEGORIES)
    answers: list[Explanation] = []
    for file, label in ASKED:
        answers += tool.explain_methods(photograph(file), list(METHODS), CATEGORIES.index(label))
    captions = [
        f"{one.method}: {one.label} {one.probability:.2f}" if one.method == "gradcam" else one.method for one in answers
    ]
    tiles, flags = [one.overlay(height=HEIGHT) for one in answers], [one.warning_text for one in answers]
    picture, buffer = draw_image_grid(tiles, captions, columns=len(METHODS), height=HEIGHT, flags=flags), io.BytesIO()
    Image.fromarray(picture).save(buffer, "WEBP", quality=80)
    write_bytes(output, buffer.getvalue())


if __name__ == "__main__":
    typer.run(main)
