"""The zoo: small forms of the model families that people have, and what camscope must find in each without being told."""

from tests.zoo import of_hugging_face, of_ones_own, of_timm, of_torchvision
from tests.zoo.row import Row

FAMILIES: dict[str, list[Row]] = {
    "torchvision": of_torchvision.ROWS,
    "timm": of_timm.ROWS,
    "Hugging Face": of_hugging_face.ROWS,
    "custom": of_ones_own.ROWS,
}
