"""Test a given layout by forward passes with noise: does each cell of a layer react to its own part of the input?

The shape of an output does not show where each token lies: 64 tokens of a text have the shape of an 8 x 8 grid of
patches. So the model runs three more times, each time with noise in another random third of the input's cells. The
token of a cell changes most in the run with noise in this cell. Changes that all tokens share are subtracted, and each
token is compared only with itself.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from camscope.errors import LayerError, Remedy
from camscope.hooks.find_layers import find_layer, unwrap
from camscope.hooks.restore_buffers_and_rng import all_rng_restored
from camscope.hooks.run_without_hooks import hooks_muted
from camscope.hooks.thread_local_evaluation_mode import evaluation_mode
from camscope.hooks.thread_local_hooks import Hooks, autocast_uncached, thread_local_hook
from camscope.layers.judge_layout_from_noise_reactions import (
    N_RUNS,
    LayoutProbeResult,
    LayoutVerdict,
    draw_noise_pattern,
    judge_layout,
    upsample_nearest,
)
from camscope.layers.layout import CHANNELS_FIRST, TOKENS, Layout
from camscope.pytree import find_main_tensor

MAX_TOKENS_WITHOUT_BLOCKS = 64**2  # more of them are replaced in blocks, as the cells of maps
MAX_CELLS_WITHOUT_BLOCKS = 8  # along an axis of a map; of a finer one, blocks of cells are replaced together
BLOCKS_PER_AXIS = {1: 16, 2: 4, 3: 3}
ROUNDING_TOLERANCE = 1e-5  # of the largest distance between two runs
ForwardFunction = Callable[[Tensor], object]
OutputReader = Callable[[ForwardFunction, Tensor], "list[Tensor | None]"]


@dataclass(frozen=True)
class OutputLocation:
    """Which output to test: the output of one call of a layer. `output_index` is described in `find_main_tensor`."""

    layer: str
    output_index: str | int | None = None
    call_index: int | None = None


ResultKey = tuple[OutputLocation, tuple[int, ...], str]  # the location, the size of the input, and the layout
_results_by_model: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # by model, by layer: a dict[ResultKey, LayoutProbeResult]
_lock = threading.RLock()


def get_cached_layout_result(
    model: nn.Module, location: OutputLocation, size: Sequence[int], layout: Layout
) -> LayoutProbeResult | None:
    """Return the cached test result for a layer, a layout and an input size. Return None if there is no such result."""
    with _lock:
        return _get_results_cached_for_layer(model, location).get((location, tuple(size), str(layout)))


def has_cached_layout_result(model: nn.Module, location: OutputLocation, size: Sequence[int]) -> bool:
    """Return whether the cache has a test result for a layer at this input size, for any layout."""
    with _lock:
        requested = location.output_index, tuple(size)
        return any(
            (place.output_index, key_size) == requested
            for place, key_size, _ in _get_results_cached_for_layer(model, location)
        )


def cache_layout_result(
    model: nn.Module, location: OutputLocation, size: Sequence[int], layout: Layout, result: LayoutProbeResult
) -> None:
    """Cache the result of a layer's layout test. The cache lasts until the model or the layer is deleted."""
    with _lock:
        _get_results_cached_for_layer(model, location)[location, tuple(size), str(layout)] = result


def _get_results_cached_for_layer(model: nn.Module, location: OutputLocation) -> dict[ResultKey, LayoutProbeResult]:
    """Return the dict in which the test results of a layer are cached. For a new layer, create the dict."""
    by_layer: WeakIdKeyDictionary = _results_by_model.setdefault(unwrap(model), WeakIdKeyDictionary())
    results: dict[ResultKey, LayoutProbeResult] = by_layer.setdefault(find_layer(model, location.layer)[1], {})
    return results


