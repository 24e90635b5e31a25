"""The table says of every layer what the architecture's definition says."""

from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn
from torchvision.models import SwinTransformer, resnet50

from camscope.errors import InputError, LayerError
from camscope.hooks import LayerRow, inspect_layers

# ResNet-50, He et al. 2016, table 1: channels, output size at 224, and parameters counted by its formulas
RESNET50 = {"layer1": (256, 56, 4), "layer2": (512, 28, 8), "layer3": (1024, 14, 16), "layer4": (2048, 7, 32)}


@pytest.fixture(scope="module")
def inspection():
    model = resnet50(weights=None).train()
    model.layer1.eval()
    modes = [m.training for m in model.modules()]
    mean = model.bn1.running_mean.clone()
    result = inspect_layers(model, torch.zeros(1, 3, 224, 224))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model.bn1.running_mean, mean)
    assert not any(m._forward_hooks for m in model.modules())
    return result


def test_resnet50_is_as_its_paper_says(inspection):
    for name, (channels, size, stride) in RESNET50.items():
        assert inspection[name].output_shape == (1, channels, size, size)
        assert inspection[name].stride == (stride, stride)
    assert inspection["conv1"] == LayerRow("conv1", "Conv2d", (1, 64, 112, 112), (2.0, 2.0), 9408, 9408, 1)
    assert inspection["relu"].n_calls == 1
    assert inspection["layer4.0.relu"].n_calls == 3
    assert inspection["layer4"].n_direct_parameters == 0
    blocks = [row.n_parameters for row in inspection if row.name.startswith("layer4.") and row.name.count(".") == 1]
    assert inspection["layer4"].n_parameters == sum(blocks)
    assert inspection["fc"].n_parameters == 2048 * 1000 + 1000
    assert inspection["fc"].stride is None
    assert inspection["avgpool"].stride == (224, 224)
    assert inspection.n_parameters == 25_557_032
    assert sum(row.n_direct_parameters for row in inspection) == 25_557_032
    with pytest.raises(LayerError, match="no layer 'layer5' in ResNet"):
        inspection["layer5"]


@pytest.mark.slow
def test_the_table_shows_the_data(inspection):
    console = Console(width=150, file=(out := StringIO()))
    console.print(inspection)
    for text in (out.getvalue(), repr(inspection)):
        row = next(line for line in text.splitlines() if " layer3 " in line)
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        assert cells == ["layer3", "Sequential", "1×1024×14×14", "16×16", "7,098,368", "1"]
    assert "<td>1×1024×14×14</td><td>16×16</td>" in inspection._repr_html_()
    styles = [row.style for row in inspection.to_rich_table(highlighted={"layer4"}).rows]
    assert [row.name for row, style in zip(inspection, styles, strict=True) if style] == ["layer4"]


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.up, self.pair, self.words, self.unused = (
            nn.Conv2d(1, 4, (3, 5), stride=(1, 2), padding=(1, 2)), nn.Upsample(scale_factor=2), Pair(), Words(), nn.ReLU()
        )  # fmt: skip

    def forward(self, x, scale):
        self.up(x)
        self.words(x)
        return self.pair(self.wide(x) * scale)


class Pair(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)), {"map": x[..., ::2, :], "index": torch.zeros(1, 1, 1, 1, 1, dtype=torch.long)}


class Words(nn.Module):
    def forward(self, x):
        return "no tensor"


def test_strides_of_odd_layers():
    rows = inspect_layers(Odd(), (torch.zeros(2, 1, 12, 32), 0.5))
    assert (rows["wide"].output_shape, rows["wide"].stride) == ((2, 4, 12, 16), (1, 2))
    assert rows["up"].stride == (0.5, 0.5)
    assert (rows["pair"].output_shape, rows["pair"].stride) == ((2, 4, 6, 16), (2, 2))
    assert (rows["words"].output_shape, rows["words"].stride, rows["words"].n_calls) == (None, None, 1)
    assert (rows["unused"].output_shape, rows["unused"].n_calls) == (None, 0)
    volume = inspect_layers(
        nn.Sequential(nn.Conv3d(1, 2, 3, stride=(1, 2, 2), padding=1)), torch.zeros(1, 1, 8, 16, 16)
    )
    assert volume["0"].stride == (1, 2, 2)
    signal = inspect_layers(nn.Sequential(nn.Conv1d(1, 2, 3, stride=4, padding=1)), torch.zeros(1, 1, 64))
    assert signal["0"].stride == (4,)
    with pytest.raises(InputError, match="without a floating-point tensor"):
        inspect_layers(nn.ReLU(), torch.zeros(1, dtype=torch.long))


def test_channels_last_features_have_the_stride_of_their_grid():
    rows = inspect_layers(SwinTransformer([4, 4], 96, [1, 1, 1, 1], [3, 6, 12, 24], [7, 7]), torch.zeros(1, 3, 64, 96))
    assert rows["features.1"].output_shape == (1, 16, 24, 96)
    assert rows["features.1"].stride == (4, 4)
    assert rows["features.7"].stride == (32, 32)
    assert rows["permute"].output_shape == (1, 768, 2, 3)
    assert rows["permute"].stride == (32, 32)


def test_an_exploding_model_is_left_as_it_was():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Linear(7, 1)).train()
    with pytest.raises(RuntimeError, match="shapes"):
        inspect_layers(model, torch.zeros(1, 3, 4, 4))
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
