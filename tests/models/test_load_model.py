"""A model from a string: what it knows of itself, and checkpoints that load strictly, safely, or not at all."""

import json
import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from camscope.errors import CamscopeError, MissingExtraError, ModelError, PreprocessError, WeightsError
from camscope.explainers import METHODS
from camscope.images.photo_reader import read_photo
from camscope.images.preprocess import Preprocess
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.models import load_model
from camscope.models.checkpoint import build_and_load_checkpoint, load_state_dict_strictly, read_state_dict
from camscope.models.torchvision_timm import _get_builder_options
from camscope.phantom import load_phantom_model

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")


def net(classes: int = 2) -> nn.Module:
    torch.manual_seed(classes)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)
    )


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


# --- checkpoints


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("save", [torch.save, lambda obj, path: path.write_bytes(pickle.dumps(obj, protocol=2))])
def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path, save):
    mark, file = tmp_path / "mark", tmp_path / "evil.pt"
    save({"weight": torch.zeros(2), "extra": Payload(mark)}, file)
    with pytest.raises(WeightsError, match=r"Python objects \(\S+\.(mkdir|_load_from_bytes)\).*save the tensors alone"):
        read_state_dict(file)
    assert not mark.exists()
    torch.load(file, weights_only=False) if save is torch.save else pickle.loads(file.read_bytes())
    assert mark.exists()  # the payload works: it was refused, not broken


def test_a_whole_pickled_module_is_refused_with_advice(tmp_path):
    torch.save(net(), tmp_path / "module.pt")
    with pytest.raises(WeightsError, match="state_dict"):
        read_state_dict(tmp_path / "module.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello, this is a text\n" * 20, b"\x00" * 64, bytes(range(256)) * 8])
def test_what_is_no_checkpoint_is_one_error(tmp_path, content, suffix):
    file = tmp_path / f"broken{suffix}"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="broken"):
        read_state_dict(file)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_a_truncated_checkpoint_is_one_error(tmp_path, kind):
    whole, half = tmp_path / "whole", tmp_path / "half"
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file({"weight": torch.ones(100, 100)}, whole)
    else:
        torch.save({"weight": torch.ones(100, 100)}, whole, _use_new_zipfile_serialization=kind == "zip")
    assert read_state_dict(whole)["weight"].sum() == 10_000
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(WeightsError, match="half"):
        read_state_dict(half)


def test_a_changed_byte_of_a_weight_is_one_error(tmp_path):
    file, weight = tmp_path / "weights.pt", torch.randn(100, 100)
    torch.save({"weight": weight}, file)
    data = bytearray(file.read_bytes())
    data[data.index(weight.numpy().tobytes()[:64]) + 3003] ^= 0x7F
    file.write_bytes(data)
    with pytest.raises(
        WeightsError, match=r"weights\.pt is damaged: the data does not have the checksum of weights/data/0"
    ):
        read_state_dict(file)


def test_a_checkpoint_that_was_saved_without_checksums_is_read(tmp_path):
    file, before = tmp_path / "weights.pt", torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(2)}, file)
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_state_dict(file)["weight"].tolist() == [1, 1]


def test_a_state_dict_whose_keys_are_no_text_is_one_error():
    model = net()
    for state in ({0: torch.ones(1)}, {**model.state_dict(), 1: torch.ones(1)}):
        with pytest.raises(WeightsError, match=r"^w has the key [01]; expected text$"):
            load_state_dict_strictly(model, state, "w")


def test_missing_file_and_folder_are_said(tmp_path):
    with pytest.raises(WeightsError, match="no such file"):
        read_state_dict(tmp_path / "nowhere.pt")
    with pytest.raises(WeightsError, match="folder"):
        read_state_dict(tmp_path)


def test_a_checkpoint_of_numbers_is_refused_by_its_keys(tmp_path):
    torch.save({"epoch": 3, "loss": 0.5}, tmp_path / "log.pt")
    with pytest.raises(WeightsError, match="the keys epoch, loss; expected"):
        read_state_dict(tmp_path / "log.pt")


