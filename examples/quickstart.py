"""From an image to a map
======================

Explain one image, read the numbers of the map, and save it. The image is a synthetic radiograph, so the region with the
evidence is known exactly, and nothing is downloaded.
"""

# %%
# The model and the image
# -----------------------
# `load_model("phantom")` is the bundled model. Any `nn.Module` works in its place, with `preprocess=weights.transforms()`.

from pathlib import Path

import numpy as np

from camscope import Explanation, GradCAM, LayerCAM, fuse, load_model
from camscope.explanation import figure
from camscope.phantom import draw_radiograph
from camscope.render import encode_image

model = load_model("phantom")
scan = draw_radiograph(seed=11, finding="nodule")

# %%
# The map
# -------
# The first argument of `explain` is a path, a PIL image, an array or a tensor; the second is the class.

explanation = GradCAM(model, "layer4").explain(scan.image, "nodule")
explanation

# %%
# The raw map is signed, in units of the score, and as coarse as the layer. The status is `ok` or a flag.

print(explanation.caption)
print(f"raw map {explanation.grid}, {explanation.attribution.min():.3g} to {explanation.attribution.max():.3g}")
print(f"one cell is {explanation.stride} input pixels; status: {explanation.status}")

# %%
# Where is the peak?
# ------------------
# `heatmap()` lies on the pixels of the original image, from 0 to 1. Here it can be compared with the true mask.

heatmap = explanation.heatmap()
row, column = np.unravel_index(int(heatmap.argmax()), heatmap.shape)
share = heatmap[scan.mask].sum() / heatmap.sum()
print(f"peak at row {row}, column {column}: {'inside' if scan.mask[row, column] else 'outside'} the nodule")
print(f"{share:.0%} of the map lies on the nodule, which is {scan.mask.mean():.1%} of the image")

# %%
# Several classes and layers
# --------------------------
# Several classes share one forward pass. Maps of several layers can be fused into one.

classes = GradCAM(model, "layer4").explain_classes(scan.image, ["nodule", "effusion"])
fused = fuse([LayerCAM(model, layer).explain(scan.image, "nodule") for layer in ("layer2", "layer3", "layer4")])
fused

# %%
# Files
# -----
# A picture has the size of the original image. An `.npz` file keeps everything: the map, the target, the layer, versions.

explanation.save("nodule.png")
explanation.save("nodule.npz")
Path("all.png").write_bytes(encode_image(figure([*classes, fused]), ".png"))
print(Explanation.load("nodule.npz").caption)
