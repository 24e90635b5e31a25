"""Damaged files of every kind but scans: images, explanations, manifests, runs, TOML, COCO, checkpoints, Hugging Face
folders, provenance.

    python -m benchmarks.fuzz_files               # 5,000 files, some minutes
    python -m benchmarks.fuzz_files --count 200 --seed 7

A result, or one error of camscope's own, is right. Anything else, more than two seconds or 256 MiB are listed, and end the
program with 1.
"""

import copy
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import nn

from benchmarks.fuzzing import DAMAGE, Damaged, Mutation, Outcome, options, outcome, run
from camscope import BatchRun, Explanation, GradCAM, Preprocess, run_batch
from camscope.audit.check_audits_comparable import _load_provenance
from camscope.audit.core.config import Config
from camscope.audit.provenance import provenance_file
from camscope.audit.verify_finished_audit import verify_audit
from camscope.batch import BatchOptions, build_manifest
from camscope.errors import CamscopeError
from camscope.evaluation.ground_truth import load_ground_truth
from camscope.evaluation.selection.method_selection import read_selection as read_choice
from camscope.geometry import Placement
from camscope.images.photo_reader import find_suffix_and_frame_warnings, read_photo, read_reduced_photo
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.models import load_model, load_state_dict_strictly, read_state_dict

SIZE = (40, 56)
DEEP = "[" * 20_000 + "]" * 20_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 2**31, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "<b>", "$", "\x00", "../../x", "x" * 5000, "1e999", "\ud800"),
    *([], [[]], {}, [None], [1, 2], {"a": 1}, [[1], [2, 3]], [1e308] * 4, [10**9, 10**9], [-1, 0]),
)
HEADER = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (9, 9), }".ljust(117) + b"\n"
RAW = ("9" * 5000, DEEP, "1e400", "NaN", "-", '"', "[1,", "{}", "1979-05-27T07:32:00Z", "0x" + "f" * 400, "inf", "true")


@dataclass(frozen=True)
class Sample:
    """A sound file, how it is mutated, and how it is read: `read(folder)` finds it there under `name`, which may have folders."""

    kind: str
    name: str
    data: bytes
    read: Callable[[Path], str]
    mutations: tuple[Mutation, ...] = DAMAGE


# --- mutations that know the format


def other_value(data: bytearray, rng: np.random.Generator) -> bytes:
    """JSON of which some values are others, are missing, or have another name."""
    known = json.loads(bytes(data))
    for _ in range(int(rng.integers(1, 4))):
        places = list(_places(known))
        if not places:
            break
        holder, key = places[rng.integers(len(places))]
        change = rng.integers(8)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[f"{key}?"] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
    return json.dumps(known).encode("utf-8", "surrogatepass")


def other_word(data: bytearray, rng: np.random.Generator) -> bytes:
    """Text of which a value behind `=`, `:` or a comma is another."""
    text = bytes(data).decode()
    places = [at for at, letter in enumerate(text) if letter in "=:,\n"]
    at = places[rng.integers(len(places))] + 1
    end = next((n for n in range(at, len(text)) if text[n] in ",\n}]"), len(text))
    return (text[:at] + RAW[rng.integers(len(RAW))] + text[end:]).encode()


def other_document(data: bytearray, rng: np.random.Generator) -> bytes:
    """JSON that is something else altogether."""
    return [b"1", b"null", b"[]", b'"x"', b"", DEEP.encode(), b"{}", b"NaN"][rng.integers(8)]


def other_arrays(data: bytearray, rng: np.random.Generator) -> bytes:
    """An .npz file of which an array has another shape, type or header, or claims to be larger than it is."""
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = list(members)[rng.integers(len(members))]
    header = members[name].split(b"\n")[0]
    changes = [
        (b"'<f4'", b"'<f8'"), (b"'<f4'", b"'|O'"), (b"'<f4'", b"'<U9'"), (b"(", b"(99999999, "), (b"(", b"(-1, "),
        (b"(5, 7)", b"(7, 5)"), (b"(5, 7)", b"(35,)"), (b"(5, 7)", b"(0, 7)"), (b"False", b"True"), (b"'|u1'", b"'<i4'"),
        (b"{", b"{" + b"[" * 300), (b"shape", b"sharp"),
    ]  # fmt: skip
    old, new = changes[rng.integers(len(changes))]
    members[name] = members[name].replace(header, header.replace(old, new, 1))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, content in members.items():
            archive.writestr(key, content)
    return stream.getvalue()