@pytest.mark.parametrize("container", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod."])
def test_containers_and_prefixes(tmp_path, container, prefix):
    trained, fresh = net(), net()
    trained[0].weight.data += 1
    state = {prefix + name: value for name, value in trained.state_dict().items()}
    torch.save(state if container is None else {container: state, "epoch": 3}, tmp_path / "trained.pt")
    load_state_dict_strictly(fresh, read_state_dict(tmp_path / "trained.pt"), "trained.pt")
    assert_same(trained, fresh)


def test_the_prefix_model_stays_where_it_is_the_models_own():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = net()

    trained, fresh = Wrapped(), Wrapped()
    trained.model[0].weight.data += 1
    load_state_dict_strictly(fresh, dict(trained.state_dict()), "trained")
    assert_same(trained, fresh)


def test_half_precision_is_cast_to_the_models_precision():
    trained, fresh = net(), net()
    trained[0].weight.data.fill_(0.25)
    load_state_dict_strictly(fresh, dict(trained.half().state_dict()), "half")
    assert fresh[0].weight.dtype == torch.float32
    assert (fresh[0].weight == 0.25).all()


def expanded(*shape: int) -> torch.Tensor:
    return torch.zeros(1).expand(shape)


@pytest.mark.slow
def test_a_small_file_of_a_huge_tensor_is_refused_with_its_path(tmp_path):
    from torchvision.models import resnet18

    state = dict(resnet18(weights=None).state_dict())
    huge = state | {"fc.weight": expanded(10**9, 512), "fc.bias": expanded(10**9)}
    torch.save({name: value for name, value in huge.items() if name.startswith("fc.")}, tmp_path / "huge.pt")
    assert (tmp_path / "huge.pt").stat().st_size < 3000
    says = r"huge\.pt: fc\.weight has the shape \(1000000000, 512\) of 2,048,000,000,000 bytes, but the file stores 4;"
    with pytest.raises(WeightsError, match=says):
        read_state_dict(tmp_path / "huge.pt")
    torch.save(huge, tmp_path / "huge.pt")
    with pytest.raises(WeightsError, match=says):
        load_model("resnet18", weights=tmp_path / "huge.pt")


def test_many_tensors_that_are_huge_together_are_refused_and_small_views_are_read(tmp_path):
    torch.save({f"{n}": expanded(2**20) for n in range(20)}, tmp_path / "many.pt")  # of 4 MiB each
    with pytest.raises(WeightsError, match="the file stores 4"):
        read_state_dict(tmp_path / "many.pt")
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"transposed": whole.T, "row": whole[1], "tied": whole, "expanded": whole[:, :1].expand(3, 4)}
    torch.save(views, tmp_path / "views.pt")
    read = read_state_dict(tmp_path / "views.pt")
    assert all(torch.equal(read[name], value) for name, value in views.items())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(10**9, 512, device="meta"), "holds no values for 0.weight"),
        (torch.eye(3).to_sparse(), "holds a torch.sparse_coo tensor for 0.weight"),
    ],
    ids=["meta", "sparse"],
)
def test_a_tensor_that_is_not_dense_is_refused(tmp_path, value, says):
    torch.save({"0.weight": value}, tmp_path / "odd.pt")
    with pytest.raises(WeightsError, match=rf"odd\.pt {says}; expected dense tensors"):
        read_state_dict(tmp_path / "odd.pt")


def test_no_layer_is_built_for_a_bias_alone():
    built = []

    def build(classes):
        built.append(classes)
        return net(classes or 2)

    state = dict(net().state_dict()) | {"4.bias": torch.zeros(10**6)}
    del state["4.weight"]
    with pytest.raises(WeightsError, match=r"1 missing \(4\.weight\), 1 of another kind"):
        build_and_load_checkpoint(build, state, "bias.pt")
    assert built == [None]


@pytest.mark.parametrize(
    ("positions", "patches"),
    [((1, 10**9, 0), (8, 3, 16, 16)), ((17,), (8, 3, 16, 16)), ((1, 17, 8), ()), ((1, 0, 8), (8, 3, 16, 16))],
)
def test_the_size_of_an_image_is_not_taken_from_a_tensor_of_another_kind(positions, patches):
    from torchvision.models import vit_b_16

    state = {"encoder.pos_embedding": torch.zeros(positions), "conv_proj.weight": torch.zeros(patches)}
    assert "image_size" not in _get_builder_options(vit_b_16, state)


def test_a_model_that_needs_more_memory_than_there_is_is_named(source, monkeypatch):
    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2048 bytes")

    monkeypatch.setattr("camscope.models.load_model_and_metadata_from_user_function", full)
    with pytest.raises(ModelError, match=r"mine\.py:net: out of memory .* while loading it; load a smaller model"):
        load_model(f"{source}:net")


