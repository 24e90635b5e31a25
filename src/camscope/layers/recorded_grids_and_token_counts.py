"""Hints about layouts that a forward pass gives: the grids of maps, and the concatenations and lengths of token sequences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from camscope.hooks.intercept_torch_functions import BaseFunctionMode
from camscope.layers.layout import Grid, build_ambiguous_layout_error
from camscope.plurals import plural


@dataclass
class LayoutHints:
    """Hints about layouts from a forward pass: the grids of the model's maps, and the lengths of concatenated tokens.

    `image_token_positions` says for a vision-language model at which positions of the input ids the image tokens are.
    Its keys are sequence lengths.
    """

    grids: set[Grid] = field(default_factory=set)
    concat_lengths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    works_on_last_axis: bool = False  # whether a LayerNorm or a Linear had an input of more axes than (N,K)
    image_token_positions: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    sequence_lengths: set[int] = field(default_factory=set)  # of the inputs of LayerNorms and Linears
    text_lengths: set[int] = field(default_factory=set)  # numbers of text tokens of a language model
    query_counts: set[int] | None = None  # of the model, once they are known
    is_vision_language: bool | None = None  # whether the model is one, once this is known

    def count_tokens_before_image(self, n_tokens: int, n_cells: int) -> int | None:
        """Return the number of tokens before the image tokens, or None for an unknown number.
        Raise LayerError if several numbers are possible.
        """
        starts = list(self._iter_piece_starts(n_tokens, n_cells))
        if len(starts) > 1:
            raise build_ambiguous_layout_error(
                f"{plural(n_tokens, 'token was', 'tokens were')} concatenated from several parts of length {n_cells}, "
                f"which start at {' and '.join(map(str, starts))}: each may be the image"
            )
        return starts[0] if starts else None

    def _iter_piece_starts(self, n_tokens: int, n_cells: int) -> Iterator[int]:
        """Yield where pieces of `n_cells` tokens start in a concatenation of `n_tokens` tokens."""
        start = 0
        for piece in self.concat_lengths.get(n_tokens, ()):
            if piece == n_cells:
                yield start
            elif piece < n_tokens:
                yield from (start + inside for inside in self._iter_piece_starts(piece, n_cells))
            start += piece


NO_HINTS = LayoutHints()
CONCAT_FUNCTIONS = (torch.cat, torch.concat, torch.concatenate)


class ConcatRecorder(BaseFunctionMode):
    """A function mode that records concatenations of tokens (N,T,K): the lengths of the pieces."""

    def __init__(self, piece_lengths: dict[int, tuple[int, ...]]) -> None:
        super().__init__()
        self._piece_lengths = piece_lengths

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. If the function concatenates tokens, record the lengths of the parts."""
        result = func(*args, **kwargs)
        if func in CONCAT_FUNCTIONS and isinstance(result, Tensor) and result.ndim == 3:
            axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
            if axis in (1, -2):
                parts = args[0] if args else kwargs["tensors"]
                self._piece_lengths[result.shape[1]] = tuple(part.shape[1] for part in parts)
        return result
