"""Decide whether a layout is right: add noise to parts of the input, and compare the reactions of the layer's cells.

If only a few cells are at wrong positions, the layout still fits the reactions well. So it is also compared with
similar orders: two rows or columns exchanged, some or all of them mirrored, shifted, or read by columns. The layout is
verified only if it fits the reactions better than each of these orders, and if it explains the reactions of all cells.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from camscope.layers.layout import TOKENS, Layout
from camscope.plurals import plural

N_RUNS = 3
MAX_PREFIX_SHIFT = 9  # tokens by which a prefix may be wrong
MIN_BLOCKS_FOR_Z_SCORE = 9  # below, agreement by chance is likely, and more of it is needed
N_CANDIDATE_PATTERNS = 256  # random patterns, of which the one least like itself elsewhere is used
MAX_PATTERN_CELLS = 2**17  # of all of them
VERIFIED_Z_AND_AGREEMENT = ((3.0, 0.25), (2.5, 0.7))  # one pair of minima must be reached
VERIFIED_AGREEMENT_FEW_BLOCKS, MIN_REACTION = 0.8, 0.01
MIN_LOCAL_REACTION, MAX_CHANCE_AGREEMENT = 0.4, 0.2
MAX_WRONG_AGREEMENT = 0.4  # of cells each of which sees one part of the image
MIN_LOCALITY, MIN_LOCALITY_Z = 0.5, 4.0  # cells of one window react alike: the z alone would be too large
MIN_OTHER_LAYOUT_Z, MIN_OTHER_LAYOUT_AGREEMENT = 3.5, 0.6
MIN_OTHER_LAYOUT_LEAD = 2.5  # by how much the z of the other place is more than that of the layout
NEIGHBOR_SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8)  # what a cell may take from its neighbor, as a share of its reaction
MAX_NEIGHBOR_DISTANCE = 3  # how far
MIN_LOG_LIKELIHOOD_RATIO = 3.0  # of the layout against each other order of its cells
MAX_LOG_LIKELIHOOD_RATIO_IF_WRONG, MIN_OTHER_ORDER_CORRELATION = -15.0, 0.7  # where another order is right
SAME_ORDER_CORRELATION = 0.98  # of two orders that the pattern does not distinguish
EXCHANGED = "with two lines exchanged"
WHOLE_GRID_ORDERS = ("backwards", "with every other line backwards", "read by columns")
MIN_UNEXPLAINED_SHARE = 1e-3  # of the reactions, for rounding
MAX_UNEXPLAINED_SHARE = 0.62  # more of the reactions could hide that a quarter of the tokens is out of place
# median by mean of a cell's unexplained part; its share of all reactions; agreement that tokens out of place leave
MAX_PATCHY_MEDIAN_RATIO, MIN_PATCHY_UNEXPLAINED_SHARE, PATCHY_AGREEMENT = 0.4, 0.08, 0.96


class LayoutVerdict(Enum):
    """The decision about a layout: verified, contradicted or undecided, or known without a test."""

    BY_CONSTRUCTION = "by construction"  # windows over the input and elementwise steps made the map
    VERIFIED = "verified"
    CONTRADICTED = "contradicted"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class LayoutProbeResult:
    """The verdict about a layout. For a contradicted layout, `reason` says what was observed instead."""

    verdict: LayoutVerdict
    reason: str = ""


def judge_layout(
    distances: Tensor, layout: Layout, labels: Tensor, blocks: Sequence[int], covered: Tensor | None = None
) -> LayoutProbeResult:
    """Decide whether a layout is right. The model ran three times with noise, and `distances` (3,T) compares the
    outputs at each position.

    `labels` (blocks,) is the number of the run with noise in each block. `distances[p]` compares the two runs other
    than p. `covered` marks the cells that the input covers.
    """
    start = layout.prefix if layout.kind == TOKENS else 0
    block_of_cell = upsample_nearest(torch.arange(len(labels), device="cpu").view(*blocks), layout.grid).reshape(-1)
    cells = torch.arange(len(block_of_cell), device="cpu")
    cells = cells if covered is None else cells[covered]
    total = distances.sum(0)
    if not bool((total[start + cells] > 0).any()):
        return LayoutProbeResult(LayoutVerdict.CONTRADICTED, "it does not depend on the image")
    # 1 where only run p differs from the other two, -1/2 for those; 0 where all differ alike
    reaction = torch.where(total > 0, (total - 3 * distances) / torch.where(total > 0, total, 1), 0)

    blocks_here = block_of_cell[cells]
    reaction_here = _subtract_mean(reaction[:, start + cells])
    score, spread = _score_agreement(reaction_here, labels[blocks_here], blocks_here)
    local = float(reaction_here.amax(0).mean())
    agreement, z = score / local if local > 0 else 0.0, score / spread
    has_few_blocks = len(labels) < MIN_BLOCKS_FOR_Z_SCORE

    other_layouts = _score_other_layouts(reaction, labels, block_of_cell, cells, layout)
    other_score, other_z, other_name = max(other_layouts, default=LayoutScore(0.0, 0.0, ""))
    if local < MIN_REACTION:
        return LayoutProbeResult(LayoutVerdict.UNDECIDED)
    is_sure, is_wrong, other_order = _test_cell_order(
        reaction_here, labels, blocks, blocks_here, strict=layout.kind == TOKENS
    )
    agrees = score >= other_score and any(z >= pair[0] and agreement >= pair[1] for pair in VERIFIED_Z_AND_AGREEMENT)
    if is_sure and (agrees or (has_few_blocks and agreement >= VERIFIED_AGREEMENT_FEW_BLOCKS)):
        return LayoutProbeResult(LayoutVerdict.VERIFIED)
    if has_few_blocks:  # they disagree, or agree with one of several other places, by chance
        return LayoutProbeResult(LayoutVerdict.UNDECIDED)
    hint = f"; they react like {layout} {other_order}" if is_wrong else ""
    if not is_wrong:
        is_wrong = local >= MIN_LOCAL_REACTION and agreement <= MAX_CHANCE_AGREEMENT
        is_wrong = is_wrong or (agreement <= MAX_WRONG_AGREEMENT and _is_reaction_local(reaction_here))
        is_clear = other_z >= MIN_OTHER_LAYOUT_Z and other_z - z >= MIN_OTHER_LAYOUT_LEAD
        if is_clear and other_score >= max(MIN_OTHER_LAYOUT_AGREEMENT * local, MIN_REACTION):
            is_wrong, hint = True, f"; they react like {other_name}"
    if is_wrong:
        return LayoutProbeResult(LayoutVerdict.CONTRADICTED, f"its cells react to other parts of the image{hint}")
    return LayoutProbeResult(LayoutVerdict.UNDECIDED)


class OrderTest(NamedTuple):
    """Whether the assumed order of the cells is verified, whether it is wrong, and a description of the best other order."""

    is_verified: bool
    is_wrong: bool
    best_other_order: str


def _test_cell_order(
    values: Tensor, labels: Tensor, blocks: Sequence[int], block_of_cell: Tensor, *, strict: bool
) -> OrderTest:
    """Test whether the cells react in the assumed order. Other orders are mirrored, shifted, or by columns.

    With `strict`, orders in which only single rows or columns are misplaced are tested, too, as for sequences of
    tokens.
    """
    sums = values.new_zeros(N_RUNS, len(labels)).index_add_(1, block_of_cell, values)
    cells = values.new_zeros(len(labels)).index_add_(0, block_of_cell, values.new_ones(len(block_of_cell)))
    covered = cells > 0
    reaction = torch.where(covered, sums / cells.clamp(min=1), 0)
    reaction = torch.where(covered, reaction - reaction[:, covered].mean(1, keepdim=True), 0).view(N_RUNS, *blocks)
    size, count = float(reaction.norm()), int(covered.sum())
    if size == 0 or count < 2:
        return OrderTest(is_verified=False, is_wrong=False, best_other_order="")
    fields = [
        torch.where(covered.view(*blocks), compute_expected_reaction(labels, blocks, spread), 0).to(values)
        for spread in NEIGHBOR_SHARES
    ]
    fits = [float((reaction * field).sum() / (size * field.norm())) for field in fields]
    fit = max(fits)
    field = fields[fits.index(fit)]
    field_size = float(field.norm())
    unexplained = 1 - max(fit, 0.0) ** 2 + MIN_UNEXPLAINED_SHARE
    evidence, name, fit_of_other = math.inf, "", 0.0
    orders = (
        iter_matches_in_other_orders(reaction, field, as_share_of_moved_cells=False),
        iter_matches_in_other_orders(field, field, as_share_of_moved_cells=True),
    )
    for (correlations, other), (likeness, _) in zip(*orders, strict=True):
        distinguishable = correlations[likeness < SAME_ORDER_CORRELATION] / (size * field_size)
        if len(distinguishable) and (strict or other in WHOLE_GRID_ORDERS):
            best = float(distinguishable.max())
            ratio = count * math.log((1 - max(best, 0.0) ** 2 + MIN_UNEXPLAINED_SHARE) / unexplained)
            if ratio < evidence:
                evidence, name, fit_of_other = ratio, other, best
    # as many tokens out of place as leave so much unexplained cost as much agreement; uneven reactions in place do not
    agreement = float(reaction.flatten(1).gather(0, labels[None])[0, covered].sum())
    agreement /= float(reaction.flatten(1).amax(0)[covered].sum())
    residual = (reaction - reaction.new_tensor(fit * size / field_size) * field).square().sum(0).reshape(-1)[covered]
    is_patchy = unexplained >= MIN_PATCHY_UNEXPLAINED_SHARE and agreement < PATCHY_AGREEMENT
    is_patchy = is_patchy and float(residual.median()) < MAX_PATCHY_MEDIAN_RATIO * float(residual.mean())
    in_part = strict and (is_patchy or unexplained > MAX_UNEXPLAINED_SHARE)
    is_sure = evidence >= (MIN_LOG_LIKELIHOOD_RATIO if strict else 0) and not in_part
    is_wrong = evidence <= MAX_LOG_LIKELIHOOD_RATIO_IF_WRONG and fit_of_other >= MIN_OTHER_ORDER_CORRELATION
    return OrderTest(is_sure, is_wrong, name)


def compute_expected_reaction(labels: Tensor, blocks: Sequence[int], neighbor_share: float) -> Tensor:
    """Return how strongly each block should react to the noise of each of the three runs, as (3,*blocks).

    `neighbor_share` is the share of the reaction that a block takes from its neighbor.
    """
    plane = nn.functional.one_hot(labels, N_RUNS).mT.double().view(N_RUNS, *blocks)
    for axis, length in enumerate(blocks, start=1):
        position = torch.arange(length, device=labels.device)
        distance = (position[:, None] - position).abs()
        weights = torch.where(distance <= MAX_NEIGHBOR_DISTANCE, neighbor_share ** distance.double(), 0)  # 0 ** 0 is 1
        plane = torch.tensordot(plane, weights, dims=([axis], [1])).movedim(-1, axis)
    plane = plane - plane.mean(0)
    return plane - plane.flatten(1).mean(1).view(-1, *[1] * len(blocks))


class OrderMatch(NamedTuple):
    """How well a reaction matches a field in another order of the cells: one match for each variant of the order."""

    matches: Tensor
    order: str


def iter_matches_in_other_orders(
    reaction: Tensor, field: Tensor, *, as_share_of_moved_cells: bool
) -> Iterator[OrderMatch]:
    """Try other orders of the cells. Yield for each how well `reaction` (3,*blocks) matches `field`, and the order's name.

    The match is the sum of products over all blocks. With `as_share_of_moved_cells`, the match of the cells that the
    other order moves is divided by the match of these cells in the same order.
    """
    match_in_same_order = (reaction * field).sum()
    axes = range(1, field.ndim)

    def build_order_match(order: str, match_change: Tensor, match_of_moved_cells: Tensor) -> OrderMatch:
        """Build the match in one order from its change. If requested, make it relative to the match of the moved cells."""
        if as_share_of_moved_cells:
            return OrderMatch(1 + match_change / match_of_moved_cells.clamp(min=1e-12), order)
        return OrderMatch(match_in_same_order + match_change, order)

    for axis in axes:
        lines = [plane.movedim(axis, 1).reshape(N_RUNS, plane.shape[axis], -1) for plane in (reaction, field)]
        products = torch.einsum("pic,pjc->ij", *lines)
        line = products.diagonal()
        first, second = torch.triu_indices(len(line), len(line), 1, device=field.device)
        moved = line[first] + line[second]
        yield build_order_match(EXCHANGED, products[first, second] + products[second, first] - moved, moved)
        for mirrored in axes:
            mirrored_change = (reaction * field.flip(mirrored)).movedim(axis, 0).flatten(1).sum(1) - line
            if mirrored == axis:
                yield build_order_match("backwards", mirrored_change.sum()[None], line.sum()[None])
                continue
            yield build_order_match("with a line backwards", mirrored_change, line)
            halves = [torch.stack([values[start::2].sum() for start in (0, 1)]) for values in (mirrored_change, line)]
            yield build_order_match("with every other line backwards", *halves)
        if len(line) > 1:
            shifted = torch.stack([(reaction * field.roll(shift, axis)).sum() for shift in range(1, len(line))])
            yield build_order_match("moved on by some lines", shifted - match_in_same_order, match_in_same_order[None])
    if field.ndim == 3:
        mirrored_change = (reaction * field.mT.reshape(field.shape)).sum()[None]
        yield build_order_match("read by columns", mirrored_change - match_in_same_order, match_in_same_order[None])


@lru_cache(maxsize=64)
def draw_noise_pattern(blocks: tuple[int, ...], seed: int) -> Tensor:
    """Draw the number of a run for each block (blocks,). In this run, noise replaces the block.

    Of many random patterns, the one that is least similar to its own shifts and reorderings is returned.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    count = math.prod(blocks)
    balanced = torch.arange(count, device="cpu") % N_RUNS
    patterns = [
        balanced[torch.randperm(count, generator=generator, device="cpu")]
        for _ in range(max(8, min(N_CANDIDATE_PATTERNS, MAX_PATTERN_CELLS // count)))
    ]

    def compute_self_similarity(labels: Tensor) -> float:
        shifts = range(1, min(count - 1, MAX_PREFIX_SHIFT) + 1)
        shifted = [float((labels[k:] == labels[:-k]).double().mean()) for k in shifts]
        field = compute_expected_reaction(labels, blocks, 0.0)
        orders = iter_matches_in_other_orders(field, field, as_share_of_moved_cells=True)
        # of single cells, some always have the same label
        other = [float(v.max()) for v, name in orders if v.numel() and (len(blocks) > 1 or name != EXCHANGED)]
        return max((*shifted, *other), default=0.0)

    return min(patterns, key=compute_self_similarity)


def upsample_nearest(values: Tensor, size: Sequence[int]) -> Tensor:
    """Enlarge values (*blocks) to a finer grid (*size) by nearest neighbor."""
    for axis, (length, count) in enumerate(zip(size, values.shape, strict=True)):
        values = values.index_select(axis, torch.arange(length, device=values.device) * count // length)
    return values


def _subtract_mean(values: Tensor) -> Tensor:
    """Subtract from values (3,cells) their mean over the cells."""
    return values - values.mean(1, keepdim=True)


def _is_reaction_local(values: Tensor) -> bool:
    """Whether an average cell reacts mainly to one of three noise runs. Such a cell depends on one part of the input.

    `values` (3,cells) are the reactions to the runs.
    """
    # a direction in a plane, as the numbers sum to 0: one of three, 120 degrees apart, for a cell that sees one part
    angle = torch.atan2((values[1] - values[2]) * math.sqrt(3), 2 * values[0] - values[1] - values[2])
    locality = float((3 * angle).cos().mean())
    return locality >= MIN_LOCALITY and locality * math.sqrt(2 * values.shape[1]) >= MIN_LOCALITY_Z


class Agreement(NamedTuple):
    """The mean reaction of cells to their expected run, and the spread of this mean for random labels."""

    score: float
    spread: float


def _score_agreement(values: Tensor, run_of_cell: Tensor, block_of_cell: Tensor) -> Agreement:
    """Compute the reaction of the cells to the run that the layout expects, and the spread of this value for random labels."""
    cells = values.shape[1]
    of_block = values.new_zeros(N_RUNS, int(block_of_cell.max()) + 1).index_add_(1, block_of_cell, values)
    spread = float(of_block.square().mean(0).sum().sqrt()) / cells
    score = float(values[run_of_cell, torch.arange(cells, device=values.device)].mean())
    return Agreement(score, spread + 1e-12)


class LayoutScore(NamedTuple):
    """How well a layout agrees with the reactions: its score and z-score, and the name of the layout."""

    score: float
    z_score: float
    name: str


def _score_other_layouts(
    reaction: Tensor, labels: Tensor, block_of_cell: Tensor, cells: Tensor, layout: Layout
) -> Iterator[LayoutScore]:
    """Score other layouts: tokens that start at another position, or cells in column order."""
    if layout.kind != TOKENS:
        return
    count, length, prefix = len(block_of_cell), reaction.shape[1], layout.prefix

    def score_layout_at(positions: Tensor, block: Tensor, name: str) -> LayoutScore:
        agreement, spread = _score_agreement(_subtract_mean(reaction[:, positions]), labels[block], block)
        return LayoutScore(agreement, agreement / spread, name)

    # anywhere that the grid fits, and a few tokens off
    starts = {*range(length - count + 1), *range(prefix - MAX_PREFIX_SHIFT, prefix + MAX_PREFIX_SHIFT + 1)}
    for start in starts - {prefix}:
        inside = cells[(start + cells >= 0) & (start + cells < length)]
        if len(inside) * 2 < len(cells) or len(inside) < 2:
            continue
        fits = 0 <= start <= length - count
        off = f"cells {plural(start - prefix, 'token', spec='+d')} off"
        yield score_layout_at(
            start + inside, block_of_cell[inside], str(Layout(TOKENS, layout.grid, start)) if fits else off
        )
    if len(layout.grid) == 2 and min(layout.grid) > 1:
        by_columns = block_of_cell.view(layout.grid).T.reshape(-1)[cells]
        yield score_layout_at(prefix + cells, by_columns, f"{layout} read by columns")