def test_every_missing_unexpected_and_misshapen_tensor_is_counted():
    state = dict(net().state_dict())
    del state["4.bias"]
    state |= {
        "head.weight": torch.zeros(1),
        "0.weight": torch.zeros(4, 3, 5, 5),
        "0.bias": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(WeightsError) as raised:
        load_state_dict_strictly(net(), state, "other.pt")
    message = str(raised.value)
    assert "1 missing (4.bias)" in message
    assert "1 unexpected (head.weight)" in message
    assert "2 of another kind" in message
    assert "0.weight (4, 3, 5, 5) float32 instead of (4, 3, 3, 3) float32" in message
    assert "0.bias (4,) int64 instead of (4,) float32" in message


def test_a_file_from_before_batchnorm_counted_batches_loads():
    state = {name: value for name, value in net().state_dict().items() if "num_batches" not in name}
    load_state_dict_strictly(net(), state, "old.pt")
    state.pop("1.running_mean")
    with pytest.raises(WeightsError, match="running_mean"):
        load_state_dict_strictly(net(), state, "old.pt")


def changed(state, name, value):
    return {**state, name: value}


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {name: value for name, value in state.items() if name != "4.bias"},
        lambda state: changed(state, "5.extra", torch.zeros(1)),
        lambda state: changed(state, "4.bias", torch.zeros(7)),
        lambda state: changed(state, "4.bias", torch.zeros(2, dtype=torch.int64)),
        lambda state: changed(state, "4.bias", torch.zeros(2, dtype=torch.complex64)),
        lambda state: changed(state, "4.bias", "text"),
    ],
    ids=["missing", "unexpected", "shape", "integers", "complex", "no tensor"],
)
def test_a_checkpoint_that_is_refused_leaves_the_model_as_it_was(damage):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(map(id, model.parameters()))
    with pytest.raises(WeightsError):
        load_state_dict_strictly(model, damage({name: value + 1 for name, value in before.items()}), "w.pt")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(map(id, model.parameters())) == parameters


def test_a_load_hook_that_raises_leaves_the_model_as_it_was():
    class Hooked(nn.Linear):
        def _load_from_state_dict(self, *args):
            self.weight = nn.Parameter(torch.ones(2, 2))
            raise KeyError("lookup table")

    model = nn.Sequential(nn.Linear(2, 2), Hooked(2, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"w\.pt does not load into Sequential: .*lookup table"):
        load_state_dict_strictly(model, {name: value + 1 for name, value in before.items()}, "w.pt")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_shapes_yet_is_refused_with_advice():
    with pytest.raises(
        WeightsError, match=r"Sequential has uninitialized lazy parameters \(0\.weight, 0\.bias\): call the model once"
    ):
        load_state_dict_strictly(nn.Sequential(nn.LazyLinear(3)), {"0.weight": torch.zeros(3, 2)}, "w.pt")


# --- torchvision


def test_a_bare_name_is_torchvisions_with_its_own_preprocessing_and_categories(tmp_path):
    from torchvision.models import SqueezeNet1_1_Weights, squeezenet1_1

    trained = squeezenet1_1(weights=None).train()
    torch.save(trained.state_dict(), tmp_path / "mine.pth")
    model = load_model("squeezenet1_1", weights=tmp_path / "mine.pth")
    card = get_loaded_model_metadata(model)
    assert_same(trained, model)
    assert not any(module.training for module in model.modules())
    assert card.preprocess == Preprocess.from_torchvision(SqueezeNet1_1_Weights.DEFAULT.transforms())
    assert card.class_names[281] == "tabby"
    assert len(card.class_names) == 1000
    assert card.source == f"torchvision:squeezenet1_1, weights={tmp_path / 'mine.pth'}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
@pytest.mark.one_in(2)
def test_a_file_with_another_number_of_classes_sets_the_head(tmp_path, name):
    from torchvision.models import get_model

    trained = get_model(name, weights=None, num_classes=3)
    torch.save(trained.state_dict(), tmp_path / "three.pt")
    model = load_model(f"torchvision:{name}", weights=tmp_path / "three.pt")
    assert_same(trained, model)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert get_loaded_model_metadata(model).class_names is None
    assert get_loaded_model_metadata(model).preprocess is not None


def test_a_file_of_another_architecture_is_refused(tmp_path):
    torch.save(net().state_dict(), tmp_path / "net.pt")
    with pytest.raises(
        WeightsError, match=r"net\.pt does not fit SqueezeNet: \d+ missing .*is it a checkpoint of this architecture"
    ):
        load_model("squeezenet1_1", weights=tmp_path / "net.pt")


@pytest.mark.slow
def test_what_torchvision_sets_along_with_its_weights_is_set_for_a_file_too(tmp_path):
    from torchvision.models import googlenet, vit_b_16
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    torch.save(googlenet(weights=None, init_weights=False).state_dict(), tmp_path / "googlenet.pt")
    assert load_model("googlenet", weights=tmp_path / "googlenet.pt").transform_input is True
    segmenter = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, aux_loss=True)
    torch.save(segmenter.state_dict(), tmp_path / "deeplab.pt")
    assert_same(segmenter, load_model("deeplabv3_mobilenet_v3_large", weights=tmp_path / "deeplab.pt"))
    # 4 x 4 patches of 16 pixels, and the class token
    state = {"encoder.pos_embedding": torch.zeros(1, 17, 768), "conv_proj.weight": torch.zeros(768, 3, 16, 16)}
    assert _get_builder_options(vit_b_16, state)["image_size"] == 64


