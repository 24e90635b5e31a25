"""Layout probe: whether the cells of a layer's output react to the parts of the input over which they are drawn.

A shape alone does not tell where each token lies: 64 tokens of a text have the shape of an 8 x 8 grid of patches. So the
model runs three more times. Each run replaces another random third of the cells in the input by noise. A token that lies
over a cell changes most in the run that replaces this cell, and hardly between the other two. Changes that all tokens share
are subtracted, and each token is compared only with itself, so its scale does not matter.

A sequence that is right in most places reacts in place as a whole. So the layout is also compared with others that differ
in part: two rows or columns exchanged, some or all of them mirrored, shifted, or read by columns. It is verified only where
it explains the reactions better than each of those, and where no cells differ from the others.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from camscope.errors import LayerError, Remedy
from camscope.hooks.base import Hooks, autocast_uncached, evaluation_mode, find_layer, thread_local_hook, unwrap
from camscope.hooks.mute_hooks import hooks_muted
from camscope.layers.layout import CHANNELS_FIRST, TOKENS, Layout
from camscope.plurals import plural
from camscope.pytree import find_main_tensor

N_RUNS = 3
MAX_TOKENS_WITHOUT_BLOCKS = 64**2  # more of them are replaced in blocks, as the cells of maps
MAX_CELLS_WITHOUT_BLOCKS = 8  # along an axis of a map; of a finer one, blocks of cells are replaced together
BLOCKS_PER_AXIS = {1: 16, 2: 4, 3: 3}
MAX_PREFIX_SHIFT = 9  # tokens by which a prefix may be wrong
MIN_BLOCKS_FOR_Z_SCORE = 9  # below, agreement by chance is likely, and more of it is asked for
N_CANDIDATE_PATTERNS, MAX_PATTERN_CELLS = (
    256,
    2**17,
)  # random patterns, and cells of all, of which the one least like itself elsewhere is taken

VERIFIED_Z_AND_AGREEMENT = ((3.0, 0.25), (2.5, 0.7))  # z and agreement: one pair must be reached
VERIFIED_AGREEMENT_FEW_BLOCKS, MIN_REACTION = 0.8, 0.01
MIN_LOCAL_REACTION, MAX_CHANCE_AGREEMENT = 0.4, 0.2
MAX_WRONG_AGREEMENT = 0.4  # of cells each of which sees one part of the image
MIN_LOCALITY, MIN_LOCALITY_Z = 0.5, 4.0  # cells of one window react alike: the z alone would be too large
MIN_OTHER_LAYOUT_Z, MIN_OTHER_LAYOUT_AGREEMENT = 3.5, 0.6
MIN_OTHER_LAYOUT_LEAD = 2.5  # by how much the z of the other place is more than that of the layout

NEIGHBOR_SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8)  # what a cell may take from its neighbor, as a part of its own
MAX_NEIGHBOR_DISTANCE = 3  # how far
MIN_LOG_LIKELIHOOD_RATIO = 3.0  # log likelihood ratio of the layout against each other order of its cells
MAX_LOG_LIKELIHOOD_RATIO_IF_WRONG, MIN_OTHER_ORDER_CORRELATION = (
    -15.0,
    0.7,
)  # of an order that is right instead, and its correlation
SAME_ORDER_CORRELATION = 0.98  # correlation of two orders that the pattern does not tell apart
ROUNDING_TOLERANCE = 1e-5  # of the largest distance between two runs
EXCHANGED = "with two lines exchanged"
WHOLE_GRID_ORDERS = ("backwards", "with every other line backwards", "read by columns")
MIN_UNEXPLAINED_SHARE = 1e-3  # of the reactions, for rounding
MAX_UNEXPLAINED_SHARE = 0.62  # more of the reactions could hide that a quarter of the tokens is out of place
# median by mean of what is unexplained of a cell; its part of all reactions; what tokens out of place leave of agreement
MAX_PATCHY_MEDIAN_RATIO, MIN_PATCHY_UNEXPLAINED_SHARE, PATCHY_AGREEMENT = 0.4, 0.08, 0.96

ForwardFunction = Callable[[Tensor], object]
OutputReader = Callable[[ForwardFunction, Tensor], "list[Tensor | None]"]


class LayoutVerdict(Enum):
    """What a probe decided about a layout."""

    BY_CONSTRUCTION = "by construction"  # windows over the input and elementwise steps made the map
    VERIFIED = "verified"
    CONTRADICTED = "contradicted"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class ProbeResult:
    """A verdict, and for a contradicted layout what was observed instead."""

    verdict: LayoutVerdict
    reason: str = ""


@dataclass(frozen=True)
class OutputLocation:
    """An output of a model: that of one call of a layer. `output_index` is described in `find_main_tensor`."""

    layer: str
    output_index: str | int | None = None
    call_index: int | None = None


_results_by_model: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # by model: by layer: by place, input size and layout: a finding
_lock = threading.RLock()


def get_cached_result(
    model: nn.Module, location: OutputLocation, size: Sequence[int], layout: Layout
) -> ProbeResult | None:
    """Return the cached result for a layout and inputs (C,*S) of this size; None without one."""
    with _lock:
        return _cached_results(model, location).get((location, tuple(size), str(layout)))


def has_cached_result(model: nn.Module, location: OutputLocation, size: Sequence[int]) -> bool:
    """Whether any call of a layer has a cached result for inputs of this size."""
    with _lock:
        results = _cached_results(model, location)
        return any(
            (cached_location.output_index, cached_size) == (location.output_index, tuple(size))
            for cached_location, cached_size, _ in results
        )


def cache_result(
    model: nn.Module, location: OutputLocation, size: Sequence[int], layout: Layout, result: ProbeResult
) -> ProbeResult:
    """Cache a result for as long as the model and the layer live."""
    with _lock:
        _cached_results(model, location)[location, tuple(size), str(layout)] = result
    return result


def _cached_results(
    model: nn.Module, location: OutputLocation
) -> dict[tuple[OutputLocation, tuple[int, ...], str], ProbeResult]:
    results_by_layer: WeakIdKeyDictionary = _results_by_model.setdefault(unwrap(model), WeakIdKeyDictionary())
    results: dict[tuple[OutputLocation, tuple[int, ...], str], ProbeResult] = results_by_layer.setdefault(
        find_layer(model, location.layer)[1], {}
    )
    return results


def probe_layout(
    model: nn.Module,
    locations: Sequence[OutputLocation],
    layout: Layout,
    x: Tensor,
    forward: ForwardFunction,
    *,
    read_outputs: OutputReader | None = None,
    input_shares: Sequence[float] | None = None,
) -> list[ProbeResult]:
    """Probe whether each output has this layout for inputs like x (N,C,*S), by three forward passes `forward`.

    They run in eval mode, without other hooks and gradients, and leave the random state unchanged. Cached results are reused.
    `read_outputs(run, x)` extracts outputs that are not those of layers. `input_shares` is the part of its own plane that a
    model with padding takes from the input, by axis.
    """
    size = x.shape[1:]
    cached = [get_cached_result(model, location, size, layout) for location in locations]
    if None in cached:
        with (
            hooks_muted(model),
            _evaluation_with_rng_restored(model, x),
        ):  # one thread at a time: the next one finds this one's results
            unknown = [location for location in locations if get_cached_result(model, location, size, layout) is None]
            rows = (
                probe_outputs(
                    read_outputs or partial(_read_layer_outputs, model, unknown),
                    layout,
                    x,
                    forward,
                    input_shares=input_shares,
                )
                if unknown
                else []
            )
            for location, finding in zip(
                unknown, rows or [ProbeResult(LayoutVerdict.UNDECIDED)] * len(unknown), strict=True
            ):
                cache_result(model, location, size, layout, finding)
        cached = [get_cached_result(model, location, size, layout) for location in locations]
    return [finding for finding in cached if finding is not None]


def probe_outputs(
    read_outputs: OutputReader,
    layout: Layout,
    x: Tensor,
    forward: ForwardFunction,
    *,
    input_shares: Sequence[float] | None = None,
) -> list[ProbeResult]:
    """Probe each tensor that `read_outputs(run, x)` extracts, by three forward passes; [] where the model fails."""
    blocks = _count_blocks(layout)
    labels = _draw_pattern(blocks, seed=0)
    cells = _upsample_nearest(labels.view(blocks), layout.grid)
    outputs: list[list[Tensor | None]] = []
    for inputs in (x[:1], x) if len(x) > 1 else (x,):  # one sample is enough, if the model takes one
        try:
            outputs = [
                read_outputs(forward, variant) for variant in _iter_noise_variants(inputs, cells, layout, input_shares)
            ]
            break
        except Exception:  # noqa: S112 - the model may not accept such a batch
            continue
    covered = _find_covered_cells(layout.grid, x.shape[2:], input_shares)
    return [_judge_outputs(tensors, layout, labels, blocks, covered) for tensors in zip(*outputs, strict=True)]


@contextmanager
def _evaluation_with_rng_restored(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Use eval mode without gradients, and restore the random state afterwards."""
    state, numpy_state = random.getstate(), np.random.get_state()
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.no_grad(),
            autocast_uncached(),
            evaluation_mode(unwrap(model)),
        ):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _read_layer_outputs(
    model: nn.Module, locations: Sequence[OutputLocation], forward: ForwardFunction, x: Tensor
) -> list[Tensor | None]:
    """Return the output of a forward pass at each location; None where there is no usable one."""
    calls: list[list[Tensor]] = [[] for _ in locations]

    def keep(number: int, module: nn.Module, args: object, output: object) -> None:
        calls[number].append(
            find_main_tensor(locations[number].layer, output, locations[number].output_index)[1].detach().clone()
        )

    with Hooks() as hooks:
        for number, location in enumerate(locations):
            module = find_layer(model, location.layer)[1]
            hooks.add_handle(module.register_forward_hook(thread_local_hook(partial(keep, number))))
        try:
            forward(x)
        except Exception:
            if not all(calls):  # what follows the layers does not matter
                raise
    calls_and_indices = zip(calls, (location.call_index for location in locations), strict=True)
    return [
        outputs[-1 if call is None else call] if len(outputs) > (call or 0) else None
        for outputs, call in calls_and_indices
    ]


