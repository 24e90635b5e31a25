"""PyTorch hooks, made safe
========================

A hook is a function that PyTorch calls while a model runs. This tour shows the four kinds, each with a number that you can work
out yourself: record features, inspect shapes, edit activations, clip gradients, and explain a prediction.

=============================  =====================================  ===============================
hook of PyTorch                sees, and may replace                  in `camscope.hooks`
=============================  =====================================  ===============================
`Tensor.register_hook`         the gradient of one tensor             `clip_gradients`
`register_forward_hook`        the output of a layer                  `record_layers`, `edit_layers`
`register_forward_pre_hook`    the input of a layer                   `edit_layers(kind="input")`
`register_full_backward_hook`  the gradients at both ends of a layer  `record_layers(gradients=True)`
=============================  =====================================  ===============================

Nothing is downloaded. `python examples/hooks_tour.py` runs the same code as a script.
"""

# %%
# A hook on a tensor
# ------------------
# Let c = a·b with a = 7 and b = 13. The backward pass begins with dc/dc = 1. A hook on c receives this gradient, and what it
# returns takes its place. Here it returns 3, so a and b receive 3·13 and 3·7.

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnet18, resnet50

from camscope import GradCAM, load_model
from camscope.hooks import Tap, clip_gradients, edit_layers, extract_features, inspect_layers, record_layers
from camscope.phantom import draw_radiograph, to_model_input
from camscope.render import draw_channel_grid


def gradients_with_a_hook(*, remove_first: bool) -> list[float]:
    """Return the gradients of a, b and c."""
    a, b = torch.tensor(7.0, requires_grad=True), torch.tensor(13.0, requires_grad=True)
    c = a * b
    c.retain_grad()  # c is not a leaf: without this its gradient is not kept
    handle = c.register_hook(lambda gradient: gradient + 2)
    if remove_first:
        handle.remove()
    c.backward()
    handle.remove()
    return [float(tensor.grad) for tensor in (a, b, c) if tensor.grad is not None]


print("gradients of a, b, c:", gradients_with_a_hook(remove_first=False))
print("removed before backward:", gradients_with_a_hook(remove_first=True))

# %%
# The handle is the danger. A hook whose handle is lost stays on the tensor or the module for good. All functions below are
# context managers: after the `with` block no hook remains, even if the model raised an error.

# %%
# Record features
# ---------------
# A forward hook receives the output of a layer. Storing it is not enough: the next layer may overwrite it in place. Here a ReLU
# overwrites its own input. `record_layers` keeps copies, so the record has the values that the layer received and returned.

model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
with record_layers(model, "1", inputs=True) as records:
    model(torch.tensor([-1.0, 2.0]))
print(f"in-place ReLU: in {records['1'].input.tolist()}, out {records['1'].output.tolist()}")

# %%
# Layers are named by path, by glob pattern or by module. These are the feature maps of the first stage of the bundled model
# for a synthetic radiograph.

scan = draw_radiograph(seed=5, finding="effusion")
x = to_model_input(scan.image[None])
network = load_model("phantom")
features = extract_features(network, ["layer1", "layer4"], x)
print({name: tuple(value.shape) for name, value in features.items()})
Image.fromarray(draw_channel_grid(features["layer1"][0].numpy(), max_channels=16, columns=8))

# %%
# Inspect shapes
# --------------
# One forward pass with a hook on every layer gives a table of all shapes. The stride is the number of input pixels per cell.

resnet = resnet18(weights=None).eval()
for row in inspect_layers(resnet, torch.zeros(1, 3, 224, 224)):
    if row.name.startswith("layer") and "." not in row.name:
        print(f"{row.name}  {row.output_shape}  stride {row.stride}  {row.n_parameters:,} parameters")

# %%
# Edit activations
# ----------------
# What a forward hook returns replaces the output. Manifold mixup mixes the features of two samples in the middle of a network.
# The result equals a computation without hooks, in which the network is cut in two.

torch.manual_seed(0)
pair = torch.randn(2, 3, 64, 64)


def mix(output: Tensor) -> Tensor:
    """Mix each sample with the other one."""
    return 0.7 * output + 0.3 * output.flip(0)


with torch.no_grad():
    with edit_layers(resnet, {"layer2": mix}):
        mixed = resnet(pair)
    stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool, resnet.layer1, resnet.layer2)
    head = nn.Sequential(resnet.layer3, resnet.layer4, resnet.avgpool, nn.Flatten(), resnet.fc)
    by_hand = head(mix(stem(pair)))