def test_a_detector_is_not_built_around_a_file(tmp_path):
    torch.save(net().state_dict(), tmp_path / "detector.pt")
    with pytest.raises(WeightsError, match=r"FILE\.py:FUNCTION"):
        load_model("fasterrcnn_mobilenet_v3_large_fpn", weights=tmp_path / "detector.pt")


def test_random_weights_are_the_same_every_time_and_leave_the_callers_random_state():
    one = load_model("squeezenet1_1", weights="random")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert_same(one, load_model("squeezenet1_1", weights="random"))
    assert torch.equal(torch.get_rng_state(), before)
    assert get_loaded_model_metadata(one).source == "torchvision:squeezenet1_1, weights=random"
    assert get_loaded_model_metadata(one).class_names is None


def test_without_a_network_the_error_says_what_to_fetch_and_how_to_pass_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(WeightsError) as raised:
        load_model("resnet18")
    from torchvision.models import ResNet18_Weights

    message = str(raised.value)
    assert ResNet18_Weights.DEFAULT.url in message
    assert "weights=FILE" in message
    assert "--weights FILE" in message
    assert str(tmp_path / "hub" / "checkpoints") in message


def test_a_file_in_the_cache_is_used_and_one_with_code_is_not(tmp_path, monkeypatch):
    from torchvision.models import SqueezeNet1_1_Weights, squeezenet1_1

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "checkpoints" / Path(SqueezeNet1_1_Weights.DEFAULT.url).name
    cached.parent.mkdir(parents=True)
    trained = squeezenet1_1(weights=None)
    torch.save(trained.state_dict(), cached)
    model = load_model("squeezenet1_1")
    assert_same(trained, model)
    assert get_loaded_model_metadata(model).class_names[0] == "tench"
    torch.save({"weight": Payload(tmp_path / "mark")}, cached)
    with pytest.raises(WeightsError, match="in place of what may lie there"):
        load_model("squeezenet1_1")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("resnet5", "nearest names: .*resnet50.*; a model is one of phantom, torchvision:NAME, timm:NAME"),
        ("torchvision:resnet5", "nearest names: .*resnet50"),
        ("quantized_resnet18", "load 'resnet18'"),
        ("models.py", r"expected also the name of the function .*models\.py:FUNCTION"),
        ("weights.safetensors", "without an architecture"),
        ("nowhere.py:net", r"no file nowhere\.py"),
        ("no_such_package.models:net", "ModuleNotFoundError.*PYTHONPATH"),
        ("torch.nn:Liner", "no function 'Liner'"),
        ("math:pi", "no function 'pi'"),
        ("math:sqrt", "math:sqrt raised TypeError"),
        ("collections:Counter", "returned a Counter; expected a torch.nn.Module"),
        ("", "expected one of phantom"),
        (3, "the model is 3"),
    ],
)
def test_what_is_no_model_is_one_clear_error(spec, match):
    with pytest.raises(ModelError, match=match):
        load_model(spec)


# --- factories

