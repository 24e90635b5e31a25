"""Complete the docstrings of method classes by inherited settings, the cost, and the setup of the example."""

import inspect
import re

ENTRY = re.compile(r"    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
SECTION = re.compile(r"^(Args|Raises|Attributes):\n((?:(?:    .*)?\n)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> [\s\S]*", re.MULTILINE)
COST = re.compile(r"^Cost: forward passes .*", re.MULTILINE)
PACKAGE = "camscope"
TRANSFORMER_SETUP = [
    "from torchvision.models import VisionTransformer",
    "_ = torch.manual_seed(0)",
    "vit = VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32)",
    "_ = torch.nn.init.normal_(vit.heads.head.weight)",
    "x = torch.rand(3, 32, 32)",
]
COST_TERMS = {
    "K": "K: channels of the layer",
    "L": "L: attention blocks",
    "partial": "Partial: of the model behind the layer",
}


def read_setting_descriptions(cls: type) -> dict[str, str]:
    """Read the description of each setting from the docstring of a class. Return the descriptions by name."""
    sections = {match[1]: match[2] for match in SECTION.finditer(f"{_read_docstring(cls)}\n")}
    return {name: text.rstrip() for name, text in ENTRY.findall(sections.get("Args", ""))}


def read_description(cls: type) -> str:
    """Read the description from the docstring of a class, without the cost line, the sections (Args, Returns) and the example."""
    return COST.sub("", EXAMPLE.sub("", SECTION.sub("", f"{_read_docstring(cls)}\n"))).strip()


def complete_docstring(cls: type) -> str | None:
    """Complete the docstring of a method class with inherited settings, the cost, and the setup lines of the example.

    Each setting is documented once, in the class that declares it. The example may use `model`, `image`, `vit` and `x`:
    the lines that create them are added. Return None if the class has no docstring.
    """
    doc = _read_docstring(cls)
    if not doc:
        return None
    settings, is_wrapper = read_setting_descriptions(cls), "__init__" in vars(cls)
    for base in () if is_wrapper else cls.__mro__[1:-1]:
        for name, text in read_setting_descriptions(base).items():
            settings.setdefault(name, text)
    names = sorted(settings, key=lambda name: name != "model")
    raised = [match[0].rstrip() for match in SECTION.finditer(f"{doc}\n") if match[1] == "Raises"]
    example = EXAMPLE.search(doc)
    parts = [
        read_description(cls),
        "" if is_wrapper else _describe_cost(cls),
        "\n".join(["Args:", *(f"    {name}: {settings[name]}" for name in names)]) if names else "",
        *raised,
        _add_setup_lines_to_example(cls, example[0]) if example else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _read_docstring(cls: type) -> str:
    return inspect.cleandoc(vars(cls).get("__doc__") or "")


def _describe_cost(cls: type) -> str:
    """Return sentences about the passes and the paper of a method. Return "" for a base class, because it has no name."""
    if not isinstance(getattr(cls, "name", None), str):
        return ""
    forward, backward, paper = (str(getattr(cls, fact, "")) for fact in ("forward_passes", "backward_passes", "paper"))
    terms = [text for symbol, text in COST_TERMS.items() if re.search(rf"\b{symbol}\b", f"{forward} {backward}")]
    sentences = [f"Cost: forward passes {forward}, backward passes {backward}", *terms]
    return " ".join(f"{sentence}." for sentence in [*sentences, *([f"Reference: {paper}"] if paper else [])])


def _add_setup_lines_to_example(cls: type, example: str) -> str:
    """Add the missing setup lines to an example: imports, a model and an image."""
    if cls.__module__.partition(".")[0] != PACKAGE or ">>> class " in example or not hasattr(cls, "name"):
        return example

    def example_uses(name: str) -> bool:
        return re.search(rf"\b{name}\b", example) is not None

    has_model, has_image, has_transformer = example_uses("model"), example_uses("image"), example_uses("vit")
    lines = [f"from {PACKAGE} import {cls.__name__}{', load_model' * has_model}"]
    if example_uses("torch") or has_transformer:
        lines.insert(0, "import torch")
    if has_image or example_uses("draw_radiograph"):
        lines.append(f"from {PACKAGE}.phantom import draw_radiograph")
    if has_transformer:
        lines += TRANSFORMER_SETUP
    if has_model:
        lines.append('model = load_model("phantom")')
    if has_image:
        lines.append('image = draw_radiograph(0, "nodule").image')
    return "\n".join([*(f">>> {line}" for line in lines), example])