def bomb(data: bytearray, rng: np.random.Generator) -> bytes:
    """A zip archive with a member of which a few kB unpack to 300 MB."""
    return _bomb(bytes(data), int(rng.integers(5)))


@cache
def _bomb(data: bytes, chosen: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
            for number, name in enumerate(names):
                with made.open(name, "w") as member:  # piece by piece: the memory that is measured is the readers'
                    if number == chosen % len(names):
                        member.writelines(itertools.chain([HEADER], itertools.repeat(bytes(10**6), 300)))
                    else:
                        member.write(archive.read(name))
    return stream.getvalue()


def expanded(data: bytearray, rng: np.random.Generator) -> bytes:
    """A checkpoint of which some tensors have a huge shape and one stored value."""
    state = torch.load(io.BytesIO(bytes(data)), weights_only=True)["state_dict"]
    for name in rng.permutation(list(state))[: int(rng.integers(1, len(state)))]:
        shape = [side * 10 ** int(rng.integers(4)) for side in state[str(name)].shape]
        state[str(name)] = torch.zeros(1).expand(shape)
    stream = io.BytesIO()
    torch.save({"state_dict": state}, stream)
    return stream.getvalue()


def ended(data: bytearray, rng: np.random.Generator) -> bytes:
    """The end marker of a JPEG is in the middle of the pixels."""
    scan = data.rfind(b"\xff\xda")
    return bytes(data[: int(rng.integers(scan, len(data) - 2))]) + b"\xff\xd9"


def _places(known: Any) -> Iterator[tuple[Any, Any]]:
    items = known.items() if isinstance(known, dict) else enumerate(known) if isinstance(known, list) else ()
    for key, value in list(items):
        yield known, key
        yield from _places(value)


# --- samples


@cache
def samples() -> tuple[Sample, ...]:
    """Of every kind some."""
    return (
        *_images(), *_explanations(), *_manifests(), *_runs(), *_configs(), *_annotations(), *_checkpoints(), *_transformers(),
        *_provenances(),
    )  # fmt: skip


def _picture() -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (*SIZE, 3)).astype(np.uint8)).resize((56, 40), Image.Resampling.BICUBIC)


