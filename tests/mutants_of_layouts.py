"""Plausible slips in what follows the cells of a map through a model, as in `tests.mutants`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.hooks import input_extent_of_map
from camscope.hooks.spatial_map_tracker import SpatialMapTracker
from tests.mutants import Mutant


def gives_a_map(move: Callable[[Tensor], Tensor], kernel: int = 3) -> bool:
    """Whether what a convolution makes of the moved image is trusted."""
    x = torch.linspace(0, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    model = nn.Conv2d(3, 3, kernel, padding=1)
    with torch.no_grad(), SpatialMapTracker(model, x) as tracker:
        output = model(move(x))
    return tracker.is_spatial_map(output)


def only_planes_in_order_give_maps() -> None:
    assert gives_a_map(lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
    assert not gives_a_map(lambda x: x[:, :, [0, 2, 1, *range(3, 16)]])


def shifted_by_one(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (1, -1)), 1)


def shifts_that_add_up_give_no_map() -> None:
    assert gives_a_map(lambda x: F.pad(x, (1, 1)))
    assert not gives_a_map(lambda x: shifted_by_one(shifted_by_one(x)))


def a_padded_plane_is_a_shifted_one() -> None:
    assert not gives_a_map(lambda x: F.pad(x, (4, -4)))


def the_middle_of_a_plane_gives_no_map() -> None:
    assert gives_a_map(lambda x: x[..., 1:-1, 1:-1])
    assert not gives_a_map(lambda x: x[..., 2:-2, 2:-2])


def a_border_gives_no_map() -> None:
    assert not gives_a_map(lambda x: F.pad(x, (2, 2)))


def a_border_for_the_window_gives_a_map() -> None:
    assert gives_a_map(lambda x: F.pad(x, (2, 2, 2, 2)), kernel=7)


def a_large_window_leaves_the_middle() -> None:
    assert not gives_a_map(lambda x: x, kernel=11)


def what_comes_from_elsewhere_gives_no_map() -> None:
    assert not gives_a_map(lambda x: 0 * x + torch.from_numpy(x.numpy().copy()))


def what_comes_from_numbers_gives_no_map() -> None:
    assert gives_a_map(lambda x: x + torch.linspace(0, 1, 16))
    assert not gives_a_map(lambda x: 0 * x + torch.tensor(x.flip(-1).tolist()))


def written_through_a_view(x: Tensor) -> Tensor:
    y = x * 1
    y.view(-1).copy_(x.flip(-1).reshape(-1))
    return y


def written_through_numpy(x: Tensor) -> Tensor:
    y = x * 1
    y.numpy()[:] = x.flip(-1).numpy()
    return y


def a_plane_that_a_view_wrote_gives_no_map() -> None:
    assert not gives_a_map(written_through_a_view)


def a_plane_that_numpy_wrote_gives_no_map() -> None:
    assert not gives_a_map(written_through_numpy)


OF_LAYOUTS = [
    Mutant(
        "any order of cells",
        input_extent_of_map,
        "find_channel_extents",
        "if valid else None",
        "if True else None",
        only_planes_in_order_give_maps,
    ),
    Mutant(
        "any shift",
        input_extent_of_map,
        "covers_input_evenly",
        "shift * cells > MAX_SHIFT or",
        "False or",
        shifts_that_add_up_give_no_map,
    ),
    Mutant(
        "padding shifts nothing",
        input_extent_of_map,
        "compute_output_extent",
        "axis.low - step * before, axis.high + step * after",
        "axis.low, axis.high",
        a_padded_plane_is_a_shifted_one,
    ),
    Mutant(
        "any stretch",
        input_extent_of_map,
        "covers_input_evenly",
        "margin > MAX_MARGIN and",
        "False and",
        a_large_window_leaves_the_middle,
    ),
    Mutant(
        "any crop",
        input_extent_of_map,
        "covers_input_evenly",
        "> MAX_CUT",
        "> 1",
        the_middle_of_a_plane_gives_no_map,
    ),
    Mutant(
        "any border",
        input_extent_of_map,
        "_apply_window_margin",
        "share if share > _add_rounding_margin(cell_size) else 0.0",
        "0.0",
        a_border_gives_no_map,
    ),
    Mutant(
        "no window needs its border",
        input_extent_of_map,
        "_apply_window_margin",
        "max(0.0, pad + min(margin, 0.0))",
        "pad",
        a_border_for_the_window_gives_a_map,
    ),
    Mutant(
        "windows reach the border",
        input_extent_of_map,
        "compute_output_extent",
        "else after * step / before",
        "else 1.0",
        a_large_window_leaves_the_middle,
    ),
    Mutant(
        "the unknown is constant",
        SpatialMapTracker,
        "_read_cell_numbers_or_none",
        "return None if record is None",
        "return self._build_unknown_cell_numbers_like(tensor) if record is None",
        what_comes_from_elsewhere_gives_no_map,
    ),
    Mutant(
        "what no tensor made is constant",
        SpatialMapTracker,
        "_find_result_cell_numbers",
        "(sources and all(",
        "(all(",
        what_comes_from_numbers_gives_no_map,
    ),
    Mutant(
        "changes unnoticed",
        SpatialMapTracker,
        "_find_record",
        "record.version != _get_version(tensor)",
        "False",
        a_plane_that_a_view_wrote_gives_no_map,
    ),
    Mutant(
        "memory handed out",
        SpatialMapTracker,
        "run_intercepted_function",
        "if name in EXPORT_FUNCTIONS:",
        "if False:",
        a_plane_that_numpy_wrote_gives_no_map,
    ),
]
