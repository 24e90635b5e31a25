"""Where another toolkit's map differs from camscope's: what it does, which is right, and the proof. Each is a row in the docs.

`selection` makes camscope's map with that toolkit's choice in place of its own (None: there is nothing to reproduce). What
shows only in a situation of its own has a `situation` of `benchmarks.situations` instead of the usual photographs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.by_torchcam import absolute_noise
from benchmarks.cases import Case
from benchmarks.choices_fullgrad import channel_by_channel
from benchmarks.choices_refine import at_the_input, stretched_once
from benchmarks.tool import setting


@dataclass(frozen=True)
class Deviation:
    """Of one toolkit in one method."""

    method: str
    peer: str
    does: str
    right: str
    choice: Callable[[Case], Tensor] | None = None
    situation: str = ""

    @property
    def work(self) -> str:
        """Its name among the figures."""
        return f"{self.method}, {self.situation}" if self.situation else self.method


def chosen(name: str, module: str = "choices", **settings: Callable[[Case], object]) -> Callable[[Case], Tensor]:
    """The maps of a class in `choices`; `settings`: its attributes, each read off the case."""

    def maps(case: Case) -> Tensor:
        from importlib import import_module

        cls = getattr(import_module(f"benchmarks.{module}"), name)
        explainer = cls(case.model, case.layer)
        for attribute, read in settings.items():
            setattr(explainer, attribute, read(case))
        found: Tensor = explainer.attribute(case.x, case.classes)
        return found

    return maps


def of(method: str, name: str, default: object) -> Callable[[Case], object]:
    """What camscope's method has for a setting."""
    return lambda case: setting(case, method, name, default)