def _images() -> Iterator[Sample]:
    text = PngImagePlugin.PngInfo()
    text.add_text("words", "z" * 3000, zip=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    forms: dict[str, tuple[str, dict[str, Any], str]] = {
        "a.png": ("PNG", {"pnginfo": text, "exif": exif}, "RGB"), "gray.png": ("PNG", {}, "I;16"),
        "palette.png": ("PNG", {}, "P"), "a.jpg": ("JPEG", {"exif": exif}, "RGB"),
        "progressive.jpg": ("JPEG", {"progressive": True}, "CMYK"), "a.tif": ("TIFF", {"compression": "jpeg"}, "RGB"),
        "lzw.tif": ("TIFF", {"compression": "tiff_lzw"}, "RGB"),
        "deflate.tif": ("TIFF", {"compression": "tiff_adobe_deflate"}, "L"), "a.webp": ("WEBP", {}, "RGB"),
        "a.gif": ("GIF", {}, "P"), "a.bmp": ("BMP", {}, "RGB"), "a.ico": ("ICO", {}, "RGBA"), "a.ppm": ("PPM", {}, "RGB"),
        "a.tga": ("TGA", {"compression": "tga_rle"}, "RGB"), "a.jp2": ("JPEG2000", {}, "RGB"),
    }  # fmt: skip
    for name, (form, keywords, mode) in forms.items():
        stream = io.BytesIO()
        _picture().convert("L" if mode == "I;16" else mode).convert(mode).save(stream, form, **keywords)
        own = (ended,) if form == "JPEG" else ()
        yield Sample("image", name, stream.getvalue(), _read_image(name), (*DAMAGE, *own))


def _read_image(name: str) -> Callable[[Path], str]:
    def read(folder: Path) -> str:
        data = (folder / name).read_bytes()
        read_photo(folder / name)
        read_reduced_photo(data, lambda size: (size[0] // 4, size[1] // 4))
        return "image, flagged" if find_suffix_and_frame_warnings(data, name) else "image"

    return read


def _explanations() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    place = Placement.identity(SIZE).resized((20, 28))
    flat = Explanation(
        attribution=rng.normal(size=(5, 7)).astype(np.float32), method="gradcam", target=1, label="a", score=2.0, probability=0.5,
        input_size=(20, 28), placement=place, image=np.asarray(_picture()), model_input_image=np.zeros((20, 28, 3), np.uint8),
        parameters={"n": 3}, versions={"torch": "2"}, notes=("odd",), diagnostics={"gap": 0.1},
    )  # fmt: skip
    deep = Explanation(
        attribution=rng.random((3, 4, 5)).astype(np.float32), method="gradcam", target=None, label="volume", score=0.5,
        input_size=(6, 8, 10), placement=Placement.identity((6, 8, 10)), affine=np.eye(4),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name, one in (("flat", flat), ("volume", deep)):
            for suffix, own in (
                ("npz", (other_arrays, other_arrays, bomb)),
                ("json", (other_value,) * 4 + (other_word,) * 2),
            ):
                path = one.save(Path(folder) / f"{name}.{suffix}")
                yield Sample("explanation", path.name, path.read_bytes(), _read_explanation(path.name), (*DAMAGE, *own))


def _read_explanation(name: str) -> Callable[[Path], str]:
    def read(folder: Path) -> str:
        return _drawn(Explanation.load(folder / name, max_bytes=2**26))

    return read


def _drawn(one: Explanation) -> str:
    """What a user does with it."""
    repr(one), one.caption
    if np.prod(one.input_size) <= 2**20 and (one.placement is None or np.prod(one.placement.image_size) <= 2**20):
        one.heatmap("input")
        one.overlay(height=32)
    return "explanation"


def _manifests() -> Iterator[Sample]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    columns = {"path": [f"{n}.png" for n in range(30)], "target": list(range(30)), "site": ["a", "é", None] * 10}
    text = "path,target,site\n" + "".join(f"{n}.png,{n},{'aé'[n % 2]}\n" for n in range(30))
    stream = io.BytesIO()
    parquet.write_table(pa.table(columns), stream)
    yield Sample("manifest", "m.csv", text.encode(), _read_manifest("m.csv"), (*DAMAGE, other_word, other_word))
    yield Sample("manifest", "m.parquet", stream.getvalue(), _read_manifest("m.parquet"))


def _read_manifest(name: str) -> Callable[[Path], str]:
    def read(folder: Path) -> str:
        manifest = build_manifest(folder / name)
        manifest.rows(0, 10)
        return "manifest"

    return read


class Bright(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 5, 4)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N,3,H,W) -> (N,2)"""
        y: torch.Tensor = self.pool(self.layer(x))
        return y


@cache
def _sound_run() -> Path:
    folder = Path(tempfile.mkdtemp())
    (folder / "images").mkdir()
    for n in range(6):
        _picture().rotate(60 * n).save(folder / "images" / f"{n}.png")
    torch.manual_seed(0)
    preprocess = Preprocess(resize=(20, 28), mean=(0,) * 3, std=(1,) * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_batch(
            GradCAM(Bright().eval(), "layer", preprocess=preprocess),
            folder / "images",
            folder / "run",
            options=BatchOptions(chunk_size=3),
        )
    return folder / "run"


def _runs() -> Iterator[Sample]:
    sound = _sound_run()
    known = (sound / "run.json").read_bytes()
    yield Sample("run", "run.json", known, _read_run, (*DAMAGE, *(other_value,) * 5, *(other_word,) * 2))
    part = sound / "parts" / "part-00000000.parquet"
    yield Sample("run", "parts/part-00000000.parquet", part.read_bytes(), _read_run)


def _read_run(folder: Path) -> str:
    for path in (path for path in _sound_run().rglob("*") if path.is_file()):
        place = folder / path.relative_to(_sound_run())
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    made = BatchRun(folder)
    repr(made), made.summary, made._repr_html_()
    made.query("probability < 2", "probability", 2)
    for one in made:
        _drawn(one)
    made.save_html(folder / "page.html", overwrite=True)
    return "run"


CONFIG = b"""seed = 3
replicates = 300
[data]
manifest = "list.csv"
label = "class"
patient = "patient"
[model]
source = "torchvision:resnet18"
weights = "random"
[explain]
methods = ["gradcam"]
findings = ["lesion"]
[explain.settings]
gradcam = { precision = "float32" }
"""
CHOICE = b"""# gradcam is best
method = "gradcam"
layer = "layer4"
model = "0123"
clear = true
[[standing]]
title = "gradcam"
images = 3
pointing = [0.1, 0.2, 0.3]
"""


def _configs() -> Iterator[Sample]:
    mutations = (*DAMAGE, *(other_word,) * 6)
    yield Sample("TOML", "audit.toml", CONFIG, _read_config, mutations)
    yield Sample("TOML", "choice.toml", CHOICE, _read_choice, mutations)


def _read_config(folder: Path) -> str:
    return "config" if Config.from_source(folder / "audit.toml").digest else "no config"


def _read_choice(folder: Path) -> str:
    return "choice" if read_choice(folder / "choice.toml").method else "no choice"


def _annotations() -> Iterator[Sample]:
    shapes: list[dict[str, Any]] = [
        {"bbox": [3, 4, 20, 10]},
        {"bbox": [3, 4, 20, 10], "segmentation": [[1.0, 2.0, 30.0, 2.0, 20.0, 30.0]]},
        {"bbox": [0, 0, 1, 1], "segmentation": {"size": list(SIZE), "counts": [100, 40, SIZE[0] * SIZE[1] - 140]}},
        {"bbox": [0, 0, 1, 1], "mask_file": "none.png"},
    ]
    known = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": SIZE[0], "width": SIZE[1]} for n in range(4)],
        "annotations": [{"id": n, "image_id": n, "category_id": 1, **shape} for n, shape in enumerate(shapes)],
        "categories": [{"id": 1, "name": "cell"}],
    }
    yield Sample(
        "COCO",
        "c.json",
        json.dumps(known).encode(),
        _read_annotations,
        (*DAMAGE, *(other_value,) * 6, *(other_word,) * 2),
    )


def _read_annotations(folder: Path) -> str:
    evidence = load_ground_truth(folder / "c.json", (), folder, ["cell"])
    refused = 0
    for n in range(4):
        try:
            evidence.load_mask({"path": f"{n}.png", "row": n}, SIZE)
        except CamscopeError:
            refused += 1
    return "annotations" if refused < 2 else "annotations, some refused"


def _checkpoints() -> Iterator[Sample]:
    from safetensors.torch import save

    state = {name: value.contiguous() for name, value in Bright().state_dict().items()}
    packed, old = io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": state, "epoch": 3}, packed)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    for name, data, own in (
        ("w.pt", packed.getvalue(), (bomb, expanded, expanded)), ("old.pt", old.getvalue(), ()),
        ("w.safetensors", save(state), ()),
    ):  # fmt: skip
        yield Sample("checkpoint", name, data, _read_checkpoint(name), (*DAMAGE, *own))


def _read_checkpoint(name: str) -> Callable[[Path], str]:
    def read(folder: Path) -> str:
        model = Bright()
        before = [value.clone() for value in model.parameters()]
        state = read_state_dict(folder / name)
        try:
            load_state_dict_strictly(model, state, name)
        except CamscopeError:
            if not all(map(torch.equal, before, model.parameters())):
                raise RuntimeError("a checkpoint that is refused has changed the model") from None
            raise
        return "checkpoint"

    return read


def _transformers() -> Iterator[Sample]:
    sound = _sound_transformer()
    for name in ("config.json", "preprocessor_config.json", "model.safetensors.index.json"):
        mutations = (*DAMAGE, *(other_value,) * 6, *(other_word,) * 2, other_document)
        yield Sample("Hugging Face", name, (sound / name).read_bytes(), _read_transformer, mutations)


@cache
def _sound_transformer() -> Path:
    import transformers

    folder = Path(tempfile.mkdtemp())
    small: dict[str, Any] = {"num_labels": 3, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.ViTConfig(num_hidden_layers=1, image_size=16, patch_size=8, **small)
    transformers.ViTForImageClassification(config).save_pretrained(folder, max_shard_size="2KB")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def _read_transformer(folder: Path) -> str:
    for path in _sound_transformer().iterdir():
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    card = get_loaded_model_metadata(load_model(f"hf:{folder}"))
    if card is None or card.preprocess is None:
        return "model without preprocessing"
    card.preprocess(np.asarray(_picture()))
    return "model"


def _provenances() -> Iterator[Sample]:
    known: dict[str, Any] = {
        "camscope": "1", "code": "0", "config": {"seed": 1}, "config_digest": "ab", "masks": "m", "rows": {"1": "a"},
        "data": {"digest": "x", "rows": 1}, "model": {"digest": "y", "weights": None}, "bytes": {"report.html": "00"},
        "versions": {"matplotlib": "3"}, "declarations": 1, "declared_before_looking": True,
    }  # fmt: skip
    known["seal"] = provenance_file.compute_seal(known)
    mutations = (*DAMAGE, *(other_value,) * 4, *(other_word,) * 2)
    yield Sample(
        "provenance",
        provenance_file.PROVENANCE_FILE,
        provenance_file.serialize_record(known),
        _read_provenance,
        mutations,
    )
    log = b"".join(
        json.dumps({"event": provenance_file.START_EVENT, "config": "ab", "time": str(n)}).encode() + b"\n"
        for n in range(3)
    )
    yield Sample("provenance", provenance_file.LOG_FILE, log, _read_provenance, (*DAMAGE, other_word, other_word))


def _read_provenance(folder: Path) -> str:
    if not (folder / provenance_file.PROVENANCE_FILE).exists():
        shutil.copyfile(_sound_provenance(), folder / provenance_file.PROVENANCE_FILE)
    assert not verify_audit(folder).is_intact  # there is nothing else of an audit
    _load_provenance(SimpleNamespace(folder=folder))  # type: ignore[arg-type]  # an audit of which only the folder counts
    return "provenance"


@cache
def _sound_provenance() -> Path:
    path = Path(tempfile.mkdtemp()) / provenance_file.PROVENANCE_FILE
    path.write_bytes(next(_provenances()).data)
    return path


# --- reading


def mutated(count: int, seed: int) -> Iterator[Damaged]:
    """Name of the sample, mutation and bytes, `count` times: every kind has as many, whatever its samples are."""
    rng, kinds = np.random.default_rng(seed), dict[str, list[Sample]]()
    for sample in samples():
        kinds.setdefault(sample.kind, []).append(sample)
    groups = list(kinds.values())
    for number in range(count):
        group = groups[number % len(groups)]
        sample = group[number // len(groups) % len(group)]
        mutation = sample.mutations[rng.integers(len(sample.mutations))]
        yield f"{sample.kind}/{sample.name}", mutation.__name__, mutation(bytearray(sample.data), rng)


def read(name: str, mutation: str, data: bytes) -> Outcome:
    """One file, read in a folder of its own."""
    sample = next(one for one in samples() if f"{one.kind}/{one.name}" == name)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = Path(folder) / sample.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        return outcome(sample.kind, mutation, lambda: sample.read(Path(folder)))


def main() -> int:
    """Print the table; 1 where a file did what none may."""
    given = options(__doc__, 5000)
    os.environ.setdefault("CAMSCOPE_KEY", "fuzz")
    torch.manual_seed(0)
    for sample in samples():  # libraries are imported, and the memory that they take is theirs
        print(sample.kind, sample.name, read(f"{sample.kind}/{sample.name}", "none", sample.data).result)
    return run(mutated(given.count, given.seed), read, trace=given.trace)


if __name__ == "__main__":
    sys.exit(main())
