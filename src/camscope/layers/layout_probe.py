"""Layout probe: whether the cells of a layer's output react to the parts of the input that they are drawn over.

A shape alone does not say which token lies where: 64 tokens of a text have the shape of an 8 x 8 grid of patches. So the
model runs three more times. Each run replaces another third of the cells, drawn at random, in the input by noise. A token
that lies over a cell changes most in the run that replaces that cell, and hardly between the other two. What all tokens
take from a run in common is left out, and each token is compared with itself only, so that its scale does not count.

A sequence that is right in most places reacts in place as a whole. So the layout is also compared with others that differ
from it in part: two rows or columns exchanged, some or all of them mirrored, moved on, or read by columns. It is
verified only where it explains the reactions better than each of those, and where no cells stand out from the others.
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

from camscope.errors import LayerError
from camscope.hooks.base import Hooks, autocast_uncached, evaluating, find_layer, here_only, unwrap
from camscope.hooks.mute_hooks import hooks_muted
from camscope.layers.layout import CHANNELS_FIRST, TOKENS, Layout
from camscope.plurals import plural
from camscope.pytree import the_tensor

RUNS = 3
MAX_TOKENS_EACH_ALONE = 64**2  # more of them are replaced in blocks, as the cells of maps
MAX_CELLS_EACH_ALONE = 8  # along an axis of a map; of a finer one, blocks of cells are replaced together
BLOCKS_PER_AXIS = {1: 16, 2: 4, 3: 3}
MAX_SHIFT = 9  # tokens by which a prefix may be wrong
FEW_BLOCKS = 9  # below, agreement by chance is likely, and more of it is asked for
PATTERNS, PATTERN_CELLS = (
    256,
    2**17,
)  # random patterns, and cells of all, of which the one least like itself elsewhere is taken

VERIFIED = ((3.0, 0.25), (2.5, 0.7))  # z and agreement: one pair must be reached
VERIFIED_AGREEMENT_OF_FEW, MIN_REACTION = 0.8, 0.01
LOCAL_REACTION, CHANCE_AGREEMENT = 0.4, 0.2
MAX_WRONG_AGREEMENT = 0.4  # of cells each of which sees one part of the image
LOCALITY, LOCALITY_Z = 0.5, 4.0  # cells of one window react alike: the z alone would be too large
OTHER_PLACE_Z, OTHER_PLACE_AGREEMENT = 3.5, 0.6
OTHER_PLACE_LEAD = 2.5  # by how much the z of the other place is more than that of the layout

SPREADS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8)  # what a cell may take from its neighbor, as a part of its own
SPREAD_CELLS = 3  # how far
MIN_EVIDENCE = 3.0  # log likelihood ratio of the layout against each other order of its cells
MAX_COUNTEREVIDENCE, OTHER_ORDER_FIT = -15.0, 0.7  # of an order that is right instead, and its correlation
SAME_ORDER = 0.98  # correlation of two orders that the pattern does not tell apart
ROUNDING = 1e-5  # of the largest distance between two runs
EXCHANGED = "with two lines exchanged"
WHOLE_ORDERS = ("backwards", "with every other line backwards", "read by columns")
MIN_UNEXPLAINED = 1e-3  # of the reactions, for rounding
MAX_UNEXPLAINED = 0.62  # more of the reactions could hide that a quarter of the tokens is out of place
# median by mean of what is unexplained of a cell; its part of all reactions; what tokens out of place leave of agreement
PATCHY_RATIO, PATCHY_UNEXPLAINED, PATCHY_AGREEMENT = 0.4, 0.08, 0.96

Run = Callable[[Tensor], object]
Read = Callable[[Run, Tensor], "list[Tensor | None]"]


class Verdict(Enum):
    """What is known of a layout."""

    BY_CONSTRUCTION = "by construction"  # windows over the input and elementwise steps made the map
    VERIFIED = "verified"
    CONTRADICTED = "contradicted"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Finding:
    """A verdict; where the layout is contradicted, what was seen instead."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Place:
    """An output of a model: that of a layer, of one of its calls. `output`: see `the_tensor`."""

    layer: str
    output: str | int | None = None
    call: int | None = None


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by model: by layer: by place, input size and layout: a finding
_lock = threading.RLock()


def known_finding(model: nn.Module, place: Place, size: Sequence[int], layout: Layout) -> Finding | None:
    """What is known already of a layout for inputs (C,*S) of this size."""
    with _lock:
        return _findings(model, place).get((place, tuple(size), str(layout)))


