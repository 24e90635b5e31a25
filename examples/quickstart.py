"""From an image to a map
======================

From an image to a map you can trust: `python examples/quickstart.py [FOLDER]` writes its pictures there.
"""

import sys
from pathlib import Path

import numpy as np

from camscope import GradCAM, LayerCAM, fuse, load_model
from camscope.explanation import figure
from camscope.phantom import draw_radiograph
from camscope.render import encode_image
from camscope.safe_files import write_bytes


def main(folder: Path) -> None:
    """Explain one phantom, whose evidence is known to the pixel."""
    model = load_model("phantom")  # or any nn.Module of yours, with preprocess=weights.transforms()
    scan = draw_radiograph(seed=11, finding="nodule")

    # One question about one image. The image may be a path, a PIL image, an array or a tensor.
    explanation = GradCAM(model, "layer4").explain(scan.image, "nodule")
    print(explanation.caption)
    print(
        f"raw map {explanation.grid}, {explanation.attribution.min():.3g} to {explanation.attribution.max():.3g} in score units"
    )
    print(f"one cell is {explanation.stride} input pixels; status: {explanation.status}")

    # Where does the map peak, and is that inside the evidence?
    heat = explanation.heatmap()  # on the original image's own pixels, 0..1
    row, column = np.unravel_index(int(heat.argmax()), heat.shape)
    share = heat[scan.mask].sum() / heat.sum()
    print(f"peak at row {row}, column {column}: {'inside' if scan.mask[row, column] else 'outside'} the nodule")
    print(f"{share:.0%} of the map lies on the nodule, which is {scan.mask.mean():.1%} of the image")

    # Several classes from one forward pass; several layers fused into one map.
    classes = GradCAM(model, "layer4").explain_classes(scan.image, ["nodule", "effusion"])
    fused = fuse([LayerCAM(model, layer).explain(scan.image, "nodule") for layer in ("layer2", "layer3", "layer4")])

    explanation.save(folder / "nodule.png")
    explanation.save(folder / "nodule.npz")  # Explanation.load reads it back: raw map, target, layer, versions, digest
    write_bytes(folder / "all.png", encode_image(figure([*classes, fused]), ".png"))
    print(f"pictures in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart"))
