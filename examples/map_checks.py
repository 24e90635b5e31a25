"""Does the map mean anything?
===========================

A map always looks like an explanation. Four checks tell whether it depends on the evidence, on the class and on the
weights of the model. Control maps, which do not depend on the
model, say what chance looks like.
"""

# %%
# A map and two controls
# ----------------------
# The radiographs are synthetic, so the evidence is known. `center` and `edges` draw a map without the model.

import numpy as np
import torch
from PIL import Image

from camscope import METHODS, GradCAM, load_model
from camscope.explanation import figure
from camscope.metrics import PerturbationTest, deletion, enrichment, run_randomization_test, scoring_scope, spearman
from camscope.phantom import draw_radiograph, to_model_input

model = load_model("phantom")
scans = [draw_radiograph(seed, "nodule") for seed in range(11, 17)]
explainers = {name: METHODS[name](model) for name in ("gradcam", "guidedbackprop", "center", "edges")}
first = [explainer.explain(scans[0].image, "nodule") for explainer in explainers.values()]
Image.fromarray(figure(first))

# %%
# Is it where the evidence is?
# ----------------------------
# Enrichment is the density of the map inside the nodule. The chance level is 1, but a map of the center or of edges may exceed
# it: compare with these, not with 1.

for name, explainer in explainers.items():
    values = [enrichment(explainer.explain(scan.image, "nodule").heatmap("input"), scan.mask) for scan in scans]
    print(f"{name:15} {sum(values) / len(values):5.1f}")

# %%
# Does the model need these pixels?
# ---------------------------------
# Deletion removes 8 x 8 regions from the strongest to the weakest and returns the area under the curve of the probability. A
# faithful map lowers it early. The answer depends on what replaces the pixels, so there are two fills. Squares of the mean gray
# look like nodules to this model, so that with this fill even the controls seem better than Grad-CAM. Blurred squares do so less.

images = torch.cat([to_model_input(scan.image[None]) for scan in scans])
print("                 blur   mean")
for name, explainer in explainers.items():
    maps = [explainer.explain(scan.image, "nodule").heatmap("input", scale=None) for scan in scans]
    areas = []
    with scoring_scope(model, images, 1) as scorer:
        for fill in ("blur", "mean"):
            numbers = deletion(PerturbationTest(np.stack(maps), scorer, fill, region_size=8)).numbers
            areas.append(float(np.mean([number for number in numbers if number is not None])))
    print(f"{name:15} {areas[0]:5.2f}  {areas[1]:5.2f}")

# %%
# Does it depend on the class?
# ----------------------------
# A map that is the same for every class explains none of them. The rank correlation of the maps of two classes should be low.

for name, explainer in explainers.items():
    nodule, effusion = (part.heatmap("input", scale=None) for part in explainer.explain_classes(scans[0].image, [1, 2]))
    print(f"{name:15} {spearman(nodule, effusion):5.2f}")

# %%
# Does it depend on the weights?
# ------------------------------
# The randomization test replaces the weights by random ones, layer by layer from the output. A map that stays the same does not
# explain what the model has learned. A passed test is necessary, not sufficient: random maps pass it too.

for explainer in (GradCAM(model, "layer4"), METHODS["guidedbackprop"](model)):
    result = run_randomization_test(explainer, images, 1, seeds=(0, 1, 2), n_depths=3)
    print(result.summary)

# %%
# :doc:`/explanation/metrics` defines these metrics, and `camscope evaluate` computes them for a whole run, with intervals.
