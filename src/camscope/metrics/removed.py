"""Which pixels are removed together: regions in the order of a map, random sets of them, random squares."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from camscope.explainers.draws import seeds
from camscope.explainers.segments import parts_of_grid

Masks = Callable[[slice], Tensor]  # some of many sets of removed pixels: (R,*S) bool, the same for every image


def regions(size: Sequence[int], side: int, device: torch.device) -> tuple[Tensor, int]:
    """(*S) int64: the number of each pixel's square of so many pixels, all as equal as they can be; and how many there are."""
    cells = torch.Size([-(-length // side) for length in size])
    return parts_of_grid(size, cells, device), cells.numel()


def ranked(maps: Tensor, labels: Tensor, total: int, ties: Sequence[int]) -> Tensor:
    """(N,*S), the regions of `regions` -> (N,*S) int32: the place of each pixel's region, the one of the largest mean at 0.

    Ties are broken by a random order, from the image's own seed in `ties`.
    """
    values = maps.flatten(1).nan_to_num()
    if total < values.shape[1]:
        sums = values.new_zeros(len(values), total).index_add_(1, labels.flatten(), values)
        values = sums / labels.flatten().bincount(minlength=total)
    orders = {
        seed: torch.randperm(total, generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu")
        for seed in set(ties)
    }
    drawn = torch.stack([orders[seed] for seed in ties]).to(values.device)
    order = drawn.gather(1, values.gather(1, drawn).argsort(dim=1, descending=True, stable=True))
    places = torch.arange(total, dtype=torch.int32, device=values.device).expand_as(order)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order, places)[:, labels]


def random_sets(labels: Tensor, total: int, count: int, turns: int, seed: int) -> Masks:
    """So many sets, each of `count` of the regions."""
    each = seeds(turns, torch.Generator(device="cpu").manual_seed(seed))

    def masks(part: slice) -> Tensor:
        chosen = torch.zeros(part.stop - part.start, total, dtype=torch.bool, device="cpu")
        for row, own in enumerate(each[part]):
            chosen[
                row,
                torch.randperm(total, generator=torch.Generator(device="cpu").manual_seed(own), device="cpu")[:count],
            ] = True
        return chosen.to(labels.device)[:, labels]

    return masks


def random_squares(size: Sequence[int], most: int, turns: int, seed: int, device: torch.device) -> Masks:
    """So many squares, cubes, or stretches, of 1 to `most` pixels a side, each side and each place as likely."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sides = torch.randint(1, most + 1, (turns,), generator=generator, device="cpu")
    places = torch.rand(turns, len(size), generator=generator, dtype=torch.float64, device="cpu")

    def masks(part: slice) -> Tensor:
        inside = torch.ones(1, dtype=torch.bool, device=device)
        for axis, length in enumerate(size):
            side = sides[part].clamp(max=length)
            first = (places[part, axis] * (length - side + 1)).long()
            pixels = torch.arange(length, device="cpu")
            along = (pixels >= first[:, None]) & (pixels < (first + side)[:, None])
            shape = [len(along), *[1] * axis, length, *[1] * (len(size) - 1 - axis)]
            inside = inside & along.view(shape).to(device)
        return inside

    return masks
