"""Draw the maps of the words of an answer as one figure."""

from collections.abc import Sequence

from camscope import render
from camscope.errors import InputError
from camscope.explanation import Explanation


def draw_words(
    explanations: Sequence[Explanation], *, columns: int | None = None, height: int = 256
) -> render.RGBImage:
    """Draw the maps of an answer: one panel for each word, with the probability of the word given the words before it.

    Each panel has its own color scale. Panels without information, such as those of a zero gradient, have a flag.

    Args:
        explanations: The result of `explain_words`.
        columns: Panels in a row. Default: as many as leave few cells empty.
        height: Rows of a panel in pixels.

    Returns:
        (H,W,3) uint8.

    Raises:
        InputError: There is no explanation.

    >>> import numpy as np
    >>> words = [
    ...     Explanation(np.ones((2, 2)), "gradcam", None, word, -0.1, input_size=(2, 2), image=np.zeros((64, 64, 3), np.uint8))
    ...     for word in ("a", "cat")
    ... ]
    >>> draw_words(words).shape[2]
    3

    """
    if not explanations:
        raise InputError("draw_words expects the explanations of at least one word")
    return render.draw_image_grid(
        [explanation.overlay(height=height) for explanation in explanations],
        [explanation.label_and_score for explanation in explanations],
        columns=columns,
        height=height,
        flags=[explanation.warning_text for explanation in explanations],
    )