SOURCE = """
from __future__ import annotations
import dataclasses
import torch
from torch import nn

PREPROCESSING = {"net": ((24, 32), (0.5,), (0.25,))}
TARGET_LAYER = {"net": "0"}
CATEGORIES = {"net": ["cold", "hot"]}

@dataclasses.dataclass
class Settings:
    width: int = 4

def net():
    return nn.Sequential(nn.Conv2d(1, Settings().width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def other():
    return net().train()

def broken():
    raise KeyError("no such width")

def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def source(tmp_path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


@pytest.mark.parametrize("method", ["gradcam", "guidedgradcam", "excitationbackprop"])
def test_a_layer_that_the_file_names_was_not_chosen(source, method):
    source.write_text(SOURCE.replace("nn.AdaptiveAvgPool2d", "nn.ReLU(), nn.AdaptiveAvgPool2d"))
    for name, layer, chosen in (("net", "0", False), ("other", "1", True)):
        one = METHODS[method](load_model(f"{source}:{name}")).explain(torch.rand(1, 24, 32), 1)
        assert one.layer == layer
        assert (f"layer {layer!r} was chosen" in one.notes) is chosen


def test_a_factory_in_a_file_with_what_the_file_says_of_it(source, tmp_path):
    modules, path = set(sys.modules), list(sys.path)
    model = load_model(f"{source}:net")
    card = get_loaded_model_metadata(model)
    assert card.preprocess == Preprocess(resize=(24, 32), mean=(0.5,), std=(0.25,), channels=1)
    assert (card.layer, card.class_names, card.source) == ("0", ("cold", "hot"), f"{source}:net")
    assert not {name for name in set(sys.modules) - modules if "mine" in name}
    assert sys.path == path
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]
    bare = load_model(f"{source}:other")
    assert get_loaded_model_metadata(bare).preprocess is None
    assert not any(module.training for module in bare.modules())


def test_weights_load_strictly_into_a_factorys_model(source, tmp_path):
    model = load_model(f"{source}:net")
    model[0].weight.data.fill_(7)
    torch.save(model.state_dict(), tmp_path / "seven.pt")
    assert (load_model(f"{source}:net", weights=tmp_path / "seven.pt")[0].weight == 7).all()
    torch.save({"0.weight": model[0].weight.data}, tmp_path / "part.pt")
    with pytest.raises(WeightsError, match="missing"):
        load_model(f"{source}:net", weights=tmp_path / "part.pt")
    with pytest.raises(WeightsError, match="creates its own weights"):
        load_model(f"{source}:net", weights="random")


@pytest.mark.parametrize(
    ("function", "match"),
    [("broken", "KeyError"), ("leaves", "SystemExit: 3"), ("absent", "its functions: Settings, net, other")],
)
def test_a_factory_that_fails_is_one_error_with_its_cause(source, function, match):
    modules = set(sys.modules)
    with pytest.raises(ModelError, match=match) as raised:
        load_model(f"{source}:{function}")
    assert function == "absent" or raised.value.__cause__ is not None
    assert not {name for name in set(sys.modules) - modules if "mine" in name}


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ("PREPROCESSING = 3", "PREPROCESSING is a int"),
        ("PREPROCESSING = {'net': (224, 224)}", r"expected \(\(height, width\), mean, std\)"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_file_that_says_nonsense_is_one_error(source, said, match):
    source.write_text(SOURCE + said)
    with pytest.raises(ModelError, match=match):
        load_model(f"{source}:net")


# --- the bundled model, timm and Hugging Face


def test_the_bundled_model_knows_itself():
    model = load_model("phantom")
    card = get_loaded_model_metadata(model)
    x, _ = card.preprocess(torch.zeros(100, 120, 3, dtype=torch.uint8).numpy())
    assert model(x[None]).shape == (1, len(card.class_names))
    assert card.layer in dict(model.named_modules())
    assert card.source == "phantom"


@pytest.mark.slow
@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.one_in(2)
def test_a_model_has_its_weights_where_the_default_device_is_meta(source, tmp_path, is_global):
    torch.save(load_model(f"{source}:net").state_dict(), tmp_path / "net.pt")
    specs = [("phantom", None), ("phantom", "random"), ("resnet18", "random"), (f"{source}:net", tmp_path / "net.pt")]
    expected = [load_model(spec, weights=weights) for spec, weights in specs]
    if is_global:
        torch.set_default_device("meta")
    try:
        with nullcontext() if is_global else torch.device("meta"):
            models = [load_model(spec, weights=weights) for spec, weights in specs]
            bundled = load_phantom_model()
    finally:
        torch.set_default_device(None)
    for model, reference in zip([*models, bundled], [*expected, expected[0]], strict=True):
        assert_same(model, reference)


@pytest.mark.slow
def test_a_timm_model_with_its_own_preprocessing(tmp_path):
    timm = pytest.importorskip("timm")
    spec = "timm:test_vit"
    model = load_model(spec, weights="random")
    assert model(torch.zeros(1, 3, 160, 160)).shape == (1, 1000)
    expected = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    photo = read_photo(torch.arange(3 * 200 * 260).remainder(256).to(torch.uint8).reshape(3, 200, 260)).pixels
    from PIL import Image

    assert torch.allclose(
        get_loaded_model_metadata(model).preprocess(photo)[0], expected(Image.fromarray(photo)), atol=1e-5
    )
    torch.save(model.state_dict(), tmp_path / "same.pt")
    assert get_loaded_model_metadata(load_model(spec, weights=tmp_path / "same.pt")).class_names[0].startswith("tench")
    torch.save(timm.create_model("test_vit", num_classes=5).state_dict(), tmp_path / "five.pt")
    five = load_model(spec, weights=tmp_path / "five.pt")
    assert five(torch.zeros(1, 3, 160, 160)).shape == (1, 5)
    assert get_loaded_model_metadata(five).class_names is None
    with pytest.raises(ModelError, match=r"nearest names: .*test_vit"):
        load_model("timm:test_vitt")
    with pytest.raises(ModelError, match="no_such_tag"):
        load_model("timm:test_vit.no_such_tag", weights="random")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder as `save_pretrained` leaves it: a tiny ViT of three classes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        id2label={0: "cat", 1: "dog", 2: "hen"}, label2id={"cat": 0, "dog": 1, "hen": 2},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_hugging_face_folder(folder, tmp_path):
    from safetensors.torch import load_file

    model = load_model(f"hf:{folder}")
    card = get_loaded_model_metadata(model)
    assert torch.equal(model.classifier.weight, load_file(folder / "model.safetensors")["classifier.weight"])
    assert card.class_names == ("cat", "dog", "hen")
    x, place = card.preprocess(read_photo(torch.full((3, 64, 96), 51, dtype=torch.uint8)).pixels)
    assert place.input_size == (32, 32)
    # 51 / 255 = 0.2, less the mean, over the processor's usual std 0.5
    assert torch.allclose(x[:, 0, 0], torch.tensor([0.2, 0.0, -0.2]), atol=1e-6)
    assert model(x[None]).logits.shape == (1, 3)
    again = load_model(f"hf:{folder}", weights=folder / "model.safetensors")
    assert_same(model, again)
    assert get_loaded_model_metadata(load_model(f"hf:{folder}", weights="random")).class_names is None


DEEP = "[" * 20_000 + "]" * 20_000


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("text", ["1", "null", "[]", '"x"', "", "{", "NaN", DEEP, '{"size": ' + DEEP + "}"])
def test_a_hugging_face_folder_whose_settings_are_no_object_is_one_error(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=rf"/{name.replace('.', '[.]')} cannot be used: (the file contains|it is) "):
        load_model(f"hf:{folder}")


@pytest.mark.parametrize(
    ("name", "key", "value", "match"),
    [
        ("config.json", "num_hidden_layers", "many", "vit .*config.json: .*num_hidden_layers"),
        ("config.json", "num_hidden_layers", 2**31, "config.json cannot be used: num_hidden_layers is 2.14748e[+]09"),
        ("config.json", "depths", [1, 10**30], "config.json cannot be used: depths is 1e[+]30; the limit is 1000"),
        ("config.json", "num_labels", 10**30, "config.json cannot be used: num_labels"),
        ("config.json", "architectures", 3, "config.json: TypeError"),
        ("config.json", "architectures", [None], "config.json: AttributeError"),
        ("config.json", "dtype", "many", "config.json: AttributeError"),
        ("config.json", "id2label", [1], "config.json: AttributeError"),
        ("config.json", "image_size", [], "config.json: IndexError"),
        ("preprocessor_config.json", "image_processor_type", 3, "from preprocessor_config.json: .*AttributeError"),
        ("preprocessor_config.json", "size", [], "from preprocessor_config.json: .*IndexError"),
    ],
)
def test_a_hugging_face_setting_of_another_kind_is_one_error(folder, name, key, value, match):
    settings = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(settings | {key: value}))
    with pytest.raises(ModelError, match=match):
        load_model(f"hf:{folder}")


INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(folder) -> Path:
    """The folder with its weights in several files."""
    import transformers

    model = transformers.ViTForImageClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_a_hugging_face_folder_in_several_files(sharded, tmp_path):
    model = load_model(f"hf:{sharded}")
    assert_same(model, load_model(f"hf:{sharded}"))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    (sharded / INDEX).write_text("{")
    assert_same(model, load_model(f"hf:{sharded}", weights=tmp_path / "w.pt"))  # which reads no index


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "it is damaged, or of another kind .JSONDecodeError"),
        ("", "it is damaged"),
        ("[]", r"the file contains \[\]; expected a JSON object"),
        (DEEP, "it is nested too deeply"),
        ('{"metadata": {}}', "expected the objects metadata and weight_map"),
        ('{"metadata": {}, "weight_map": {}}', "expected the objects metadata and weight_map"),
        ('{"weight_map": {"a": "model.safetensors"}}', "expected the objects metadata and weight_map"),
        ('{"metadata": {}, "weight_map": {"a": 3}}', "weight_map names the file 3; expected the name of a file"),
        ('{"metadata": {}, "weight_map": {"a": ""}}', "weight_map names the file ''"),
        ('{"metadata": {}, "weight_map": {"a": "../x"}}', "weight_map names the file '../x'"),
    ],
)
def test_an_index_of_weights_that_is_damaged_is_named(sharded, text, says):
    index = sharded / INDEX
    index.write_text(index.read_text()[:-40] if text is None else text)
    with pytest.raises(WeightsError, match=rf"/model\.safetensors\.index\.json cannot be used: {says}"):
        load_model(f"hf:{sharded}")


@pytest.mark.parametrize("name", ["x" * 5000, "nul\\u0000"])
def test_an_index_with_a_name_that_no_file_can_have_is_named(sharded, name):
    (sharded / INDEX).write_text(f'{{"metadata": {{}}, "weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(WeightsError, match=r"index\.json lists (x+|nul.): it "):
        load_model(f"hf:{sharded}")


def test_a_file_of_weights_that_is_damaged_or_lost_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    with pytest.raises(WeightsError, match=rf"{shard.name} is not a complete safetensors file"):
        load_model(f"hf:{sharded}")
    shard.unlink()
    with pytest.raises(WeightsError, match=rf"index\.json lists {shard.name}: it cannot be read: No such file"):
        load_model(f"hf:{sharded}")


@pytest.mark.parametrize(
    ("key", "value"), [("image_mean", "many"), ("size", {"height": -1, "width": 3}), ("resample", [])]
)
def test_an_image_processor_that_fails_on_an_image_is_one_error_with_its_file(folder, key, value):
    name = "preprocessor_config.json"
    settings = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(settings | {key: value}))
    preprocess = get_loaded_model_metadata(load_model(f"hf:{folder}")).preprocess
    with pytest.raises(PreprocessError, match=r"vit/preprocessor_config.json raised \w+"):
        preprocess(read_photo(torch.zeros(3, 64, 96, dtype=torch.uint8)).pixels)


FAMILIES = {
    "SegFormer, regions": ("SegformerForSemanticSegmentation", "SegformerImageProcessor"),
    "DETR": ("DetrForObjectDetection", "DetrImageProcessor"),
    "CLIP vision tower": ("CLIPVisionModelWithProjection", "CLIPImageProcessor"),
    "CLIP vision tower, pooled": ("CLIPVisionModel", "CLIPImageProcessor"),
    "SigLIP vision tower": ("SiglipVisionModel", "SiglipImageProcessor"),
    "DeiT, with its teacher's head": ("DeiTForImageClassificationWithTeacher", "DeiTImageProcessor"),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(2)
def test_hugging_face_folders_of_other_than_plain_classifiers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.zoo.of_hugging_face import ROWS

    kind, processor = FAMILIES[name]
    original = next(row for row in ROWS if row.name == name).build().eval()
    original.save_pretrained(tmp_path)
    getattr(transformers, processor)().save_pretrained(tmp_path)
    model = load_model(f"hf:{tmp_path}")
    assert type(model).__name__ == kind
    own, photo = original.state_dict(), torch.randint(0, 256, (90, 140, 3), dtype=torch.uint8).numpy()
    assert all(torch.equal(value, own[key]) for key, value in model.state_dict().items())
    x, placement = get_loaded_model_metadata(model).preprocess(photo)
    expected = getattr(transformers, processor)()(photo, return_tensors="pt")["pixel_values"][0]
    difference = (x - expected).abs()  # two of 256 levels, of noise resampled with weights of another precision
    assert (x.shape, placement.image_size) == (expected.shape, (90, 140))
    assert difference.max() < 2.01 / 255 / 0.22
    assert difference.mean() < 0.25 / 255
    assert type(load_model(f"hf:{tmp_path}", weights="random")).__name__ == kind
    assert_same(load_model(f"hf:{tmp_path}", weights=tmp_path / "model.safetensors"), model)


@pytest.mark.parametrize(
    ("whole", "tower"), [("CLIP", "CLIPVisionModelWithProjection"), ("Siglip", "SiglipVisionModel")]
)
def test_of_a_model_of_images_and_texts_the_vision_tower_is_loaded(whole, tower, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.zoo.of_hugging_face import SQUARE_PATCHES

    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text |= {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{whole}Config")(text_config=text, vision_config=SQUARE_PATCHES)
    original = getattr(transformers, f"{whole}Model")(config).eval()
    original.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 64, 64)
    model = load_model(f"hf:{tmp_path}")
    assert type(model).__name__ == tower
    with torch.no_grad():
        torch.testing.assert_close(model(x).last_hidden_state, original.vision_model(x).last_hidden_state)


def test_half_precision_of_a_hugging_face_folder_is_cast(folder):
    import transformers

    transformers.ViTForImageClassification.from_pretrained(folder).half().save_pretrained(folder)
    assert {p.dtype for p in load_model(f"hf:{folder}").parameters()} == {torch.float32}


def test_a_hugging_face_backbone_without_a_head_is_not_given_a_random_one(folder):
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in stored.items() if "classifier" not in k}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(WeightsError, match=r"2 missing \(classifier\.bias, classifier\.weight\).*backbone"):
        load_model(f"hf:{folder}")


def test_a_file_loads_strictly_into_a_hugging_face_model(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    five = stored | {"classifier.weight": torch.ones(5, 16), "classifier.bias": torch.arange(5.0)}
    save_file(five, tmp_path / "five.safetensors")
    model = load_model(f"hf:{folder}", weights=tmp_path / "five.safetensors")
    assert torch.equal(model.classifier.bias, torch.arange(5.0))
    assert get_loaded_model_metadata(model).class_names is None
    whole = load_model(f"hf:{folder}")
    assert torch.equal(model.vit.embeddings.cls_token, whole.vit.embeddings.cls_token)
    save_file({**stored, "extra": torch.ones(1)}, tmp_path / "extra.safetensors")
    with pytest.raises(WeightsError, match=r"1 unexpected \(extra\)"):
        load_model(f"hf:{folder}", weights=tmp_path / "extra.safetensors")
    save_file({**stored, "vit.embeddings.cls_token": torch.ones(1, 1, 8)}, tmp_path / "narrow.safetensors")
    with pytest.raises(WeightsError, match=r"1 mismatched \(vit\.embeddings\.cls_token\)"):
        load_model(f"hf:{folder}", weights=tmp_path / "narrow.safetensors")


def test_a_hugging_face_folder_of_pickles_and_code_is_not_executed(folder, tmp_path):
    import transformers

    model = transformers.ViTForImageClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({**model.state_dict(), "payload": Payload(tmp_path / "mark")}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_model(f"hf:{folder}")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForImageClassification": "code.Model"}
    config["model_type"] = "of_its_own"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n"
    )
    with pytest.raises(CamscopeError, match="hf:"):
        load_model(f"hf:{folder}")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("spec", ["timm:test_vit", "hf:org/model-that-is-not-here"])
def test_an_unreachable_hub_is_one_error_that_says_what_to_fetch(spec, monkeypatch):
    pytest.importorskip("timm")
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match=r"fetch .*model\.safetensors of"):
        load_model(spec)


@pytest.mark.parametrize(("spec", "package"), [("timm:test_vit", "timm"), ("hf:org/model", "transformers")])
def test_a_missing_extra_is_named(spec, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf'{package} is not installed; run: pip install "camscope\[hub\]"'):
        load_model(spec)


# --- real weights


@needs_data
def test_real_weights_recognize_real_photographs():
    model = load_model("resnet18", weights=DATA / "weights" / "resnet18_imagenet.safetensors")
    told = json.loads((DATA / "photos" / "annotations.json").read_text())
    way, names = get_loaded_model_metadata(model).preprocess, get_loaded_model_metadata(model).class_names
    some = told["images"][::4]
    photos = [read_photo(DATA / "photos" / "images" / image["file_name"]).pixels for image in some]
    with torch.inference_mode():
        found = model(torch.stack([way(pixels)[0] for pixels in photos])).argmax(1)
    right = found == torch.tensor([image["imagenet_label"] for image in some])
    assert len(right) == 10
    assert int(right.sum()) >= 7
    assert names[281] == "tabby"


@needs_data
def test_the_convention_of_a_users_model_file():
    model = load_model(f"{DATA / 'models.py'}:resnet18")
    card = get_loaded_model_metadata(model)
    assert card.preprocess == Preprocess(resize=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    assert card.layer == "layer4"
    chest = load_model("resnet18", weights=DATA / "weights" / "resnet18_chest_xray.safetensors")
    assert chest(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert get_loaded_model_metadata(chest).class_names is None