def is_known(model: nn.Module, place: Place, size: Sequence[int]) -> bool:
    """Whether anything is known already of any call of a layer for inputs of this size."""
    with _lock:
        found = _findings(model, place)
        return any((one.output, known) == (place.output, tuple(size)) for one, known, _ in found)


def remember(model: nn.Module, place: Place, size: Sequence[int], layout: Layout, finding: Finding) -> Finding:
    """Keep a finding for as long as the model and the layer live."""
    with _lock:
        _findings(model, place)[place, tuple(size), str(layout)] = finding
    return finding


def _findings(model: nn.Module, place: Place) -> dict[tuple[Place, tuple[int, ...], str], Finding]:
    of_model: WeakIdKeyDictionary = _known.setdefault(unwrap(model), WeakIdKeyDictionary())
    found: dict[tuple[Place, tuple[int, ...], str], Finding] = of_model.setdefault(
        find_layer(model, place.layer)[1], {}
    )
    return found


def prove(
    model: nn.Module,
    places: Sequence[Place],
    layout: Layout,
    x: Tensor,
    run: Run,
    *,
    read: Read | None = None,
    shares: Sequence[float] | None = None,
) -> list[Finding]:
    """For each place, whether its output has this layout for inputs like x (N,C,*S): from three forward passes `run`.

    They run in eval mode, without the hooks of others and without gradients, and leave the random numbers as they are. What
    is known is not asked again. `read(run, x)`: takes the outputs of the places out of a pass, where they are not those of
    layers. `shares`: which part of its own plane a model that pads takes from the input, by axis.
    """
    size = x.shape[1:]
    known = [known_finding(model, place, size, layout) for place in places]
    if None in known:
        with hooks_muted(model), _undisturbed(model, x):  # one thread at a time: the next one knows what this one found
            unknown = [place for place in places if known_finding(model, place, size, layout) is None]
            rows = measured(read or partial(_outputs, model, unknown), layout, x, run, shares=shares) if unknown else []
            for place, finding in zip(unknown, rows or [Finding(Verdict.UNDECIDED)] * len(unknown), strict=True):
                remember(model, place, size, layout, finding)
        known = [known_finding(model, place, size, layout) for place in places]
    return [finding for finding in known if finding is not None]


def measured(
    read: Read, layout: Layout, x: Tensor, run: Run, *, shares: Sequence[float] | None = None
) -> list[Finding]:
    """What three passes say of each tensor that `read(run, x)` takes out of one; [] where the model fails."""
    blocks = _blocks(layout)
    labels = _pattern(blocks, seed=0)
    cells = _spread(labels.view(blocks), layout.grid)
    outputs: list[list[Tensor | None]] = []
    for some in (x[:1], x) if len(x) > 1 else (x,):  # one sample is enough, if the model takes one
        try:
            outputs = [read(run, variant) for variant in _variants(some, cells, layout, shares)]
            break
        except Exception:  # noqa: S112 - the model's own: it may not take such a batch
            continue
    covered = _covered(layout.grid, x.shape[2:], shares)
    return [_judged(tensors, layout, labels, blocks, covered) for tensors in zip(*outputs, strict=True)]