def _count_blocks(layout: Layout) -> tuple[int, ...]:
    """Return into how many blocks each axis of the grid is divided; blocks are replaced as a whole."""
    grid = layout.grid
    if layout.kind == TOKENS and math.prod(grid) <= MAX_TOKENS_WITHOUT_BLOCKS:
        return tuple(grid)
    return tuple(
        cells if cells <= MAX_CELLS_WITHOUT_BLOCKS and len(grid) < 3 else min(cells, BLOCKS_PER_AXIS.get(len(grid), 2))
        for cells in grid
    )


@lru_cache(maxsize=64)
def _draw_pattern(blocks: tuple[int, ...], seed: int) -> Tensor:
    """Draw the run that replaces each block (blocks,), as unlike its shifted or reordered self as possible."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    count = math.prod(blocks)
    balanced = torch.arange(count, device="cpu") % N_RUNS
    patterns = [
        balanced[torch.randperm(count, generator=generator, device="cpu")]
        for _ in range(max(8, min(N_CANDIDATE_PATTERNS, MAX_PATTERN_CELLS // count)))
    ]

    def likeness(labels: Tensor) -> float:
        shifted = [
            float((labels[k:] == labels[:-k]).double().mean()) for k in range(1, min(count - 1, MAX_PREFIX_SHIFT) + 1)
        ]
        field = _compute_expected_reaction(labels, blocks, 0.0)
        orders = [(value, name) for value, name in _iter_other_orders(field, field, similar=True) if value.numel()]
        # of single cells, some always have the same label
        other = [float(value.max()) for value, name in orders if len(blocks) > 1 or name != EXCHANGED]
        return max((*shifted, *other), default=0.0)

    return min(patterns, key=likeness)


def _upsample_nearest(values: Tensor, size: Sequence[int]) -> Tensor:
    """Upsample (*blocks) to (*size): each entry fills its part of a finer grid."""
    for axis, (length, count) in enumerate(zip(size, values.shape, strict=True)):
        values = values.index_select(axis, torch.arange(length, device=values.device) * count // length)
    return values


def _map_pixels_to_cells(cells: int, pixels: int, input_share: float) -> Tensor:
    return (torch.arange(pixels, device="cpu") * (cells * input_share / pixels)).long().clamp(max=cells - 1)


def _find_covered_cells(grid: Sequence[int], size: Sequence[int], input_shares: Sequence[float] | None) -> Tensor:
    """Return which cells (cells,) lie over the input; some may lie over padding, or be finer than its pixels."""
    covered = torch.ones(tuple(grid), dtype=torch.bool, device="cpu")
    for axis, (cells, pixels) in enumerate(zip(grid, size, strict=True)):
        present = torch.zeros(cells, dtype=torch.bool, device="cpu")
        present[_map_pixels_to_cells(cells, pixels, input_shares[axis] if input_shares else 1.0)] = True
        covered &= present.view([-1 if i == axis else 1 for i in range(len(grid))])
    return covered.reshape(-1)


def _iter_noise_variants(
    x: Tensor, cells: Tensor, layout: Layout, input_shares: Sequence[float] | None
) -> Iterator[Tensor]:
    """Yield three variants of x (N,C,*S), each with another third of the cells replaced by noise."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    space = tuple(range(2, x.ndim))
    indices = [
        _map_pixels_to_cells(count, pixels, input_shares[axis] if input_shares else 1.0)
        for axis, (count, pixels) in enumerate(zip(layout.grid, x.shape[2:], strict=True))
    ]
    label = cells
    for axis, index in enumerate(indices):
        label = label.index_select(axis, index)
    label = label.to(x.device)
    values = x.detach().float()
    low, high = values.amin(space, keepdim=True), values.amax(space, keepdim=True)
    fine = torch.rand(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(values)
    coarse = torch.rand((*x.shape[:2], *layout.grid), generator=generator, dtype=torch.float32, device="cpu").to(values)
    for axis, index in enumerate(indices, start=2):
        coarse = coarse.index_select(axis, index.to(x.device))
    uniform = bool((low == high).all())
    span = torch.where(high > low, high - low, high.abs().clamp(min=1) if uniform else 0)
    noise = low + span * (fine + coarse) / 2
    if uniform:  # a uniform input: noise instead of noise
        values = low + span * torch.rand(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(values)
    for number in range(N_RUNS):
        yield torch.where(label == number, noise, values).to(x.dtype)


def _flatten_positions(output: Tensor, layout: Layout) -> Tensor | None:
    """Flatten an output to all its positions (N,T,K), including a prefix; None where it has another layout."""
    grid = tuple(layout.grid)
    if layout.kind == TOKENS:
        fits = output.ndim == 3 and output.shape[1] >= layout.prefix + math.prod(grid)
        return output if fits else None
    if layout.kind == CHANNELS_FIRST:
        return output.flatten(2).mT if tuple(output.shape[2:]) == grid else None
    return output.flatten(1, -2) if tuple(output.shape[1:-1]) == grid else None


def _judge_outputs(
    outputs: Sequence[Tensor | None], layout: Layout, labels: Tensor, blocks: Sequence[int], covered: Tensor
) -> ProbeResult:
    rows = [None if output is None else _flatten_positions(output, layout) for output in outputs]
    usable = [row.float() if row.dtype != torch.float64 else row for row in rows if row is not None]
    if len(usable) < N_RUNS or len({row.shape for row in usable}) > 1:
        return ProbeResult(LayoutVerdict.UNDECIDED)
    # [p]: how far the two runs are apart that leave the cells of run p as they are
    distances = torch.stack([_compute_run_distance(usable[p - 1] - usable[p - 2], layout) for p in range(N_RUNS)]).cpu()
    if not bool(distances.isfinite().all()):
        return ProbeResult(LayoutVerdict.UNDECIDED)
    return judge_distances(distances, layout, labels, blocks, covered)


def _compute_run_distance(difference: Tensor, layout: Layout) -> Tensor:
    """Compute how far two runs differ at each position, (N,T,K) -> (T,), without their common difference."""
    start = layout.prefix if layout.kind == TOKENS else 0
    common = difference[:, start : start + math.prod(layout.grid)].mean(1, keepdim=True)
    distance = (difference - common).norm(dim=-1)
    scale = difference.norm(dim=-1).amax()  # what is left of equal numbers is rounding
    return torch.where(distance > ROUNDING_TOLERANCE * scale, distance, 0).double().mean(0)


def judge_distances(
    distances: Tensor, layout: Layout, labels: Tensor, blocks: Sequence[int], covered: Tensor | None = None
) -> ProbeResult:
    """Judge a layout by the distances (3,T) between the runs at every position.

    `labels` (blocks,) holds the run that replaces each block. `distances[p]` is between the two runs that keep the cells of p.
    """
    grid = layout.grid
    count = math.prod(grid)
    start = layout.prefix if layout.kind == TOKENS else 0
    cells = torch.arange(count, device="cpu")[covered] if covered is not None else torch.arange(count, device="cpu")
    block_of_cell = _upsample_nearest(torch.arange(math.prod(blocks), device="cpu").view(*blocks), grid).reshape(-1)
    total = distances.sum(0)
    if not bool((total[start + cells] > 0).any()):
        return ProbeResult(LayoutVerdict.CONTRADICTED, "it does not depend on the image")
    # 1 where only run p differs from the other two, -1/2 for those; 0 where all differ alike
    reaction = torch.where(total > 0, (total - 3 * distances) / torch.where(total > 0, total, 1), 0)

    blocks_here = block_of_cell[cells]
    reaction_here = _subtract_mean(reaction[:, start + cells])
    score, spread = _score_agreement(reaction_here, labels[blocks_here], blocks_here)
    local = float(reaction_here.amax(0).mean())
    agreement, z = score / local if local > 0 else 0.0, score / spread
    has_few_blocks = len(labels) < MIN_BLOCKS_FOR_Z_SCORE

    best = max(_score_other_layouts(reaction, labels, block_of_cell, cells, layout), default=(0.0, 0.0, ""))
    if local < MIN_REACTION:
        return ProbeResult(LayoutVerdict.UNDECIDED)
    order = _compare_orders(reaction_here, labels, blocks, blocks_here, strict=layout.kind == TOKENS)
    if order.is_sure:
        if has_few_blocks and agreement >= VERIFIED_AGREEMENT_FEW_BLOCKS:
            return ProbeResult(LayoutVerdict.VERIFIED)
        if score >= best[0] and any(
            z >= min_z and agreement >= min_agreement for min_z, min_agreement in VERIFIED_Z_AND_AGREEMENT
        ):
            return ProbeResult(LayoutVerdict.VERIFIED)
    if order.is_wrong and not has_few_blocks:
        return ProbeResult(
            LayoutVerdict.CONTRADICTED,
            f"its cells react to other parts of the image; they react like {layout} {order.best_other_order}",
        )
    if has_few_blocks:  # they disagree, or agree with one of several other places, by chance
        return ProbeResult(LayoutVerdict.UNDECIDED)
    elsewhere = (
        best[0] >= max(MIN_OTHER_LAYOUT_AGREEMENT * local, MIN_REACTION)
        and best[1] >= MIN_OTHER_LAYOUT_Z
        and best[1] - score / spread >= MIN_OTHER_LAYOUT_LEAD
    )
    is_wrong = local >= MIN_LOCAL_REACTION and agreement <= MAX_CHANCE_AGREEMENT
    is_wrong = is_wrong or (agreement <= MAX_WRONG_AGREEMENT and _is_local(reaction_here))
    if elsewhere or is_wrong:
        hint = f"; they react like {best[2]}" if elsewhere else ""
        return ProbeResult(LayoutVerdict.CONTRADICTED, f"its cells react to other parts of the image{hint}")
    return ProbeResult(LayoutVerdict.UNDECIDED)


@dataclass(frozen=True)
class OrderComparison:
    """How a layout compares with other orders of its cells; `best_other_order` is the best of them, or ""."""

    is_sure: bool
    is_wrong: bool
    best_other_order: str = ""


def _compare_orders(
    values: Tensor, labels: Tensor, blocks: Sequence[int], block_of_cell: Tensor, *, strict: bool
) -> OrderComparison:
    """Compare this order of cells (3,cells) of the blocks `block_of_cell` (cells,) with other orders.

    `strict`: single rows and columns may be out of place, as in a sequence of tokens, but not in a map.
    """
    count = math.prod(blocks)
    sums = values.new_zeros(N_RUNS, count).index_add_(1, block_of_cell, values)
    cells = values.new_zeros(count).index_add_(0, block_of_cell, values.new_ones(len(block_of_cell)))
    covered = cells > 0
    reaction = torch.where(covered, sums / cells.clamp(min=1), 0)
    reaction = torch.where(covered, reaction - reaction[:, covered].mean(1, keepdim=True), 0).view(N_RUNS, *blocks)
    size = float(reaction.norm())
    if size == 0 or int(covered.sum()) < 2:
        return OrderComparison(is_sure=False, is_wrong=False)
    fields = [
        torch.where(covered.view(*blocks), _compute_expected_reaction(labels, blocks, spread), 0).to(values)
        for spread in NEIGHBOR_SHARES
    ]
    fits = [float((reaction * field).sum() / (size * field.norm())) for field in fields]
    fit = max(fits)
    field = fields[fits.index(fit)]
    evidence, name, fit_of_other = math.inf, "", 0.0
    fitting = _iter_other_orders(reaction, field, similar=False)
    likeness = _iter_other_orders(field, field, similar=True)
    unexplained = 1 - max(fit, 0.0) ** 2 + MIN_UNEXPLAINED_SHARE
    for (correlations, other), (likeness_of_order, _) in zip(fitting, likeness, strict=True):
        distinguishable = correlations[likeness_of_order < SAME_ORDER_CORRELATION] / (size * float(field.norm()))
        if len(distinguishable) and (strict or other in WHOLE_GRID_ORDERS):
            best = float(distinguishable.max())
            ratio = int(covered.sum()) * math.log((1 - max(best, 0.0) ** 2 + MIN_UNEXPLAINED_SHARE) / unexplained)
            if ratio < evidence:
                evidence, name, fit_of_other = ratio, other, best
    # as many tokens out of place as leave so much unexplained cost as much agreement; uneven reactions in place do not
    agreement = float(reaction.flatten(1).gather(0, labels[None])[0, covered].sum())
    agreement /= float(reaction.flatten(1).amax(0)[covered].sum())
    residual = (
        (reaction - reaction.new_tensor(fit * size / float(field.norm())) * field).square().sum(0).reshape(-1)[covered]
    )
    is_patchy = unexplained >= MIN_PATCHY_UNEXPLAINED_SHARE and float(
        residual.median()
    ) < MAX_PATCHY_MEDIAN_RATIO * float(residual.mean())
    is_patchy = is_patchy and agreement < PATCHY_AGREEMENT
    in_part = strict and (is_patchy or unexplained > MAX_UNEXPLAINED_SHARE)
    return OrderComparison(
        is_sure=evidence >= (MIN_LOG_LIKELIHOOD_RATIO if strict else 0) and not in_part,
        is_wrong=evidence <= MAX_LOG_LIKELIHOOD_RATIO_IF_WRONG and fit_of_other >= MIN_OTHER_ORDER_CORRELATION,
        best_other_order=name,
    )


def _compute_expected_reaction(labels: Tensor, blocks: Sequence[int], neighbor_share: float) -> Tensor:
    """Compute how much each block should react to each run (3,*blocks), with a share from its neighbors."""
    plane = nn.functional.one_hot(labels, N_RUNS).mT.double().view(N_RUNS, *blocks)
    for axis, length in enumerate(blocks, start=1):
        position = torch.arange(length, device=labels.device)
        distance = (position[:, None] - position).abs()
        weights = torch.where(distance <= MAX_NEIGHBOR_DISTANCE, neighbor_share ** distance.double(), 0)  # 0 ** 0 is 1
        plane = torch.tensordot(plane, weights, dims=([axis], [1])).movedim(-1, axis)
    plane = plane - plane.mean(0)
    return plane - plane.flatten(1).mean(1).view(-1, *[1] * len(blocks))


def _iter_other_orders(reaction: Tensor, field: Tensor, *, similar: bool) -> Iterator[tuple[Tensor, str]]:
    """Yield the products of reactions and fields (3,*blocks) in other orders, (orders,) each, with a description of the order.

    `similar`: as shares of the product of the field with itself, counting only cells that move.
    """
    same_order = (reaction * field).sum()
    axes = range(1, field.ndim)

    def normalize(change: Tensor, moved: Tensor) -> Tensor:
        return 1 + change / moved.clamp(min=1e-12) if similar else same_order + change

    for axis in axes:
        reaction_lines, field_lines = (
            field_or_reaction.movedim(axis, 1).reshape(N_RUNS, field_or_reaction.shape[axis], -1)
            for field_or_reaction in (reaction, field)
        )
        products = torch.einsum("pic,pjc->ij", reaction_lines, field_lines)
        line = products.diagonal()
        first, second = torch.triu_indices(len(line), len(line), 1, device=field.device)
        moved = line[first] + line[second]
        yield normalize(products[first, second] + products[second, first] - moved, moved), EXCHANGED
        for mirrored in axes:
            mirrored_change = (reaction * field.flip(mirrored)).movedim(axis, 0).flatten(1).sum(1) - line
            if mirrored == axis:
                yield normalize(mirrored_change.sum()[None], line.sum()[None]), "backwards"
                continue
            yield normalize(mirrored_change, line), "with a line backwards"
            halves = [(mirrored_change[start::2].sum(), line[start::2].sum()) for start in (0, 1)]
            change, moved = (torch.stack(values) for values in zip(*halves, strict=True))
            yield normalize(change, moved), "with every other line backwards"
        if len(line) > 1:
            shifted = torch.stack([(reaction * field.roll(shift, axis)).sum() for shift in range(1, len(line))])
            yield normalize(shifted - same_order, same_order[None]), "moved on by some lines"
    if field.ndim == 3:
        mirrored_change = (reaction * field.mT.reshape(field.shape)).sum()[None]
        yield normalize(mirrored_change - same_order, same_order[None]), "read by columns"


def _subtract_mean(values: Tensor) -> Tensor:
    """Subtract what a run changes at all positions, which does not depend on their place."""
    return values - values.mean(1, keepdim=True)


def _is_local(values: Tensor) -> bool:
    """Whether the cells (3,cells) react to one run and equally to the other two, wherever that part of the image lies.

    A reaction is a direction in a plane, because the three numbers sum to 0. For a cell that sees one part of the image it is
    one of three directions, 120 degrees apart. For noise, or a mixture of many parts, it is any.
    """
    angle = torch.atan2((values[1] - values[2]) * math.sqrt(3), 2 * values[0] - values[1] - values[2])
    locality = float((3 * angle).cos().mean())
    return locality >= MIN_LOCALITY and locality * math.sqrt(2 * values.shape[1]) >= MIN_LOCALITY_Z


def _score_agreement(values: Tensor, run_of_cell: Tensor, block_of_cell: Tensor) -> tuple[float, float]:
    """Compute how much the cells (3,cells) react to the runs `run_of_cell` (cells,), and the chance level for other labels.

    The chance level is the standard deviation if each block had a random label.
    """
    cells = values.shape[1]
    of_block = torch.zeros(N_RUNS, int(block_of_cell.max()) + 1, dtype=values.dtype, device=values.device).index_add_(
        1, block_of_cell, values
    )
    spread = float(of_block.square().mean(0).sum().sqrt()) / cells
    return float(values[run_of_cell, torch.arange(cells, device=values.device)].mean()), spread + 1e-12


def _score_other_layouts(
    reaction: Tensor, labels: Tensor, block_of_cell: Tensor, cells: Tensor, layout: Layout
) -> Iterator[tuple[float, float, str]]:
    """Yield score, z-score and name of the same cells at other positions of the sequence, or read by columns."""
    count, length = len(block_of_cell), reaction.shape[1]
    if layout.kind != TOKENS:
        return
    for start in _iter_candidate_starts(length, count, layout.prefix):
        inside = (start + cells >= 0) & (start + cells < length)
        if start == layout.prefix or int(inside.sum()) * 2 < len(cells) or int(inside.sum()) < 2:
            continue
        block = block_of_cell[cells[inside]]
        agreement, spread = _score_agreement(_subtract_mean(reaction[:, start + cells[inside]]), labels[block], block)
        fits = 0 <= start <= length - count
        name = (
            str(Layout(TOKENS, layout.grid, start))
            if fits
            else f"cells {plural(start - layout.prefix, 'token', spec='+d')} off"
        )
        yield agreement, agreement / spread, name
    if len(layout.grid) == 2 and min(layout.grid) > 1:
        block = block_of_cell.view(layout.grid).T.reshape(-1)[cells]
        agreement, spread = _score_agreement(_subtract_mean(reaction[:, layout.prefix + cells]), labels[block], block)
        yield agreement, agreement / spread, f"{layout} read by columns"


def _iter_candidate_starts(length: int, count: int, prefix: int) -> Iterator[int]:
    """Yield other positions where the grid may start: anywhere that it fits, and a few tokens off."""
    yield from {*range(length - count + 1), *range(prefix - MAX_PREFIX_SHIFT, prefix + MAX_PREFIX_SHIFT + 1)}


def make_layout_error(name: str, layout: Layout, reason: str) -> LayerError:
    """Create the error for a contradicted layout."""
    return LayerError(
        f"{name}: its output was read as {layout}, but {reason}, as forward passes with other contents of some cells show",
        fix="choose another layer, or pass layout= or reshape= if you know where the image is",
        remedy=Remedy.SET_LAYOUT,
    )
