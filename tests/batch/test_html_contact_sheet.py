"""The contact sheet of a run: which rows it shows, what it says of them, and that nothing in it runs or reaches out."""

import base64
import hashlib
import io
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from camscope import GradCAM, LayerCAM, load_model
from camscope.cli import app
from camscope.errors import InputError, OutputError

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("jinja2")

from camscope.batch import BatchRun, Query, run_batch, run_reader
from camscope.batch.html_contact_sheet import build_contact_sheet

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "img", "input", "br", "link", "hr"}


class Reader(HTMLParser):
    """The elements of a page with their attributes, and its text; every element is closed where it should be."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.words = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def all(self, tag, **known):
        known = {name.rstrip("_"): value for name, value in known.items()}
        return [own for name, own in self.elements if name == tag and known.items() <= own.items()]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def picture(uri):
    head, data = uri.split(",", 1)
    assert head == "data:image/webp;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Eight images, two methods: one broken, one that changes, one that goes, one large; names and columns that are code."""
    folder = tmp_path_factory.mktemp("show")
    (folder / "images").mkdir()
    drawn, lines = np.random.default_rng(0), [f'path,id,site,"<b>{EVIL}"']
    for n in range(8):
        size = (600, 900) if n == 2 else (48, 64)
        smooth = Image.fromarray(drawn.integers(0, 256, (3, 4, 3), dtype=np.uint8)).resize(size[::-1])
        smooth.save(folder / "images" / f"{n}.png")
        lines.append(
            f"images/{n}.png,{EVIL if n == 1 else f'case {n}'},{'{{ 7 * 7 }} & co' if n % 2 else EVIL},x\u202ey"
        )
    (folder / "images" / "4.png").write_bytes(b"no image")
    (folder / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    model = load_model("phantom")
    run_batch([GradCAM(model), LayerCAM(model, "layer3")], folder / "list.csv", folder / "run", ["nodule"])
    (folder / "images" / "5.png").write_bytes((folder / "images" / "6.png").read_bytes())
    (folder / "images" / "7.png").unlink()
    return BatchRun(folder / "run")


def read(run, *query, **options):
    return Reader(build_contact_sheet(run, Query(*query), **options).html)


@pytest.mark.slow
def test_every_row_is_a_card_with_its_words(run):
    page = read(run)
    cards = page.text.split("case ")
    assert len(page.all("li", class_="card")) == 16
    assert "All of 16 rows; all are shown." in page.text
    assert "case 0 Grad-CAM · layer4" in page.text
    assert "case 0 LayerCAM · layer3" in page.text
    assert "16 (2 without a map)" in page.text
    assert "phantom (" in page.text
    assert sum("this is not an image of a format that Pillow knows" in card for card in page.words) == 2
    assert len(page.all("img", class_="map")) == 14
    assert len(page.all("img", class_="original")) == 10  # of 8 images one is broken, one has changed, one is gone
    assert sum("Original missing: it has changed since it was explained" in word for word in page.words) == 2
    assert sum("Original missing: there is no such file" in word for word in page.words) == 2
    below = build_contact_sheet(run, Query()).html.partition("<main>")[2]
    assert {unescape(one) for one in re.findall(r"<dt>(.*?)</dt>", below)} == {"target", "site", f"<b>{EVIL}"}
    assert "target nodule" in page.text.split("no map")[1]
    assert "target nodule" not in cards[1]


def test_the_query_chooses_sorts_and_counts(run):
    page = read(run, "method = 'gradcam' and status <> 'failed'", "id desc", 3, image_height=64)
    assert re.findall(r"case \d", page.text) == ["case 7", "case 6", "case 5"]
    assert "7 of 16 rows match; the first 3 are shown." in page.text
    assert "where method = 'gradcam' and status <> 'failed' sorted by id desc" in page.text
    assert page.all("img", class_="map")[0]["alt"].startswith("Grad-CAM · layer4: the map for nodule, on gray")


def test_the_pictures_are_the_overlay_and_the_original(run):
    page = read(run, "id = 'case 0' and method = 'gradcam'", image_height=48)
    row = run.query("id = 'case 0' and method = 'gradcam'").to_pylist()[0]
    photo = run.read_image(row)
    shown, before = (picture(page.all("img", class_=kind)[0]["src"]) for kind in ("map", "original"))
    assert np.abs(before.astype(int) - photo).mean() < 12
    assert np.abs(shown.astype(int) - run.explanation(row, photo).overlay()).mean() < 12
    alone = picture(read(run, "id = 'case 7'", image_height=48).all("img", class_="map")[0]["src"])
    assert alone.shape == (48, 64, 3)  # the original's proportions, on gray
    assert (np.abs(alone.astype(int) - 128).max(-1) < 9).mean() > 0.3


def test_a_large_photograph_is_made_small_before_it_is_drawn_on(run):
    row = run.query("id = 'case 2' and method = 'gradcam'").to_pylist()[0]
    photo = run.read_image(row)
    one = run.explanation(row, photo)
    quick, whole = run_reader.render_thumbnail(one, photo, 60), one.overlay(height=60)
    assert quick.shape == whole.shape == (60, 90, 3)
    assert np.abs(quick.astype(int) - whole).mean() < 2
    assert run_reader.render_thumbnail(one, None, 60).shape == (60, 90, 3)
    page = read(run, "id = 'case 2'", image_height=60)
    assert {picture(one["src"]).shape for one in page.all("img")} == {(60, 90, 3)}


def test_an_image_is_read_once_for_all_its_rows(run, monkeypatch):
    reads, photo = [], type(run).read_image
    monkeypatch.setattr(type(run), "read_image", lambda own, row: reads.append(row["id"]) or photo(own, row))
    read(run, None, "method", num_threads=3)
    assert sorted(reads) == sorted({*reads})
    assert len(reads) == 7  # the broken one has no map to draw


def test_what_is_code_elsewhere_is_text_here(run):
    made = build_contact_sheet(run, Query())
    page = Reader(made.html)
    assert EVIL in page.text
    assert f"<b>{EVIL}" in page.text
    assert "{{ 7 * 7 }} & co" in page.text
    assert "\u202e" not in made.html
    assert not [tag for tag, own in page.elements if tag in ("script", "b", "link", "iframe", "object", "base", "form")]
    assert not [name for _, own in page.elements for name in own if name.startswith("on") or name == "style"]
    for _, own in page.elements:
        assert own.get("src", "data:image/webp;base64,").startswith("data:image/webp;base64,")
        assert "href" not in own
    assert not re.search(r"url\(|@import|https?://", made.html)


def test_the_policy_allows_the_pages_own_style_and_pictures_alone(run):
    html = build_contact_sheet(run, Query(max_rows=1)).html
    (policy,) = (own["content"] for own in Reader(html).all("meta") if own.get("http-equiv"))
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert (
        policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert html.startswith('<!doctype html>\n<html lang="en">')


def test_a_condition_of_code_is_text_too(run):
    page = read(run, f"id <> '</code>{EVIL}'", None, 1)
    assert f"id <> '</code>{EVIL}'" in page.text
    assert not page.all("script")


def test_a_run_writes_its_page(run, tmp_path):
    file = run.save_html(tmp_path / "page.html", "status = 'ok'", max_rows=2, image_height=32)
    assert "the first 2 are shown" in file.read_text(encoding="utf-8")
    with pytest.raises(OutputError, match=r"page\.html exists"):
        run.save_html(tmp_path / "page.html")
    with pytest.raises(InputError, match=r"none of 16 rows matches the condition: 1 = 0"):
        run.save_html(tmp_path / "other.html", "1 = 0")
    with pytest.raises(InputError, match="image_height=8"):
        run.save_html(tmp_path / "other.html", image_height=8)
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


# --- the command


@pytest.fixture
def show(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["show", str(run.folder), *words])


@pytest.mark.slow
def test_the_command_writes_a_page_and_says_so_in_a_line(show, tmp_path):
    found = show("--where", "method = 'gradcam'", "--sort", "id", "--limit", "2")
    assert (found.exit_code, found.stdout, found.stderr) == (
        0,
        "page    2 rows of 8 that match, of 16: page.html\n",
        "",
    )
    assert len(Reader((tmp_path / "page.html").read_text(encoding="utf-8")).all("li")) == 2
    again = show()
    assert (again.exit_code, again.stderr) == (1, "error: page.html exists; pass --overwrite, or another -o\n")
    assert show("--overwrite").stdout == "page    16 rows of 16: page.html\n"


def test_no_match_is_said_and_writes_nothing(show, tmp_path):
    found = show("--where", "score > 1e9", "-o", "none.html")
    assert (found.exit_code, found.stderr) == (0, "")
    assert "no map of 16 matches score > 1e9; no page is written" in " ".join(found.stdout.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--where", "nope = 1"), "the columns are row, id, path"),
        (("--sort", "nope"), "the columns are row, id, path"),
        (("-o", "page.png"), "expected a .html file"),
        (("--limit", "0"), "limit"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(show, words, said):
    found = show(*words)
    assert found.exit_code == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path):
    found = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert found.exit_code == 2
    assert "is not the folder of a run, since it holds no run.json" in found.stderr
