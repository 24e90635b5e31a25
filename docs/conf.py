"""Sphinx configuration of the documentation: `make docs` builds it strictly and without a network."""

import base64
import io
import re
import shutil
import sys
from pathlib import Path

from docutils.nodes import paragraph as paragraph_node
from PIL import Image
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # tutorials use benchmarks/

from build_reference import write_generated_pages, write_inventories  # noqa: E402 - beside this file

import camscope  # noqa: E402 - of the environment that builds

PROJECT_SUMMARY = (
    "See where a PyTorch vision model looks, and whether you can trust the map: class activation maps, gradients, attention "
    "and perturbations for classifiers, detectors, segmentation models and embeddings, with metrics and audits."
)
project = "camscope"
author = "The camscope authors"
copyright = f"2026, {author}"
release = version = camscope.__version__
language = "en"
locale_dirs = ["locale"]
gettext_compact = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_templates", "locale", "_generated_source", "Thumbs.db", "**/*.json"]
default_role = "code"
smartquotes = False  # options keep their two hyphens and conditions their quotes
nitpicky = True
INTERNAL_TYPES = (
    "ActivationBytes|BaseMethod|HuggingFaceDetectorSettings|EvaluationContext|ExplainerClass|ExtraInputs|FaultCollector"
    "|GradientAccumulator|GridEntry|ModelInput|PathResolver|PlannedSize|PrefixCache|ScoredTokens|ScoreRange|T"
)
nitpick_ignore_regex = [
    (r"py:.*", r"(?!camscope).*"),  # strict for our own names; other projects' names link where an inventory has them
    (r"py:class", rf"camscope\..*\.({INTERNAL_TYPES})"),
]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "substitution"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_type_aliases = {"TargetLike": "TargetLike"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

intersphinx_mapping = {
    name: (address, str(DOCS / "_build" / "inventories" / f"{name}.inv"))
    for name, address in write_inventories(DOCS / "inventories", DOCS / "_build" / "inventories").items()
}

EXAMPLES = DOCS / "_build" / "examples"  # a copy: what an example writes stays out of the sources
shutil.copytree(DOCS.parent / "examples", EXAMPLES, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

EXECUTED_EXAMPLES = (
    "quickstart", "custom_method", "hooks_tour", "batch_heatmaps", "chest_xray", "segmentation", "mri_volume", "shortcut",
    "map_checks", "batch_ray",
)  # fmt: skip

sphinx_gallery_conf = {
    "examples_dirs": str(EXAMPLES),
    "gallery_dirs": "tutorials",
    "filename_pattern": rf"({'|'.join(EXECUTED_EXAMPLES)})\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
    "min_reported_time": 3600,  # no time on the page: it would differ from build to build
    "remove_config_comments": True,
}

templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_theme = "pydata_sphinx_theme"
html_title = "camscope"
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["language", "theme-switcher", "navbar-icon-links"],
    "show_toc_level": 2,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def escape_markup(app: Sphinx, kind: str, name: str, documented: object, options: object, lines: list[str]) -> None:
    """Escape `*` and `|` outside backticks: docstrings are plain text with code, and formulas hold both."""
    for index, line in enumerate(lines):
        if not re.match(r"\s*(>>>|\.\.\.|\*+\w+:)", line):
            parts = re.split(r"(`[^`]*`)", line)
            lines[index] = "".join(part if part.startswith("`") else re.sub(r"([*|])", r"\\\1", part) for part in parts)


def parse_as_text(docstring: GoogleDocstring) -> None:
    """Parse the docstring of a property like that of a function: a colon in its first line ends no type."""
    if docstring._what == "property":
        docstring._what = "method"
    parse_docstring(docstring)


parse_docstring, GoogleDocstring._parse = GoogleDocstring._parse, parse_as_text


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Write `llms.txt`: every page with its title and its first paragraph, for readers that are programs."""
    if error is not None or app.builder.format != "html":
        return
    lines = ["# camscope", "", f"> {PROJECT_SUMMARY}", ""]
    for name in sorted(app.env.found_docs, key=lambda page: (page.split("/")[:-1], not page.endswith("index"), page)):
        if name.endswith("/index") and name.count("/") == 1:
            lines += ["", f"## {app.env.titles[name].astext()}", ""]
        paragraph = next(app.env.get_doctree(name).findall(paragraph_node), None)
        text = " ".join(paragraph.astext().split()) if paragraph is not None else ""
        lines.append(f"- [{app.env.titles[name].astext()}]({name}.html): {text[:200]}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def translate_theme(app: Sphinx, config: Config) -> None:
    """Set the one text of the theme that is an option and not in its catalogs."""
    if config.language == "zh_CN":
        config.html_theme_options["header_dropdown_text"] = "更多"


def show_image(image: Image.Image) -> str:
    """Return an image as HTML, for cells of a tutorial that end in an image."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", quality=85)
    return f'<img alt="" src="data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


Image.Image._repr_html_ = show_image


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx reads the sources."""
    app.connect("config-inited", translate_theme)
    app.connect("autodoc-process-docstring", escape_markup, priority=400)  # before the sections are parsed
    app.connect("build-finished", write_llms_txt)
    write_generated_pages(DOCS / "_build" / "generated")
