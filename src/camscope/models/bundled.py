"""The model that ships with camscope."""

from torch import nn

from camscope.cards import ModelCard
from camscope.images.preprocess import Preprocess
from camscope.models.checkpoint import RANDOM, Weights, described, load_strictly, read_state, same_numbers


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
