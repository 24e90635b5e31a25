"""Every architecture of the zoo as it comes: the layer that is chosen, its grid, and the map that plain PyTorch makes there."""

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from camscope.explainers import GradCAM
from tests.zoo import FAMILIES
from tests.zoo.asked import answers, page

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")

ROWS = {f"{family}: {row.name}": row for family, rows in FAMILIES.items() for row in rows}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "models.md"
REPRESENTATIVES = (
    "torchvision: squeezenet1_1",
    "torchvision: convnext",
    "torchvision: vit",
    "timm: vit, 4 registers",
    "timm: cait",
    "Hugging Face: ResNet",
    "Hugging Face: Swin",
    "Hugging Face: YOLOS",
    "custom: U-Net",
    "custom: 3-D transformer",
)  # of each kind of layer and of prefix; `make models` asks all
SAID = {}  # by row: what the methods without an answer say
# before their tokens, convolutions or filters as wide as the picture carry everything everywhere
MIXED = {"torchvision: mvit (video)", "timm: levit", "timm: xcit", "timm: mambaout", "Hugging Face: DETR"}


def pytest_generate_tests(metafunc):
    """All rows where the page is to be written or `--thorough` is given, otherwise the representatives."""
    if "built" in metafunc.fixturenames:
        asked_for_all = any(map(metafunc.config.getoption, ("--write-models", "--thorough")))
        metafunc.parametrize("built", ROWS if asked_for_all else REPRESENTATIVES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def built(request):
    """The row's name, the row, its model, and two inputs; one model at a time is held."""
    row = ROWS[request.param]
    return request.param, row, row.model(), row.inputs(2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def asked(row, output):
    """(N,): the row's question, read off the output by hand."""
    if callable(row.target):
        return row.target(output)
    return (output if isinstance(output, Tensor) else output.logits)[:, row.target]


def kept(row, model, run):
    """The output of the row's layer in its last call while `run` runs: a clone, which the model goes on from."""
    seen = []

    def keep(module, args, output):
        found = output if isinstance(output, Tensor) else output["last_hidden_state"]
        seen.append(found.clone())
        if isinstance(output, Tensor):
            return seen[-1].clone()
        changed = copy.copy(output)
        changed["last_hidden_state"] = seen[-1].clone()
        return changed

    handle = model.get_submodule(row.layer).register_forward_hook(keep)
    try:
        return run(), seen[-1]
    finally:
        handle.remove()


def reference(row, model, x):
    """Grad-CAM and HiResCAM (N,*grid) of the row's layer with autograd alone."""
    score, output = kept(row, model, lambda: asked(row, model(x.clone().requires_grad_())).sum())
    (gradient,) = torch.autograd.grad(score, output)
    activation, gradient = row.by_hand(output.detach()), row.by_hand(gradient)
    space = tuple(range(2, activation.ndim))
    return (gradient.mean(space, keepdim=True) * activation).sum(1).relu(), (gradient * activation).sum(1)


@pytest.mark.slow
def test_the_layer_its_grid_and_its_maps(built):
    _, row, model, x = built
    tool = GradCAM(model)
    gradcam, hirescam = tool.explain_methods(x[0], ["gradcam", "hirescam"], row.target)
    assert (gradcam.layer, gradcam.grid) == (row.layer, row.grid)
    if row.kind == "tokens":
        assert gradcam.layout == f"tokens {row.prefix}+{'x'.join(map(str, row.grid))}"
    expected, signed = reference(row, model, x)
    assert signed.any(), "zeros agree with anything"
    close = {"rtol": 1e-9, "atol": 1e-11 * float(signed.abs().max())}
    np.testing.assert_allclose(gradcam.attribution, expected[0], **close)
    np.testing.assert_allclose(hirescam.attribution, signed[0], **close)
    np.testing.assert_allclose(tool.attribute(x, row.target), expected, **close)


def test_each_cell_lies_over_its_pixels(built):
    """Where tokens are put in order, what a patch of the input changes most is the cell that lies over it."""
    name, row, model, x = built
    if row.kind == "maps" or name in MIXED:
        return  # the order of the cells is the tensor's own, or everything reaches every cell
    cells = list(itertools.product(*map(range, row.grid)))[:: max(1, np.prod(row.grid) // 6)]
    inputs = x[:1].repeat(1 + len(cells), *[1] * (x.ndim - 1))
    for i, cell in enumerate(cells, start=1):
        places = zip(cell, row.grid, row.size[1:], strict=True)
        inputs[(i, slice(None), *(slice(c * s // g, (c + 1) * s // g) for c, g, s in places))] *= -1
    with torch.no_grad():
        maps = row.by_hand(kept(row, model, lambda: model(inputs))[1])
    changes = (maps[1:] - maps[:1]).norm(dim=1)
    hottest = [tuple(np.unravel_index(int(change.argmax()), row.grid)) for change in changes]
    assert hottest == cells


@pytest.mark.slow
@pytest.mark.one_in(12)
def test_every_method_has_a_map_or_a_sentence(built):
    name, row, model, x = built
    refused = answers(row, model.float(), x[0].float())  # which fails for a map that is none
    model.double()
    assert "gradcam" not in refused
    assert all(refused.values()), "each without a map says why"
    SAID[name] = row, refused


def test_the_page_has_every_row():
    text = PAGE.read_text(encoding="utf-8")
    assert all(row.name in text for rows in FAMILIES.values() for row in rows), "make models writes it again"


def test_the_page_says_what_is_measured(request):
    if len(SAID) < len(ROWS):
        pytest.skip("a part of the zoo was asked")
    measured = page({name: SAID[name] for name in ROWS})
    if request.config.getoption("--write-models"):
        PAGE.write_text(measured, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8").splitlines() == measured.splitlines(), "make models writes it again"
