"""Maps on a card: the CPU's maps, with autocast, channels last, streams and threads. CAMSCOPE_DEVICE=cuda names the card."""

import threading

import pytest
import torch
from torch import nn

from camscope.errors import InputError
from camscope.explainers import METHODS
from tests.nets import CASES, DEVICE
from tests.refusals import answers, first_answered, residual_or_plainer
from tests.tools import by_family, by_family_with, explainer
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
CPU = torch.device("cpu")
ON_A_CARD = pytest.mark.skipif(DEVICE == CPU, reason="CAMSCOPE_DEVICE names no card")
ON_CUDA = pytest.mark.skipif(DEVICE.type != "cuda", reason="CAMSCOPE_DEVICE names no CUDA card")
# Without a card each of these is one skipped test, not one for every method.
EVERY_METHOD_OF_A_CARD = pytest.mark.parametrize("method", METHODS if DEVICE != CPU else ["every method"])
EVERY_METHOD_AND_CASE_OF_A_CARD = pytest.mark.parametrize(
    ("method", "case"),
    [pytest.param(m, CASES[c], id=f"{m}-{c}") for m in METHODS for c in CASES if answers(m, c)]
    if DEVICE != CPU
    else [("every method", "every case")],
)
# On the CPU all methods meet threads in test_semantics_state, and channels last and bfloat16 in test_semantics_numbers.
REPRESENTATIVES_OR_EVERY_METHOD = pytest.mark.parametrize("method", by_family(METHODS) if DEVICE == CPU else METHODS)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest value of a map
# Steps of an optimizer follow the sign of a gradient that may be rounding, and probabilities differ less than scores.
IN_FLOAT32 = {"extremalperturbation": 0.1, "vitcx": 1e-3}


@pytest.fixture(autouse=True)
def every_digit(monkeypatch):
    """A card's convolutions keep the digits of float32: cuDNN rounds to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def apart(one, other):
    """The largest difference of two batches of maps, over the largest value of the first, by batch."""
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    assert one.shape == other.shape
    return float((one - other).abs().max() / one.abs().max().clamp_min(torch.finfo(one.dtype).tiny))


@ON_A_CARD
@EVERY_METHOD_AND_CASE_OF_A_CARD
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_map_of_a_card_is_the_map_of_the_cpu(method, case, dtype):
    (model, x), (there, y) = case.make(dtype=dtype, device=CPU), case.make(dtype=dtype)
    expected = explainer(method, model, case.layer).attribute(x, 1)
    with untouched(there, y):
        found = explainer(method, there, case.layer).attribute(y, 1)
    assert (found.shape, found.dtype, found.device) == (expected.shape, dtype, y.device)
    assert found.isfinite().all()
    loose = IN_FLOAT32.get(method, 0) if dtype == torch.float32 else 0
    assert apart(expected, found) <= max(TOLERANCE[dtype], loose)


@ON_A_CARD
@EVERY_METHOD_OF_A_CARD
def test_a_tensor_that_is_not_where_the_model_is_is_refused(method):
    case = residual_or_plainer(method)
    model, x = case.make()
    with untouched(model, x), pytest.raises(InputError, match="the input is on cpu, but the model is on"):
        explainer(method, model, case.layer).explain(x[0].cpu(), 1)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *((method, torch.float16) for method in METHODS),
        *(by_family_with(METHODS, torch.bfloat16) if DEVICE == CPU else ((m, torch.bfloat16) for m in METHODS)),
    ],
    ids=str,
)
@pytest.mark.by_family
def test_autocast_leaves_maps_finite_and_nothing_else(method, dtype):
    case = first_answered(method, "pooled", "flat", "tokens")
    model, x = case.make()
    settings = {"epsilon": 1e-3} if method == "lrp" else {}  # without one it divides by what half precision lost
    tool = explainer(method, model, case.layer, **settings)
    with untouched(model, x), torch.autocast(DEVICE.type, dtype):
        heat = tool.attribute(x, 1)
        assert torch.is_autocast_enabled(DEVICE.type)
    assert (heat.shape, heat.device) == (tool.attribute(x, 1).shape, x.device)
    assert heat.dtype == torch.float32
    assert heat.isfinite().all()


@REPRESENTATIVES_OR_EVERY_METHOD
def test_channels_last_changes_no_map_beyond_rounding(method):
    case = first_answered(method, "pooled", "flat", "tokens")
    model, x = case.make(dtype=torch.float64)
    expected = explainer(method, model, case.layer).attribute(x, 1)
    model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    with untouched(model, x):
        found = explainer(method, model, case.layer).attribute(x, 1)
    assert apart(expected, found) <= TOLERANCE[torch.float64]


@ON_CUDA
@EVERY_METHOD_OF_A_CARD
def test_a_stream_of_its_own_has_the_same_map(method):
    case = residual_or_plainer(method)
    model, x = case.make(dtype=torch.float64)
    tool = explainer(method, model, case.layer)
    expected = tool.attribute(x, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = tool.attribute(x, 1)
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    assert apart(expected, found) <= TOLERANCE[torch.float64]


@REPRESENTATIVES_OR_EVERY_METHOD
@pytest.mark.one_in(4)
def test_threads_share_a_model_and_have_their_own_maps(method):
    case = residual_or_plainer(method)
    model, x = case.make(dtype=torch.float64)
    tool = explainer(method, model, case.layer)
    expected = [tool.attribute(x, target) for target in range(3)]
    found, failed = {}, []

    def work(target):
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if DEVICE.type == "cuda" else torch.enable_grad():
                found[target] = [tool.attribute(x, target) for _ in range(3)]
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            failed.append(error)

    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(target,)) for target in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for target, heats in found.items():
        assert max(apart(expected[target], heat) for heat in heats) <= TOLERANCE[torch.float64]


@ON_CUDA
def test_memory_of_a_card_is_given_back():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)
    )
    model, x = model.to(DEVICE).eval(), torch.randn(2, 3, 64, 64, device=DEVICE)
    for method in ("gradcam", "scorecam", "integratedgradients", "rise", "occlusion", "fullgrad"):
        tool = explainer(method, model, "0")
        tool.attribute(x, 1)
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            tool.attribute(x, 1)
        assert torch.cuda.memory_allocated() == before, method
