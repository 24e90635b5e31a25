"""Sphinx configuration of the documentation: `make docs` builds it strictly and without a network."""

import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from build_reference import write_generated_pages, write_inventories  # noqa: E402 - beside this file

import camscope  # noqa: E402 - of the environment that builds

project = "camscope"
author = "The camscope authors"
copyright = f"2026, {author}"
release = version = camscope.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_generated_source", "Thumbs.db", "**/*.json"]
default_role = "code"
nitpicky = True
INTERNAL_TYPES = (
    "ActivationBytes|BaseMethod|DetectionHead|EvaluationContext|ExplainerClass|ExtraInputs|GradientAccumulator|GridEntry"
    "|PathResolver|PrefixCache|ScoreRange|T"
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

sphinx_gallery_conf = {
    "examples_dirs": str(EXAMPLES),
    "gallery_dirs": "tutorials",
    "filename_pattern": r"(quickstart|custom_method|hooks_tour)\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "remove_config_comments": True,
}

html_theme = "pydata_sphinx_theme"
html_title = "camscope"
html_theme_options = {
    "navbar_align": "left",
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


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx reads the sources."""
    app.connect("autodoc-process-docstring", escape_markup, priority=400)  # before the sections are parsed
    write_generated_pages(DOCS / "_build" / "generated")
