"""One region of a segmentation
============================

Why this region: a small segmentation net, trained here on drawn radiographs with two findings, asked region by region.

python examples/segmentation.py        # about a minute on two cores; writes segmentation.png
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope import GradCAM, HiResCAM
from camscope.errors import TargetError
from camscope.phantom import CATEGORIES, draw_findings, load_phantom_model, to_model_input
from camscope.render import CaptionedImage, draw_contact_sheet, draw_contours, encode_image
from camscope.targets import Region

STEPS, BATCH, DRAWN = 400, 8, 600
ENLARGED = 3  # times, before the outline is drawn, so that it is thin


class Segmenter(nn.Module):
    """The bundled net without its head, and a head that scores every class at every place: (N,1,H,W) -> (N,4,H,W)."""

    def __init__(self) -> None:
        super().__init__()
        net = load_phantom_model()
        self.early = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
        self.encoder = nn.Sequential(net.layer3, net.layer4)
        self.head = nn.Sequential(nn.Conv2d(32 + 96, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, len(CATEGORIES), 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """As torchvision's segmentation models return it."""
        fine = self.early(x)
        coarse = F.interpolate(self.encoder(fine), fine.shape[2:], mode="bilinear", align_corners=False)
        scores = self.head(torch.cat([fine, coarse], 1))
        return {"out": F.interpolate(scores, x.shape[2:], mode="bilinear", align_corners=False)}


def radiograph(seed: int) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.bool_]]]:
    """A drawing with two findings, and the mask of each."""
    return draw_findings(seed, [1 + seed % 3, 1 + (seed + 1) % 3])


def train(model: Segmenter, steps: int = STEPS, seed: int = 0) -> None:
    """All weights; batch norms keep the bundled statistics."""
    torch.manual_seed(seed)
    drawn = [radiograph(10_000 + seed + i) for i in range(DRAWN)]
    images = to_model_input(np.stack([image for image, _ in drawn]))
    truth = torch.zeros(DRAWN, *images.shape[2:], dtype=torch.long)
    for place, (_, masks) in zip(truth, drawn, strict=True):
        for name, mask in masks.items():
            place[torch.from_numpy(mask)] = CATEGORIES.index(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps + 1)
    for step in range(steps):
        rows = torch.randint(DRAWN, (BATCH,))
        loss = F.cross_entropy(model(images[rows])["out"], truth[rows], weight=torch.tensor([0.2, 1.0, 1.0, 1.0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {float(loss.detach()):.3f}")


def main(folder: Path = Path(), steps: int = STEPS) -> None:
    """The same image asked for each finding: by its class, by a point in it, by its mask."""
    model = Segmenter().eval()
    train(model, steps)
    rows = []
    for seed in (3, 4, 5):
        image, masks = radiograph(seed)
        x = to_model_input(image[None])[0]
        with torch.no_grad():
            answer = model(x[None])["out"][0].argmax(0).numpy()
        large = image.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)[..., None].repeat(3, axis=2)
        said = (answer > 0).repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1).astype(float)
        row: list[CaptionedImage | None] = [CaptionedImage(draw_contours(large, said, 0.5), "what the net finds")]
        rows.append(row)
        for name, mask in masks.items():
            down, across = np.nonzero(mask)
            middle = len(down) // 2
            point = (float(across[middle]) + 0.5, float(down[middle]) + 0.5)
            for method, region in (
                (GradCAM, Region(label=name)),
                (GradCAM, Region(label=name, point=point)),
                (HiResCAM, Region(label=name, mask=mask)),
            ):
                try:
                    one = method(model, class_names=CATEGORIES).explain(x, region)
                except TargetError as nowhere:  # the net does not find it: nothing to explain
                    print(f"{seed}  {name}: {nowhere}")
                    row.append(None)
                    continue
                inside = one.heatmap(scale=None).clip(min=0)
                share = inside[mask].sum() / inside.sum()
                print(
                    f"{seed}  {one.caption}: {share:.2f} of its energy in the finding ({mask.mean():.3f} of the image)"
                )
                words = one.label.removesuffix(" of the input")
                row.append(CaptionedImage(one.overlay(), f"{method.name}: {words} · {share:.2f} inside"))
    (folder / "segmentation.png").write_bytes(encode_image(draw_contact_sheet(rows, columns=7, height=240), ".png"))
    print("segmentation.png")


if __name__ == "__main__":
    main()