@contextmanager
def forward_without_side_effects(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the model in eval mode inside the `with`, without hooks and gradients. The random state does not change."""
    with (
        hooks_muted(model),
        all_rng_restored([device]),
        torch.inference_mode(False),
        torch.no_grad(),
        autocast_uncached(),
        evaluation_mode(unwrap(model)),
    ):
        yield


def probe_layout(
    model: nn.Module,
    locations: Sequence[OutputLocation],
    layout: Layout,
    x: Tensor,
    forward: ForwardFunction,
    *,
    read_outputs: OutputReader | None = None,
    input_shares: Sequence[float] | None = None,
    misplaced_layers: Collection[str] = (),
) -> list[LayoutProbeResult]:
    """Test with noise whether several layer outputs have the given layout. This takes three forward passes in all.

    The passes have no side effects, and cached results are reused. `read_outputs(run, x)` extracts outputs that are not
    those of layers. `input_shares` is for a model that pads its input: the share of each axis that the input covers.
    For `misplaced_layers` the result is never "verified", because their cells are known to be misplaced.
    """

    def get_cached_results() -> list[LayoutProbeResult | None]:
        return [get_cached_layout_result(model, location, x.shape[1:], layout) for location in locations]

    if None in get_cached_results():
        # one thread at a time: the next one finds this one's results
        with forward_without_side_effects(model, x.device):
            unknown = [
                location for location, result in zip(locations, get_cached_results(), strict=True) if result is None
            ]
            read = read_outputs or partial(_read_layer_outputs, model, unknown)
            results = probe_output_layouts(read, layout, x, forward, input_shares=input_shares) if unknown else []
            results = results or [LayoutProbeResult(LayoutVerdict.UNDECIDED)] * len(unknown)
            for location, result in zip(unknown, results, strict=True):
                if location.layer in misplaced_layers:
                    result = _lower_verdict_of_misplaced_layer(result)
                cache_layout_result(model, location, x.shape[1:], layout, result)
    return [result for result in get_cached_results() if result is not None]


def _lower_verdict_of_misplaced_layer(result: LayoutProbeResult) -> LayoutProbeResult:
    """Lower the layout verdict of a layer with misplaced cells to UNDECIDED.
    Keep the verdict CONTRADICTED, and only add the reason.
    """
    if result.verdict is LayoutVerdict.CONTRADICTED:
        cause = (
            "the model crops, pads or shifts its maps: apply that to the image first, and explain the rest of the model"
        )
        return LayoutProbeResult(result.verdict, f"{result.reason} ({cause})")
    return LayoutProbeResult(LayoutVerdict.UNDECIDED)


def probe_output_layouts(
    read_outputs: OutputReader,
    layout: Layout,
    x: Tensor,
    forward: ForwardFunction,
    *,
    input_shares: Sequence[float] | None = None,
) -> list[LayoutProbeResult]:
    """Test with noise whether the tensors from `read_outputs` have the given layout. Return [] if the model fails on noise."""
    blocks = _count_blocks_per_axis(layout)
    with torch._C.DisableTorchFunction():  # thousands of small calls, none of them the model's
        labels = draw_noise_pattern(blocks, seed=0)
    cells_of_pixels = [
        (torch.arange(pixels, device="cpu") * (cells * share / pixels)).long().clamp(max=cells - 1)
        for cells, pixels, share in zip(layout.grid, x.shape[2:], input_shares or [1.0] * (x.ndim - 2), strict=True)
    ]
    run_of_pixel = upsample_nearest(labels.view(blocks), layout.grid)
    # some cells may lie over padding, or be finer than pixels
    covered = torch.zeros(layout.grid, dtype=torch.bool, device="cpu")
    covered[torch.meshgrid(*cells_of_pixels, indexing="ij")] = True
    for axis, cells in enumerate(cells_of_pixels):
        run_of_pixel = run_of_pixel.index_select(axis, cells)
    outputs: list[list[Tensor | None]] = []
    for inputs in (x[:1], x) if len(x) > 1 else (x,):  # one sample is enough, if the model takes one
        try:
            variants = _iter_noise_variants(inputs, run_of_pixel, cells_of_pixels, layout.grid)
            outputs = [read_outputs(forward, variant) for variant in variants]
            break
        except Exception:  # noqa: S112 - the model may not accept such a batch
            continue
    return [
        _judge_layout_of_outputs(tensors, layout, labels, blocks, covered.flatten())
        for tensors in zip(*outputs, strict=True)
    ]


def _read_layer_outputs(
    model: nn.Module, locations: Sequence[OutputLocation], forward: ForwardFunction, x: Tensor
) -> list[Tensor | None]:
    """Run one forward pass. Return the output at each location, or None where the layer did not run."""
    calls: list[list[Tensor]] = [[] for _ in locations]

    def store_output(number: int, module: nn.Module, args: object, output: object) -> None:
        tensor = find_main_tensor(locations[number].layer, output, locations[number].output_index)[1]
        calls[number].append(tensor.detach().clone())

    with Hooks() as hooks:
        for number, location in enumerate(locations):
            module = find_layer(model, location.layer)[1]
            hooks.add_handle(module.register_forward_hook(thread_local_hook(partial(store_output, number))))
        try:
            forward(x)
        except Exception:
            if not all(calls):  # what follows the layers does not matter
                raise
    indices = [location.call_index for location in locations]
    return [
        outputs[-1 if index is None else index] if len(outputs) > (index or 0) else None
        for outputs, index in zip(calls, indices, strict=True)
    ]


def _count_blocks_per_axis(layout: Layout) -> tuple[int, ...]:
    """Return the number of blocks along each axis of the grid. Noise replaces whole blocks of cells."""
    grid = layout.grid
    if layout.kind == TOKENS and math.prod(grid) <= MAX_TOKENS_WITHOUT_BLOCKS:
        return tuple(grid)
    return tuple(
        cells if cells <= MAX_CELLS_WITHOUT_BLOCKS and len(grid) < 3 else min(cells, BLOCKS_PER_AXIS.get(len(grid), 2))
        for cells in grid
    )


def _iter_noise_variants(
    x: Tensor, run_of_pixel: Tensor, cells_of_pixels: Sequence[Tensor], grid: Sequence[int]
) -> Iterator[Tensor]:
    """Yield three noisy copies of x (N,C,*S). In each copy, noise replaces a different third of the cells."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    values = x.detach().float()

    def draw_noise(shape: Sequence[int]) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(values)

    space = tuple(range(2, x.ndim))
    low, high = values.amin(space, keepdim=True), values.amax(space, keepdim=True)
    fine, coarse = draw_noise(x.shape), draw_noise((*x.shape[:2], *grid))
    for axis, cells in enumerate(cells_of_pixels, start=2):
        coarse = coarse.index_select(axis, cells.to(x.device))
    uniform = bool((low == high).all())
    span = torch.where(high > low, high - low, high.abs().clamp(min=1) if uniform else 0)
    noise = low + span * (fine + coarse) / 2
    if uniform:  # a uniform input: noise instead of noise
        values = low + span * draw_noise(x.shape)
    for number in range(N_RUNS):
        yield torch.where(run_of_pixel.to(x.device) == number, noise, values).to(x.dtype)


def _flatten_positions(output: Tensor, layout: Layout) -> Tensor | None:
    """Flatten the positions of an output to (N,T,K). Return None if the shape of the output does not have this layout."""
    grid = tuple(layout.grid)
    if layout.kind == TOKENS:
        fits = output.ndim == 3 and output.shape[1] >= layout.prefix + math.prod(grid)
        return layout.order_tokens(output) if fits else None
    if layout.kind == CHANNELS_FIRST:
        return output.flatten(2).mT if tuple(output.shape[2:]) == grid else None
    return output.flatten(1, -2) if tuple(output.shape[1:-1]) == grid else None


def _judge_layout_of_outputs(
    outputs: Sequence[Tensor | None], layout: Layout, labels: Tensor, blocks: Sequence[int], covered: Tensor
) -> LayoutProbeResult:
    """Judge a layout by the outputs (one per noisy run) of a layer. Missing outputs leave it undecided."""
    rows = [None if output is None else _flatten_positions(output, layout) for output in outputs]
    usable = [row.float() if row.dtype != torch.float64 else row for row in rows if row is not None]
    if len(usable) < N_RUNS or len({row.shape for row in usable}) > 1:
        return LayoutProbeResult(LayoutVerdict.UNDECIDED)
    # [p]: how far the two runs are apart that leave the cells of run p as they are
    distances = torch.stack(
        [_compute_output_change_per_position(usable[p - 1] - usable[p - 2], layout) for p in range(N_RUNS)]
    ).cpu()
    if not bool(distances.isfinite().all()):
        return LayoutProbeResult(LayoutVerdict.UNDECIDED)
    return judge_layout(distances, layout, labels, blocks, covered)


def _compute_output_change_per_position(difference: Tensor, layout: Layout) -> Tensor:
    """Return how far the outputs of two runs are apart at each position (T,), from their difference (N,T,K)."""
    start = layout.prefix if layout.kind == TOKENS else 0
    common = difference[:, start : start + math.prod(layout.grid)].mean(1, keepdim=True)
    distance = (difference - common).norm(dim=-1)
    scale = difference.norm(dim=-1).amax()  # what is left of equal numbers is rounding
    return torch.where(distance > ROUNDING_TOLERANCE * scale, distance, 0).double().mean(0)


def build_contradicted_layout_error(name: str, layout: Layout, reason: str) -> LayerError:
    """Build the error for a layer if the noise test contradicts its layout."""
    return LayerError(
        f"{name}: its output was read as {layout}, but {reason}, as forward passes with other contents of some cells show",
        fix="choose another layer, or pass layout= or reshape= if you know where the image is",
        remedy=Remedy.SET_LAYOUT,
    )