@contextmanager
def _undisturbed(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Eval mode, no gradients, and all random numbers as they were afterwards."""
    state, numpy_state = random.getstate(), np.random.get_state()
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.no_grad(),
            autocast_uncached(),
            evaluating(unwrap(model)),
        ):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _outputs(model: nn.Module, places: Sequence[Place], run: Run, x: Tensor) -> list[Tensor | None]:
    """What a pass gives at each place; None where there is nothing to look at."""
    calls: list[list[Tensor]] = [[] for _ in places]

    def keep(number: int, module: nn.Module, args: object, output: object) -> None:
        calls[number].append(the_tensor(places[number].layer, output, places[number].output)[1].detach().clone())

    with Hooks() as hooks:
        for number, place in enumerate(places):
            module = find_layer(model, place.layer)[1]
            hooks.hold(module.register_forward_hook(here_only(partial(keep, number))))
        try:
            run(x)
        except Exception:
            if not all(calls):  # what comes behind the layers does not matter
                raise
    chosen = zip(calls, (place.call for place in places), strict=True)
    return [some[-1 if call is None else call] if len(some) > (call or 0) else None for some, call in chosen]


def _blocks(layout: Layout) -> tuple[int, ...]:
    """Into how many parts each axis of the grid is divided: those are replaced as a whole."""
    grid = layout.grid
    if layout.kind == TOKENS and math.prod(grid) <= MAX_TOKENS_EACH_ALONE:
        return tuple(grid)
    return tuple(
        cells if cells <= MAX_CELLS_EACH_ALONE and len(grid) < 3 else min(cells, BLOCKS_PER_AXIS.get(len(grid), 2))
        for cells in grid
    )


@lru_cache(maxsize=64)
def _pattern(blocks: tuple[int, ...], seed: int) -> Tensor:
    """(blocks,): the run that replaces each block; as unlike itself shifted or in another order as can be."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    count = math.prod(blocks)
    even = torch.arange(count, device="cpu") % RUNS
    drawn = [
        even[torch.randperm(count, generator=generator, device="cpu")]
        for _ in range(max(8, min(PATTERNS, PATTERN_CELLS // count)))
    ]

    def likeness(labels: Tensor) -> float:
        shifted = [float((labels[k:] == labels[:-k]).double().mean()) for k in range(1, min(count - 1, MAX_SHIFT) + 1)]
        field = _expected(labels, blocks, 0.0)
        orders = [(value, name) for value, name in _other_orders(field, field, similar=True) if value.numel()]
        # of single cells, some always have the same label
        other = [float(value.max()) for value, name in orders if len(blocks) > 1 or name != EXCHANGED]
        return max((*shifted, *other), default=0.0)

    return min(drawn, key=likeness)


def _spread(values: Tensor, size: Sequence[int]) -> Tensor:
    """(*blocks) -> (*size): each entry over its part of a finer grid."""
    for axis, (length, count) in enumerate(zip(size, values.shape, strict=True)):
        values = values.index_select(axis, torch.arange(length, device=values.device) * count // length)
    return values


def _cell_of_pixel(cells: int, pixels: int, share: float) -> Tensor:
    return (torch.arange(pixels, device="cpu") * (cells * share / pixels)).long().clamp(max=cells - 1)


def _covered(grid: Sequence[int], size: Sequence[int], shares: Sequence[float] | None) -> Tensor:
    """(cells,): which of them lie over the input: some may lie over padding, or be finer than its pixels."""
    covered = torch.ones(tuple(grid), dtype=torch.bool, device="cpu")
    for axis, (cells, pixels) in enumerate(zip(grid, size, strict=True)):
        present = torch.zeros(cells, dtype=torch.bool, device="cpu")
        present[_cell_of_pixel(cells, pixels, shares[axis] if shares else 1.0)] = True
        covered &= present.view([-1 if i == axis else 1 for i in range(len(grid))])
    return covered.reshape(-1)


def _variants(x: Tensor, cells: Tensor, layout: Layout, shares: Sequence[float] | None) -> Iterator[Tensor]:
    """Three versions of x (N,C,*S), each with another third of the cells replaced by noise."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    space = tuple(range(2, x.ndim))
    places = [
        _cell_of_pixel(count, pixels, shares[axis] if shares else 1.0)
        for axis, (count, pixels) in enumerate(zip(layout.grid, x.shape[2:], strict=True))
    ]
    label = cells
    for axis, place in enumerate(places):
        label = label.index_select(axis, place)
    label = label.to(x.device)
    values = x.detach().float()
    low, high = values.amin(space, keepdim=True), values.amax(space, keepdim=True)
    fine = torch.rand(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(values)
    coarse = torch.rand((*x.shape[:2], *layout.grid), generator=generator, dtype=torch.float32, device="cpu").to(values)
    for axis, place in enumerate(places, start=2):
        coarse = coarse.index_select(axis, place.to(x.device))
    uniform = bool((low == high).all())
    span = torch.where(high > low, high - low, high.abs().clamp(min=1) if uniform else 0)
    noise = low + span * (fine + coarse) / 2
    if uniform:  # nothing in it differs from anything else: noise on noise
        values = low + span * torch.rand(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(values)
    for number in range(RUNS):
        yield torch.where(label == number, noise, values).to(x.dtype)


def _rows(output: Tensor, layout: Layout) -> Tensor | None:
    """(N,T,K): every position of an output, those of the prefix too; None where it has not this layout."""
    grid = tuple(layout.grid)
    if layout.kind == TOKENS:
        fits = output.ndim == 3 and output.shape[1] >= layout.prefix + math.prod(grid)
        return output if fits else None
    if layout.kind == CHANNELS_FIRST:
        return output.flatten(2).mT if tuple(output.shape[2:]) == grid else None
    return output.flatten(1, -2) if tuple(output.shape[1:-1]) == grid else None


def _judged(
    outputs: Sequence[Tensor | None], layout: Layout, labels: Tensor, blocks: Sequence[int], covered: Tensor
) -> Finding:
    rows = [None if one is None else _rows(one, layout) for one in outputs]
    usable = [row.float() if row.dtype != torch.float64 else row for row in rows if row is not None]
    if len(usable) < RUNS or len({row.shape for row in usable}) > 1:
        return Finding(Verdict.UNDECIDED)
    # [p]: how far the two runs are apart that leave the cells of run p as they are
    apart = torch.stack([_distance(usable[p - 1] - usable[p - 2], layout) for p in range(RUNS)]).cpu()
    if not bool(apart.isfinite().all()):
        return Finding(Verdict.UNDECIDED)
    return judge(apart, layout, labels, blocks, covered)


def _distance(difference: Tensor, layout: Layout) -> Tensor:
    """(N,T,K) -> (T,): how far two runs are apart at each position, without what they are at all positions of the grid."""
    start = layout.prefix if layout.kind == TOKENS else 0
    common = difference[:, start : start + math.prod(layout.grid)].mean(1, keepdim=True)
    apart = (difference - common).norm(dim=-1)
    scale = difference.norm(dim=-1).amax()  # what is left of equal numbers is rounding
    return torch.where(apart > ROUNDING * scale, apart, 0).double().mean(0)


def judge(
    apart: Tensor, layout: Layout, labels: Tensor, blocks: Sequence[int], covered: Tensor | None = None
) -> Finding:
    """What the distances (3,T) between the runs at every position say of a layout.

    `labels` (blocks,): the run that replaces each; `apart[p]`: between the two runs that leave the cells of run p.
    """
    grid = layout.grid
    count = math.prod(grid)
    start = layout.prefix if layout.kind == TOKENS else 0
    cells = torch.arange(count, device="cpu")[covered] if covered is not None else torch.arange(count, device="cpu")
    block_of_cell = _spread(torch.arange(math.prod(blocks), device="cpu").view(*blocks), grid).reshape(-1)
    total = apart.sum(0)
    if not bool((total[start + cells] > 0).any()):
        return Finding(Verdict.CONTRADICTED, "it does not depend on the image")
    # 1 where only run p differs from the other two, -1/2 for those; 0 where all differ alike
    reaction = torch.where(total > 0, (total - 3 * apart) / torch.where(total > 0, total, 1), 0)

    blocks_here = block_of_cell[cells]
    here = _centered(reaction[:, start + cells])
    own, spread = _score(here, labels[blocks_here], blocks_here)
    local = float(here.amax(0).mean())
    agreement, z = own / local if local > 0 else 0.0, own / spread
    few = len(labels) < FEW_BLOCKS

    best = max(_other_places(reaction, labels, block_of_cell, cells, layout), default=(0.0, 0.0, ""))
    if local < MIN_REACTION:
        return Finding(Verdict.UNDECIDED)
    order = _order(here, labels, blocks, blocks_here, strict=layout.kind == TOKENS)
    if order.is_sure:
        if few and agreement >= VERIFIED_AGREEMENT_OF_FEW:
            return Finding(Verdict.VERIFIED)
        if own >= best[0] and any(z >= least and agreement >= part for least, part in VERIFIED):
            return Finding(Verdict.VERIFIED)
    if order.is_wrong and not few:
        return Finding(
            Verdict.CONTRADICTED, f"its cells react to other parts of the image; they react like {layout} {order.other}"
        )
    if few:  # they disagree, or agree with one of several other places, by chance
        return Finding(Verdict.UNDECIDED)
    elsewhere = (
        best[0] >= max(OTHER_PLACE_AGREEMENT * local, MIN_REACTION)
        and best[1] >= OTHER_PLACE_Z
        and best[1] - own / spread >= OTHER_PLACE_LEAD
    )
    is_wrong = local >= LOCAL_REACTION and agreement <= CHANCE_AGREEMENT
    is_wrong = is_wrong or (agreement <= MAX_WRONG_AGREEMENT and _is_local(here))
    if elsewhere or is_wrong:
        like = f"; they react like {best[2]}" if elsewhere else ""
        return Finding(Verdict.CONTRADICTED, f"its cells react to other parts of the image{like}")
    return Finding(Verdict.UNDECIDED)


@dataclass(frozen=True)
class Order:
    """How a layout compares with other orders of its cells: `other` is the best of them, or ""."""

    is_sure: bool
    is_wrong: bool
    other: str = ""


def _order(values: Tensor, labels: Tensor, blocks: Sequence[int], block: Tensor, *, strict: bool) -> Order:
    """Whether cells (3,cells) of the blocks `block` (cells,) react in this order rather than in another.

    `strict`: whether single rows and columns may be out of place, as those of a sequence of tokens may, but not of a map.
    """
    count = math.prod(blocks)
    sums = values.new_zeros(RUNS, count).index_add_(1, block, values)
    cells = values.new_zeros(count).index_add_(0, block, values.new_ones(len(block)))
    covered = cells > 0
    reaction = torch.where(covered, sums / cells.clamp(min=1), 0)
    reaction = torch.where(covered, reaction - reaction[:, covered].mean(1, keepdim=True), 0).view(RUNS, *blocks)
    size = float(reaction.norm())
    if size == 0 or int(covered.sum()) < 2:
        return Order(is_sure=False, is_wrong=False)
    fields = [torch.where(covered.view(*blocks), _expected(labels, blocks, spread), 0).to(values) for spread in SPREADS]
    fits = [float((reaction * field).sum() / (size * field.norm())) for field in fields]
    fit = max(fits)
    field = fields[fits.index(fit)]
    evidence, name, fit_of_other = math.inf, "", 0.0
    fitting = _other_orders(reaction, field, similar=False)
    likeness = _other_orders(field, field, similar=True)
    unexplained = 1 - max(fit, 0.0) ** 2 + MIN_UNEXPLAINED
    for (found, other), (same, _) in zip(fitting, likeness, strict=True):
        told_apart = found[same < SAME_ORDER] / (size * float(field.norm()))
        if len(told_apart) and (strict or other in WHOLE_ORDERS):
            best = float(told_apart.max())
            ratio = int(covered.sum()) * math.log((1 - max(best, 0.0) ** 2 + MIN_UNEXPLAINED) / unexplained)
            if ratio < evidence:
                evidence, name, fit_of_other = ratio, other, best
    # as many tokens out of place as leave so much unexplained cost as much agreement; uneven reactions in place do not
    agreement = float(reaction.flatten(1).gather(0, labels[None])[0, covered].sum())
    agreement /= float(reaction.flatten(1).amax(0)[covered].sum())
    rest = (
        (reaction - reaction.new_tensor(fit * size / float(field.norm())) * field).square().sum(0).reshape(-1)[covered]
    )
    patchy = unexplained >= PATCHY_UNEXPLAINED and float(rest.median()) < PATCHY_RATIO * float(rest.mean())
    patchy = patchy and agreement < PATCHY_AGREEMENT
    in_part = strict and (patchy or unexplained > MAX_UNEXPLAINED)
    return Order(
        is_sure=evidence >= (MIN_EVIDENCE if strict else 0) and not in_part,
        is_wrong=evidence <= MAX_COUNTEREVIDENCE and fit_of_other >= OTHER_ORDER_FIT,
        other=name,
    )


def _expected(labels: Tensor, blocks: Sequence[int], spread: float) -> Tensor:
    """(3,*blocks): how much each block is expected to react to each run, if it takes a part from its neighbors."""
    plane = nn.functional.one_hot(labels, RUNS).mT.double().view(RUNS, *blocks)
    for axis, length in enumerate(blocks, start=1):
        place = torch.arange(length, device=labels.device)
        away = (place[:, None] - place).abs()
        weights = torch.where(away <= SPREAD_CELLS, spread ** away.double(), 0)  # 0 ** 0 is 1
        plane = torch.tensordot(plane, weights, dims=([axis], [1])).movedim(-1, axis)
    plane = plane - plane.mean(0)
    return plane - plane.flatten(1).mean(1).view(-1, *[1] * len(blocks))


def _other_orders(reaction: Tensor, field: Tensor, *, similar: bool) -> Iterator[tuple[Tensor, str]]:
    """The products of reactions and fields (3,*blocks) in other orders, (orders,) each, and what is different in them.

    `similar`: as parts of the product of the field with itself, and of those cells only that are elsewhere.
    """
    own = (reaction * field).sum()
    axes = range(1, field.ndim)

    def of_orders(change: Tensor, moved: Tensor) -> Tensor:
        return 1 + change / moved.clamp(min=1e-12) if similar else own + change

    for axis in axes:
        lines, others = (one.movedim(axis, 1).reshape(RUNS, one.shape[axis], -1) for one in (reaction, field))
        products = torch.einsum("pic,pjc->ij", lines, others)
        line = products.diagonal()
        first, second = torch.triu_indices(len(line), len(line), 1, device=field.device)
        moved = line[first] + line[second]
        yield of_orders(products[first, second] + products[second, first] - moved, moved), EXCHANGED
        for mirrored in axes:
            turned = (reaction * field.flip(mirrored)).movedim(axis, 0).flatten(1).sum(1) - line
            if mirrored == axis:
                yield of_orders(turned.sum()[None], line.sum()[None]), "backwards"
                continue
            yield of_orders(turned, line), "with a line backwards"
            halves = [(turned[start::2].sum(), line[start::2].sum()) for start in (0, 1)]
            change, moved = (torch.stack(values) for values in zip(*halves, strict=True))
            yield of_orders(change, moved), "with every other line backwards"
        if len(line) > 1:
            rolled = torch.stack([(reaction * field.roll(by, axis)).sum() for by in range(1, len(line))])
            yield of_orders(rolled - own, own[None]), "moved on by some lines"
    if field.ndim == 3:
        turned = (reaction * field.mT.reshape(field.shape)).sum()[None]
        yield of_orders(turned - own, own[None]), "read by columns"


def _centered(values: Tensor) -> Tensor:
    """What a run does to all positions alike says nothing of their places."""
    return values - values.mean(1, keepdim=True)


def _is_local(values: Tensor) -> bool:
    """Whether the cells (3,cells) react to one run and to the other two alike, wherever that part of the image lies.

    A reaction is a direction in a plane, as the three numbers add up to 0. That of a cell which sees one part of the image is
    one of three, 120 degrees apart; noise, or a mixture of many parts, has any.
    """
    angle = torch.atan2((values[1] - values[2]) * math.sqrt(3), 2 * values[0] - values[1] - values[2])
    locality = float((3 * angle).cos().mean())
    return locality >= LOCALITY and locality * math.sqrt(2 * values.shape[1]) >= LOCALITY_Z


def _score(values: Tensor, label: Tensor, block: Tensor) -> tuple[float, float]:
    """How much the cells (3,cells) react to the runs `label` (cells,), and how much chance makes of that for other labels.

    Chance: the standard deviation if each block had a label at random.
    """
    cells = values.shape[1]
    of_block = torch.zeros(RUNS, int(block.max()) + 1, dtype=values.dtype, device=values.device).index_add_(
        1, block, values
    )
    spread = float(of_block.square().mean(0).sum().sqrt()) / cells
    return float(values[label, torch.arange(cells, device=values.device)].mean()), spread + 1e-12


def _other_places(
    reaction: Tensor, labels: Tensor, block_of_cell: Tensor, cells: Tensor, layout: Layout
) -> Iterator[tuple[float, float, str]]:
    """Score, its z and its name, of the same cells at other positions of the sequence, or by columns."""
    count, length = len(block_of_cell), reaction.shape[1]
    if layout.kind != TOKENS:
        return
    for start in _starts(length, count, layout.prefix):
        inside = (start + cells >= 0) & (start + cells < length)
        if start == layout.prefix or int(inside.sum()) * 2 < len(cells) or int(inside.sum()) < 2:
            continue
        block = block_of_cell[cells[inside]]
        found, spread = _score(_centered(reaction[:, start + cells[inside]]), labels[block], block)
        fits = 0 <= start <= length - count
        name = (
            str(Layout(TOKENS, layout.grid, start))
            if fits
            else f"cells {plural(start - layout.prefix, 'token', spec='+d')} off"
        )
        yield found, found / spread, name
    if len(layout.grid) == 2 and min(layout.grid) > 1:
        block = block_of_cell.view(layout.grid).T.reshape(-1)[cells]
        found, spread = _score(_centered(reaction[:, layout.prefix + cells]), labels[block], block)
        yield found, found / spread, f"{layout} read by columns"


def _starts(length: int, count: int, prefix: int) -> Iterator[int]:
    """Where the grid may begin instead: anywhere that it fits, and a few tokens off."""
    yield from {*range(length - count + 1), *range(prefix - MAX_SHIFT, prefix + MAX_SHIFT + 1)}


def refusal(name: str, layout: Layout, reason: str) -> LayerError:
    """The error for a layout that is contradicted."""
    return LayerError(
        f"{name}: its output was read as {layout}, but {reason}, as forward passes with other contents of some cells show; "
        f"choose another layer, or pass layout= or reshape= if you know where the image is"
    )
