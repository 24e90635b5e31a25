"""PyTorch hooks, made safe
========================

A tour of PyTorch's hooks, each with a number that you can work out yourself.

python examples/hooks_tour.py
"""

import torch
from torch import Tensor, nn
from torchvision.models import resnet18, resnet50

from camscope.hooks import Tap, clip_gradients, edit_layers, extract_features, inspect_layers, record_layers


def add_to_a_gradient(*, remove_before: bool = False) -> list[float]:
    """Gradients at a = 7, b = 13 and c = a·b, with a hook on the tensor c.

    Backward begins with dc/dc = 1. The hook makes it 3, and a and b get what comes after the hook: 3·13 and 3·7.
    """
    a, b = torch.tensor(7.0, requires_grad=True), torch.tensor(13.0, requires_grad=True)
    c = a * b
    c.retain_grad()  # c is no leaf: without this its gradient would be thrown away
    handle = c.register_hook(lambda gradient: gradient + 2)
    if remove_before:
        handle.remove()
    c.backward()
    handle.remove()  # now it is too late to matter: the gradients are made
    return [float(tensor.grad) for tensor in (a, b, c) if tensor.grad is not None]


def record_what_a_layer_makes() -> tuple[Tensor, Tensor]:
    """The input and output of a ReLU that works in place: the recording keeps both, the tensor only the second."""
    model, x = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), torch.tensor([-1.0, 2.0])
    with record_layers(model, "1", inputs=True) as rec:
        model(x)
    return rec["1"].input, rec["1"].output


def mix_features(share: float = 0.7) -> tuple[Tensor, Tensor]:
    """Manifold mixup (2,1000): the model's scores with an edited layer, and the same worked out by hand.

    The features of two samples are mixed in the middle of the network, which goes on with the mixture.
    """
    torch.manual_seed(0)
    model, x = resnet18(weights=None).eval(), torch.randn(2, 3, 64, 64)

    def mix(features: Tensor) -> Tensor:
        return share * features + (1 - share) * features.flip(0)

    with torch.no_grad():
        with edit_layers(model, {"layer2": mix}):
            edited = model(x)
        stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2)
        rest = nn.Sequential(model.layer3, model.layer4, model.avgpool, nn.Flatten(), model.fc)
        return edited, rest(mix(stem(x)))


def change_an_input() -> tuple[float, float]:
    """What x² is at 3, and at 3 when a pre-hook adds 1 to it on the way in: 9 and 16."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**2

    square, x = Square(), torch.tensor(3.0)
    with edit_layers(square, {"": lambda value: value + 1}, kind="input"):
        changed = float(square(x))
    return float(square(x)), changed


def gradients_around_layer3() -> tuple[Tensor, Tensor]:
    """Gradients that leave ResNet-50's layer3 (1,512,28,28) and that enter it (1,1024,14,14), of the score of class 3.

    A plain full backward hook on the blocks inside would raise, for they go on with in-place operations.
    """
    torch.manual_seed(0)
    model = resnet50(weights=None).eval()
    with record_layers(model, "layer3*", gradients=True) as rec:
        model(torch.randn(1, 3, 224, 224))[0, 3].backward()
    return rec["layer3"].input_gradient, rec["layer3"].gradient


def clip_every_parameter(limit: float = 0.01) -> tuple[float, float]:
    """The largest gradient of any parameter, free and clipped."""
    torch.manual_seed(0)
    model, x = resnet18(weights=None).eval(), torch.randn(1, 3, 64, 64)

    def largest() -> float:
        return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)

    model(x)[0, 3].backward()
    free = largest()
    model.zero_grad()
    with clip_gradients(model, limit):
        model(x)[0, 3].backward()
    return free, largest()


def tap_a_layer() -> tuple[Tensor, Tensor]:
    """Features (1,512,2,2) of ResNet-18's layer4 and the gradient of a score there: all that Grad-CAM needs.

    The network ends with the mean over the 2×2 grid and a matrix, so the gradient is that matrix' row over 4.
    """
    torch.manual_seed(0)
    model = resnet18(weights=None).eval()
    with Tap(model, "layer4") as tap:
        tap.backward(model(torch.randn(1, 3, 64, 64))[0, 3])
    torch.testing.assert_close(tap.gradient, (model.fc.weight[3] / 4).view(1, -1, 1, 1).expand(1, 512, 2, 2))
    return tap.activation, tap.gradient


def main() -> None:
    """Walk through all of it."""
    print("A hook on a tensor sees its gradient, and what it returns takes the gradient's place.")
    print("  c = a·b at 7, 13; the hook adds 2 at c; gradients of a, b, c:", add_to_a_gradient())
    print("  the same, with the handle removed before backward:           ", add_to_a_gradient(remove_before=True))

    print("A forward hook sees what a layer returns, a pre-hook what it is given.")
    given, made = record_what_a_layer_makes()
    print(f"  in-place ReLU: in {given.tolist()}, out {made.tolist()}")
    print("  x² at 3, and with 1 added on the way in:", change_an_input())

    print("What they return replaces the value: here the features of two samples are mixed.")
    edited, by_hand = mix_features()
    print(f"  largest difference from mixing by hand: {float((edited - by_hand).abs().max()):.1e}")

    print("Backwards: gradients at a layer's two ends.")
    leaving, entering = gradients_around_layer3()
    print(
        f"  ResNet-50 layer3: {tuple(entering.shape)} flows in at the output, {tuple(leaving.shape)} out at the input"
    )
    free, clipped = clip_every_parameter()
    print(f"  largest gradient of a parameter: {free:.3f}; with a clipper on each: {clipped:.3f}")

    print("The shapes of all that, and the features themselves.")
    model, x = resnet18(weights=None), torch.zeros(1, 3, 224, 224)
    for row in inspect_layers(model, x):
        if row.name.startswith("layer") and "." not in row.name:
            print(f"  {row.name}  {row.output_shape}  stride {row.stride}  {row.n_parameters:,} parameters")
    for name, features in extract_features(model, ["conv1", "layer4"], x).items():
        print(f"  {name}: {tuple(features.shape)}")

    print("And the one that explanations are made of: a layer's output with the score's gradient there.")
    features, gradient = tap_a_layer()
    heat = (features * gradient.mean((2, 3), keepdim=True)).sum(1).relu()
    print(f"  Grad-CAM of a random ResNet-18: {[[round(value, 4) for value in row] for row in heat[0].tolist()]}")


if __name__ == "__main__":
    main()
