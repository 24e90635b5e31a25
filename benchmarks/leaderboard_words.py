"""The prose of docs/evidence/leaderboard.md; {model/part/method/metric} is replaced by that number of its tables."""

PREFACE = """# Leaderboard: where the methods look, compared with bounding boxes

The images are photographs of ImageNet's validation set with bounding boxes of the objects. The target is the ground-truth
label. All methods use their default settings; if one runs fewer forward passes, the table gives the number. CAMs use the
layer that camscope chooses by default.

- The values are means over photographs, with 95 % intervals.
- **Bold**: better than the best control (uniform, center, edges, random). The test is paired by photograph, at 5 %, with a
  Bonferroni correction for all methods and metrics of the table.
- Seconds are for one photograph on one core of a shared machine.
- Boxes include background, so even a perfect map cannot reach the maximum score.
- A map that covers the object does not prove that the model used the object. For that, see the faithfulness metrics.

`python -m benchmarks.leaderboard` made this page on {processor}, torch {torch}.
`camscope evaluate` does the same with your images and boxes.
"""

CONCLUSIONS = """## What to conclude

Differences to Grad-CAM are paired by photograph. Their intervals are not corrected for multiple comparisons.

- **Compare with a baseline map first.** The objects of these photographs lie near the middle. A blob in the center has its
  peak in a box on {resnet18/all/center/pointing-game} of all photographs. Grad-CAM of ResNet-18 has
  {resnet18/all/gradcam/pointing-game}, which is not significantly more after correction. On the 21 photographs whose center
  lies in no box, the blob has {resnet18/off-center/center/pointing-game} and Grad-CAM
  {resnet18/off-center/gradcam/pointing-game}.
- **On ResNet-18, Grad-CAM does not beat the center significantly.** Its average precision is
  {resnet18/all/gradcam/average-precision}, that of the center {resnet18/all/center/average-precision}, with a correction for
  all methods and metrics. LayerCAM (difference to Grad-CAM {resnet18/all/layercam/gap}) and FullGrad
  ({resnet18/all/fullgrad/gap}) have more and do beat it.
- **Gradients at single pixels do not cover objects.** Saliency has an average precision of
  {resnet18/all/saliency/average-precision} and input x gradient of {resnet18/all/inputxgradient/average-precision}, less than
  the center. SmoothGrad, the mean over noise, has {resnet18/all/smoothgrad/average-precision}, which is not significantly
  more.
- **Metrics disagree.** Guided Grad-CAM has one of the highest enrichments on ResNet-18, {resnet18/all/guidedgradcam/enrichment}.
  Its average precision is {resnet18/all/guidedgradcam/average-precision} and its overlap (`iou-swept`)
  {resnet18/all/guidedgradcam/iou-swept}. Its strongest pixels lie in the boxes, but it leaves out most of their content.
- **A method that is good on one model may fail on another.** EigenCAM's average precision is
  {resnet18/all/eigencam/average-precision} on ResNet-18 and {deit_tiny/all/eigencam/average-precision} on DeiT-tiny, where a
  uniform map has {deit_tiny/all/uniform/average-precision}. On DeiT-tiny Chefer's method has the most,
  {deit_tiny/all/chefer/average-precision} (difference to Grad-CAM {deit_tiny/all/chefer/gap}). No method beats the center,
  {deit_tiny/all/center/average-precision}, significantly.
- **No slow method beats the center significantly** in average precision on the twenty photographs. The ten photographs cannot
  show such a difference, however large. The differences to Grad-CAM on the same photographs are, for ResNet-18 and DeiT-tiny:
  - RISE {resnet18/slowest/rise/gap} and {deit_tiny/slowest/rise/gap},
  - Score-CAM {resnet18/slowest/scorecam/gap} and {deit_tiny/slow/scorecam/gap},
  - Group-CAM {resnet18/slow/groupcam/gap} and {deit_tiny/slow/groupcam/gap}, the only gain of a slow method (on DeiT-tiny, at
    about twenty times the cost),
  - methods of segments or blocks, which have less: LIME {resnet18/slowest/lime/gap} and {deit_tiny/slowest/lime/gap}, occlusion
    {resnet18/slow/occlusion/gap} and {deit_tiny/slow/occlusion/gap},
  - gradients along paths, which have as little: integrated gradients {resnet18/slow/integratedgradients/gap} and
    {deit_tiny/slow/integratedgradients/gap}.
- **Twenty photographs show large differences only**, and ten show none after the correction for all methods. The average
  precision of Grad-CAM on the twenty is {resnet18/slow/gradcam/average-precision} and
  {deit_tiny/slow/gradcam/average-precision}. On the ten it is {resnet18/slowest/gradcam/average-precision} and
  {deit_tiny/slowest/gradcam/average-precision}.
"""

SAMPLED = """These photographs were sampled once from all. Grad-CAM and the controls are measured on the same ones. """
SLOW = {
    "slow": f"""{SAMPLED}Every method
runs the forward passes of its defaults.

""",
    "slowest": f"""{SAMPLED}Methods
that would take minutes per photograph run fewer forward passes than by default, or use bfloat16. The column of passes gives the
settings; with the defaults their maps are less noisy. Ten photographs are too few for a significant difference from the controls
after the correction for all methods, so read the intervals.

""",
}