DEVIATIONS = [
    Deviation(
        "gradcam++",
        "torchcam",
        "loses its denominator: g² is divided in a discarded copy, so α = g² and the weight of a channel is Σ g² relu(g).",
        "camscope. The paper's α is g² / (2 g² + g³ ΣA). (What torchcam would divide by is 2 g² + Σ g³A, which is not the "
        "paper's either.)",
        chosen("NoDenominator"),
    ),
    Deviation(
        "gradcam++",
        "grad-cam",
        "adds 1e-6 to 2 g² + g³ ΣA.",
        "camscope. Behind a global pooling g is about 1e-3, so its square is no larger than the 1e-6 that should be "
        "negligible. Channels with small gradients lose weight, and rescaling the logit changes the map.",
        chosen("AbsoluteEpsilon"),
    ),
    Deviation(
        "smoothgradcam++",
        "torchcam",
        "samples new noise at each call, takes relu(g) and A from the last noisy input, and has g³ inside the sum.",
        "camscope. The averages define the method, and the map is that of the image, not of its last noisy copy. "
        "The seed is an argument, so the same call gives the same map.",
        chosen("LastNoisyPass", n_samples=of("smoothgradcam++", "n_samples", 25), std=absolute_noise),
    ),
    Deviation(
        "finercam",
        "grad-cam",
        "weighs the similar classes by their probabilities and differentiates these weights too.",
        "Both. This is the authors' default. The plain mean is the definition in their abstract, and torchcam uses it. It is "
        "linear in the logits, so the map is a difference of two Grad-CAMs before the ReLU.",
        chosen("Likely", gamma=of("finercam", "gamma", 0.6), references=of("finercam", "n_references", 3)),
    ),
    Deviation(
        "eigencam",
        "grad-cam",
        "subtracts each channel's mean before the decomposition and keeps the sign that the solver returns.",
        "camscope. The paper decomposes the activations themselves. A centered map has a mean of zero and an arbitrary "
        "sign. After the ReLU either the object or its background remains, depending on the linear algebra library.",
        chosen("Centered"),
    ),
    Deviation(
        "eigengradcam",
        "grad-cam",
        "subtracts each channel's mean before the decomposition and keeps the sign that the solver returns.",
        "Neither: there is no paper. camscope decomposes gradient times activation as Eigen-CAM does, with the sign that "
        "agrees with HiResCAM.",
        chosen("CenteredProducts"),
    ),
    Deviation(
        "kpcacam",
        "grad-cam",
        "gives the component the sign with which its largest cell is positive.",
        "Both: the sign of a centered component is arbitrary. camscope's is positive where the layer is most active, so a "
        "single outlier, such as one token of a transformer, does not invert the map.",
        chosen("LargestPositive"),
    ),
    Deviation(
        "fem",
        "grad-cam",
        "sums the activations, each channel weighted by the share of its cells beyond the threshold.",
        "camscope. The method marks the cells beyond the threshold and weights each channel by its mean activation; other "
        "implementations (Xplique) agree.",
        chosen("ShareBeyond"),
    ),
    Deviation(
        "scorecam",
        "grad-cam",
        "enlarges the masks with align_corners=True.",
        "camscope. A cell is an area, not a point: with aligned corners, a 7 x 7 mask moves by up to half a cell, 16 of "
        "224 pixels, towards the border. The authors' code has align_corners=False.",
        chosen("CornersAligned", "choices_score"),
    ),
    Deviation(
        "scorecam",
        "torchcam",
        "stretches a mask to 0..1 before it enlarges it.",
        "camscope. The paper (eq. 7 and 8) enlarges first: interpolation lowers a peak, so a mask stretched before does "
        "not reach 1 on the image.",
        chosen("StretchedFirst", "choices_score"),
    ),
    Deviation(
        "sscam",
        "torchcam",
        "samples new noise for each channel at each call, on masks stretched before they are enlarged.",
        "camscope. With separate noise, channels differ by chance as well as by content. The seed is an "
        "argument, so the same call gives the same map. (Measured with camscope's standard deviation of 0.5. torchcam's "
        "default is 2, where the masks are mostly noise.)",
        chosen("NoiseEach", "choices_score", rounds=of("sscam", "n_samples", 35), std=of("sscam", "sigma", 2.0)),
    ),
    Deviation(
        "iscam",
        "torchcam",
        "sums the steps, so masks are multiplied by 1/n, 3/n, 6/n … up to (n + 1)/2.",
        "camscope. Integration from an empty mask to the full one ends at 1, as in the authors' prototype. Beyond 1 the "
        "image is overexposed.",
        chosen("AddedUp", "choices_score", rounds=of("iscam", "n_samples", 10)),
    ),
    Deviation(
        "fullgrad",
        "grad-cam",
        "stretches every channel of every layer to 0..1 separately.",
        "camscope. The paper scales a layer as a whole. With separate scaling, a channel without evidence counts as much as "
        "the strongest.",
        channel_by_channel,
    ),
    Deviation(
        "refinecam",
        "grad-cam",
        "multiplies at the input's size, and its Grad-CAM++ adds the 1e-6 described above.",
        "Both, except for the 1e-6: the authors' code also multiplies at the input's size. camscope multiplies on the grid of "
        "the finest layer, which has all the information, and leaves the last enlargement to display.",
        at_the_input,
    ),
    Deviation(
        "refinecam",
        "torchcam",
        "does not stretch a map again once it is enlarged, and its Grad-CAM++ has no denominator.",
        "camscope, as the authors' code: enlarging lowers a peak, so a map stretched before does not reach 1.",
        stretched_once,
    ),
    Deviation(
        "randomcam",
        "grad-cam",
        "samples new weights at each call.",
        "Both: a control. camscope's has a seed, so a comparison can be repeated.",
    ),
    Deviation(
        "dff",
        "grad-cam",
        "subtracts each channel's minimum and starts from other random factors.",
        "Both: a non-negative factorization is not unique, and its components have no fixed order.",
    ),
    Deviation(
        "ablationcam",
        "grad-cam",
        "divides the weights by the score, and does so where that is negative.",
        "camscope. For a class with a negative logit the division inverts the sign: positive evidence is dropped "
        "and negative evidence shown. Without the division the map is the paper's wherever the score is positive.",
        chosen("OverTheScore"),
        situation="a class with a negative score",
    ),
    Deviation(
        "gradcam",
        "grad-cam",
        "keeps the layer's output without copying it, and the gradient from before the ReLU that overwrites it.",
        "camscope: the map is of the value that left the named layer. grad-cam multiplies the activation after the ReLU "
        "by the gradient before it, a pair that no layer has.",
        situation="an in-place ReLU behind the layer",
    ),
    Deviation(
        "gradcam",
        "torchcam",
        "keeps the layer's output without copying it: activation and gradient are those after the in-place ReLU.",
        "camscope: the map is of the value that left the named layer. torchcam's is a proper Grad-CAM, of the next layer.",
        situation="an in-place ReLU behind the layer",
    ),
    Deviation(
        "gradcam",
        "grad-cam",
        "stretches each layer's map from its minimum to its maximum before it takes their mean.",
        "camscope divides by the maximum. Subtracting the minimum turns the least evidence into zero, by a different amount "
        "in each layer.",
        situation="three layers as one map",
    ),
]
