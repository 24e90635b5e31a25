"""RefineCAM as the other toolkits have it, with their Grad-CAM++ inside; see `choices`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.by_grad_cam import enlarged, finish, stretched
from benchmarks.cases import Case
from benchmarks.choices import AbsoluteEpsilon, NoDenominator
from benchmarks.tool import stages


def at_the_input(case: Case) -> Tensor:
    """(N,H,W): the product at the input's size (grad-cam)."""
    maps = [finish(case)(AbsoluteEpsilon(case.model, name).attribute(case.x, case.classes)) for name in stages(case)]
    return enlarged(case, torch.stack(maps).prod(0))


def stretched_once(case: Case) -> Tensor:
    """(N,h,w): the product on the finest grid of maps that are not stretched again once they are enlarged (torchcam)."""
    maps = [stretched(NoDenominator(case.model, name).attribute(case.x, case.classes)) for name in stages(case)]
    finest = max((one.shape[1:] for one in maps), key=lambda shape: shape.numel())
    return torch.stack([F.interpolate(one[:, None], finest, mode="bilinear")[:, 0] for one in maps]).prod(0)
