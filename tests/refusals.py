"""Where a method has no map by its own definition: the axioms expect this error there, and a map everywhere else."""

from camscope.errors import CamscopeError, InputError, LayerError, ModelError, TargetError
from camscope.explainers import METHODS
from tests.nets import CASES, Case

CALLABLE, PLAIN, LINEAR = "a callable target", "plain", "linear"

NOT_LINEAR = (ModelError, r"not 'head' of the mean or sum of layer '\w+': an operation between them is not linear")

ATTENTION = ("rollout", "gradrollout", "chefer", "legrad", "gradeclip")
NO_ATTENTION = (LayerError, "no self-attention ran in the forward pass: this method requires a transformer")

RECTIFIED = ("guidedbackprop", "deconvnet", "guidedgradcam")
NO_RELU = (
    ModelError,
    r"\w+ changes the backward pass of ReLUs, but no ReLU can be reached in this model\. These operations were found: ",
)
NO_RULE = (ModelError, r"lrp has no rule for these operations of \w+: .*layer_norm \(1 x\)")

# (method, a case of `nets`, or what else is asked of it) -> the error, and what it says
REFUSED: dict[tuple[str, str], tuple[type[CamscopeError], str]] = {
    # the head reads each cell by itself: no row of it is as long as the layer has channels
    ("cam", "flat"): (
        ModelError,
        r"no Linear or 1x1 convolution maps the 6 channels of layer 'features\.4' to 3 classes",
    ),
    ("cam", "residual"): NOT_LINEAR,  # += and a ReLU behind the layer
    ("cam", "tokens"): NOT_LINEAR,  # attention behind the layer, and a mean that counts the prefix token
    ("cam", PLAIN): (ModelError, "no Linear or 1x1 convolution maps the 6 channels of layer 'middle' to 3 classes"),
    ("cam", CALLABLE): (
        TargetError,
        "cam uses the classifier weights of a class, and a callable target has no class: pass a class",
    ),
    **{(method, case): NO_ATTENTION for method in ATTENTION for case in (*CASES, PLAIN) if case != "tokens"},
    **{("xrai", case): (InputError, "xrai segments images") for case in ("signal", "volume")},
    **{(method, case): NO_RELU for method in RECTIFIED for case in ("tokens", "channels last", PLAIN, LINEAR)},
    ("excitationbackprop", "tokens"): (
        ModelError,
        r"excitationbackprop has no rule for some operations between the layer and the score: \w+ x \d",  # of attention
    ),
    ("lrp", "tokens"): NO_RULE,
    ("lrp", "channels last"): NO_RULE,
    ("finercam", CALLABLE): (
        TargetError,
        "finercam compares a class with the other classes, but the target is a difference or a callable: pass a class",
    ),
}
REFUSED = {asked: said for asked, said in REFUSED.items() if asked[0] in METHODS}  # some are there with an extra only


def answers(method: str, case: str) -> bool:
    """Whether the method has a map there."""
    return (method, case) not in REFUSED


def residual_or_plainer(method: str) -> Case:
    """The net that rewrites most in place, or where the method has no map there, the plainest, or one with attention."""
    return first_answered(method, "residual", "pooled", "tokens")


def first_answered(method: str, *cases: str) -> Case:
    """The first of the nets for which the method has a map."""
    return CASES[next(case for case in cases if answers(method, case))]