print(f"largest difference from mixing by hand: {float((mixed - by_hand).abs().max()):.1e}")

# %%
# The same hook answers what a model does without a feature. Here one channel of `layer4` at a time is set to zero. The channel
# whose loss lowers the score of "effusion" most is the one that Ablation-CAM would weigh most.

EFFUSION = 2


def without_channel(channel: int) -> float:
    """Return the score of the effusion if a channel of layer4 is zero."""

    def remove(output: Tensor) -> Tensor:
        return output.index_fill(1, torch.tensor([channel]), 0.0)

    with torch.no_grad(), edit_layers(network, {"layer4": remove}):
        return float(network(x)[0, EFFUSION])


with torch.no_grad():
    score = float(network(x)[0, EFFUSION])
losses = [score - without_channel(channel) for channel in range(features["layer4"].shape[1])]
print(f"score {score:.2f}; without channel {int(np.argmax(losses))} it is {score - max(losses):.2f}")

# %%
# A forward pre-hook changes what a layer receives. With 1 added on the way in, x² at 3 becomes 16.


class Square(nn.Module):
    """Compute x²."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the square."""
        return x**2


square, three = Square(), torch.tensor(3.0)
with edit_layers(square, {"": lambda value: value + 1}, kind="input"):
    changed = float(square(three))
print("x² at 3, and with 1 added on the way in:", (float(square(three)), changed))

# %%
# Gradients at both ends of a layer
# ---------------------------------
# A full backward hook receives the gradient that enters a layer at its output and the one that leaves at its input. On a block
# with in-place operations, such as those of ResNet-50, the plain hook of PyTorch raises an error:

torch.manual_seed(0)
deep, image = resnet50(weights=None).eval(), torch.randn(1, 3, 224, 224)
handle = deep.layer3[0].bn1.register_full_backward_hook(lambda module, leaving, entering: None)
try:
    deep(image)
except RuntimeError as error:
    print(str(error).partition(".")[0])
finally:
    handle.remove()

# %%
# `record_layers` works there too:

with record_layers(deep, "layer3*", gradients=True) as records:
    deep(image)[0, 3].backward()
entering, leaving = records["layer3"].gradient, records["layer3"].input_gradient
print(f"layer3: {tuple(entering.shape)} flows in at the output, {tuple(leaving.shape)} out at the input")

# %%
# Clip gradients
# --------------
# A hook on each parameter limits its gradient as soon as it is computed, before an optimizer sees it.


def largest_gradient() -> float:
    """Return the largest absolute gradient of any parameter."""
    return max(float(p.grad.abs().max()) for p in resnet.parameters() if p.grad is not None)


resnet(pair)[:, 3].sum().backward()
free = largest_gradient()
resnet.zero_grad()
with clip_gradients(resnet, 0.01):
    resnet(pair)[:, 3].sum().backward()
print(f"largest gradient of a parameter: {free:.3f}; clipped: {largest_gradient():.3f}")

# %%
# Explain a prediction
# --------------------
# A `Tap` keeps the output of a layer and the gradient of a score at that layer. This is all that Grad-CAM needs: the mean
# gradient of each channel is its weight.

with Tap(network, "layer4") as tap:
    tap.backward(network(x)[0, EFFUSION])
weights = tap.gradient.mean((2, 3), keepdim=True)
grad_cam = (weights * tap.activation).sum(1).relu()[0].detach()

explanation = GradCAM(network, "layer4").explain(scan.image, "effusion")
difference = np.abs(grad_cam.numpy() - explanation.attribution).max()
print(f"largest difference from camscope.GradCAM: {difference:.1e}")
explanation

# %%
# The gradient can be worked out by hand, too. A ResNet ends with the mean over the grid and a matrix, so the gradient at
# `layer4` is a row of that matrix, divided by the number of cells.

row_of_matrix = network.get_parameter("fc.weight")[EFFUSION] / (tap.gradient.shape[2] * tap.gradient.shape[3])
expected = row_of_matrix[None, :, None, None].expand_as(tap.gradient)
print(f"largest difference from the matrix: {float((tap.gradient - expected).abs().max().detach()):.1e}")

# %%
# Nothing is left
# ---------------
# After all this, no module has a hook.


def count_hooks(model: nn.Module) -> int:
    """Count the hooks of all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


print("hooks left:", [count_hooks(model) for model in (network, resnet, deep)])
