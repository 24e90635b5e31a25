"""A ready model from one string: the bundled one, torchvision, timm, Hugging Face, or your factory and checkpoint.

The model that ships with camscope.
"""

from torch import nn

from camscope.errors import ModelError
from camscope.images.preprocess import Preprocess
from camscope.model_card import ModelCard, attach_card
from camscope.models.checkpoint import RANDOM, Weights, described, load_strictly, read_state, same_numbers
from camscope.models.factory import factory_model
from camscope.models.huggingface import clip_model, huggingface_model
from camscope.models.torchvision_timm import timm_model, torchvision_model

__all__ = ["load_model", "load_strictly", "read_state"]


SOURCES = (
    "phantom, torchvision:NAME, timm:NAME, hf:ORG/NAME or hf:FOLDER, clip:…, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION"
)
LIBRARIES = {"torchvision": torchvision_model, "timm": timm_model, "hf": huggingface_model, "clip": clip_model}


def load_model(spec: str, *, weights: Weights = None) -> nn.Module:
    """A plain module in eval mode; what is known of it (preprocessing, categories, layer) is its `ModelCard`.

    `spec`: "phantom" (the bundled net), "torchvision:resnet50" or just "resnet50", "timm:vit_tiny_patch16_224",
        "hf:org/name" or "hf:/a/folder", "clip:org/name" (the image tower of CLIP or SigLIP, which answers `Similarity` and
        `Text`), "models.py:resnet18" or "package.module:resnet18". The last two are executed:
        name only code that you trust. The function is called without arguments and returns the module; see `factory`
        for what such a file may say of its models.
    `weights`: a checkpoint to load, strictly, in place of the published weights: safetensors, or a file of `torch.save`
        that holds nothing but tensors. A file with another number of classes sets the model's last layer, and the
        categories are then unknown. "random": no training at all, the same numbers every time.

    Errors: ModelError for what is not there or no model, WeightsError for weights that cannot be had, read or fitted,
    MissingExtraError for timm and transformers.
    """
    model, card = _loaded(spec, weights)
    attach_card(model.eval(), card)
    return model


def nameless(source: str) -> str:
    """What loads a model, as a card says it, without the names of its files: those have digests.

    >>> nameless("hospital/net_of_ward_3.py:densenet, weights=ward_3.pt")
    'densenet, with weights'
    """
    spec, several, _ = source.partition(", weights=")
    library, colon, name = spec.partition(":")
    known = colon and library in LIBRARIES and not name.startswith(("/", ".", "~"))
    bare = spec if known or not colon else library if library in LIBRARIES else spec.rpartition(":")[2]
    return f"{bare}, with weights" if several else bare


def _loaded(spec: str, weights: Weights) -> tuple[nn.Module, ModelCard]:
    if not isinstance(spec, str) or not spec:
        raise ModelError(f"the model is {spec!r}; expected one of {SOURCES}")
    if spec == "phantom":
        return phantom_model(weights)
    library, colon, name = spec.partition(":")
    if colon and library in LIBRARIES:
        return LIBRARIES[library](name, weights)
    if colon:
        return factory_model(spec, weights)
    if spec.endswith(".py"):
        raise ModelError(f"{spec} is a file; say which function in it makes the model: {spec}:FUNCTION")
    if spec.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")):
        raise ModelError(
            f"{spec} holds weights, not their architecture; name that, and pass weights={spec!r} beside it"
        )
    try:
        return torchvision_model(spec, weights)
    except ModelError as error:
        raise ModelError(f"{error}; a model is one of {SOURCES}") from error.__cause__


def phantom_model(weights: Weights) -> tuple[nn.Module, ModelCard]:
    """PhantomNet, trained on `camscope.phantom`'s own images; nothing is fetched."""
    from camscope.phantom import CATEGORIES, PREPROCESSING, PhantomNet, load_phantom_net

    with same_numbers():
        model = load_phantom_net() if weights is None else PhantomNet()
    if weights is not None and weights != RANDOM:
        load_strictly(model, read_state(weights), weights)
    size, mean, std = PREPROCESSING
    way = Preprocess(resize=(size, size), mean=(mean,), std=(std,), channels=1)
    categories = None if weights == RANDOM else tuple(CATEGORIES)
    return model, ModelCard(described("phantom", weights), way, categories, "layer4")
