"""What is asked of an image, in the scene of that image: its places, and what the model makes of others."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.cards import card_of
from camscope.errors import TargetError
from camscope.explainers.inputs import Companions, Item
from camscope.explainers.method import Method
from camscope.explainers.scope import asking, survey
from camscope.hooks.base import unwrap
from camscope.targets import Question, Scene, Target, embedding_of


def asked_of(tool: Method, targets: Sequence[Question], items: Sequence[Item], companions: Companions) -> Question:
    """What is asked of several inputs, each question in the scene of its own image; one where all are the same."""
    seen = [
        target.in_scene(_scene(tool, item, companions.of([i], len(items)))) if isinstance(target, Target) else target
        for i, (target, item) in enumerate(zip(targets, items, strict=True))
    ]
    return seen[0] if all(one is seen[0] for one in seen) else cast(Question, seen)


def _scene(tool: Method, item: Item, companions: Companions) -> Scene:
    place = item.placement
    card = card_of(unwrap(tool.model))
    return Scene(
        input_size=tuple(item.x.shape[1:]),
        image_size=place.image_size if place else None,
        to_input=place.to_input if place else _unplaced,
        to_image=place.to_image if place else _unplaced,
        embed=partial(_embedded, tool, companions=companions),
        embed_text=card.embed_text if card else None,
    )


def _embedded(tool: Method, image: Any, companions: Companions) -> Tensor:
    """(D,): what the model makes of another image, beside the same companions."""
    with asking(survey(tool.model), tool, tool.read(image).x[None], companions) as asked:
        return embedding_of(asked.score().forward(asked.x))[0].detach()


def _unplaced(points: ArrayLike) -> NDArray[Any]:
    raise TargetError("the preprocessing has no known geometry: a place on the image cannot be found on the input")
