"""What docs/leaderboard.md says in words; {model/part/method/metric} is that number of its tables."""

PREFACE = """# Leaderboard: where the methods look, against boxes

Photographs of ImageNet's validation set with the objects' boxes, each asked for its label; methods with their settings as
they come (where they have fewer passes, the table says how many), CAMs at the layer that camscope_version chooses. Means with
intervals (95 %) over photographs; **bold**: better than the best control (uniform, centre, edges, random), paired by
photograph, at 5 %, corrected for all methods and metrics of the table (Bonferroni). Seconds are those of one core, on a
machine with other work, for a photograph.
A box holds background too, so no map reaches the end of a scale;
and a map that lies on the object is not thereby what the model used: for that, see the faithfulness metrics. Made by
`python -m benchmarks.leaderboard` on {processor}, torch {torch}; `camscope evaluate` does the same with your own images
and boxes.
"""

CONCLUSIONS = """## What to conclude

Differences to Grad-CAM are of the same photographs, each for itself: their intervals are not corrected for how many there are.

- First compare with a map that knows nothing. The objects of these photographs lie near the middle: a blob in the centre has its
  peak in a box on {resnet18/all/centre/pointing-game} of all photographs. Grad-CAM of ResNet-18 has
  {resnet18/all/gradcam/pointing-game}, which is not shown to be more after correction; on the 21 whose centre lies in
  no box, the blob has {resnet18/off-centre/centre/pointing-game} and Grad-CAM {resnet18/off-centre/gradcam/pointing-game}.
- On ResNet-18 Grad-CAM's average precision, {resnet18/all/gradcam/average-precision}, is not shown to be better than that of
  the centre, {resnet18/all/centre/average-precision}, once all methods and metrics are corrected for. LayerCAM (difference to
  Grad-CAM {resnet18/all/layercam/gap}) and FullGrad ({resnet18/all/fullgrad/gap}) have more, and are.
- Gradients at single pixels do not cover objects: saliency has an average precision of {resnet18/all/saliency/average-precision},
  input x gradient of {resnet18/all/inputxgradient/average-precision}, less than the centre. The mean over noise, SmoothGrad, has
  {resnet18/all/smoothgrad/average-precision}, which is not shown to be more.
- Metrics disagree. Guided Grad-CAM has one of ResNet-18's highest enrichments, {resnet18/all/guidedgradcam/enrichment}, and an
  average precision of {resnet18/all/guidedgradcam/average-precision}, with an overlap (`iou-swept`) of
  {resnet18/all/guidedgradcam/iou-swept}: its strongest pixels lie in the boxes, and most of what is in them it leaves out.
- What is good on one model need not be on another. EigenCAM's average precision is {resnet18/all/eigencam/average-precision} on
  ResNet-18 and {deit_tiny/all/eigencam/average-precision} on DeiT-tiny, where a map without any shape has
  {deit_tiny/all/uniform/average-precision}. There Chefer's method has the most, {deit_tiny/all/chefer/average-precision}
  (difference to Grad-CAM {deit_tiny/all/chefer/gap}), and no method is shown to be better than the centre,
  {deit_tiny/all/centre/average-precision}.
- None of the slow methods is shown to have a better average precision than the centre on the twenty photographs; the ten can show
  no such difference, however large. Beside Grad-CAM on the same photographs
  RISE has {resnet18/slowest/rise/gap} on ResNet-18 and {deit_tiny/slowest/rise/gap} on DeiT-tiny, Score-CAM
  {resnet18/slowest/scorecam/gap} and {deit_tiny/slow/scorecam/gap}, Group-CAM {resnet18/slow/groupcam/gap} and
  {deit_tiny/slow/groupcam/gap}: of all the slow ones Group-CAM alone gains something, on DeiT-tiny, at some twenty
  times the price. What is drawn of segments or of blocks has less (LIME {resnet18/slowest/lime/gap} and
  {deit_tiny/slowest/lime/gap}, occlusion {resnet18/slow/occlusion/gap} and {deit_tiny/slow/occlusion/gap}), and gradients along
  paths have as little (integrated gradients {resnet18/slow/integratedgradients/gap} and
  {deit_tiny/slow/integratedgradients/gap}).
- Twenty photographs tell large differences only, and ten none after the correction for so many methods: Grad-CAM's own average
  precision on the twenty is {resnet18/slow/gradcam/average-precision} and {deit_tiny/slow/gradcam/average-precision}, on the ten
  {resnet18/slowest/gradcam/average-precision} and {deit_tiny/slowest/gradcam/average-precision}.
"""

DRAWN = """Drawn once from all; Grad-CAM and the controls are measured on the same ones. """
SLOW = {
    "slow": f"""{DRAWN}Every method has the passes of its defaults.

""",
    "slowest": f"""{DRAWN}Those that would take minutes a photograph have fewer
passes than they come with, or bfloat16, and the column of passes says so: with more their maps are less noisy. Ten photographs
are too few for any difference from the controls to be beyond chance once it is corrected for so many methods: read the intervals.

""",
}
