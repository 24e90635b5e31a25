"""Update or check the Chinese pages: `python docs/translations.py update` or `python docs/translations.py check`.

Both extract the texts of the English pages first. `update` puts new texts into the catalogs and marks changed ones as fuzzy.
`check` counts what is missing or outdated in the pages of `PAGES`, and fails if there is any.
"""

import subprocess
import sys
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

LANGUAGE = "zh_CN"
PAGES = (
    "index",
    "get-started/index",
    "get-started/install",
    "get-started/first-map",
    "get-started/reading-a-map",
    "get-started/which-method",
    "help/faq",
    "tutorials/hooks_tour",
    "recipes/index",
    "recipes/cnn",
    "recipes/transformers",
    "recipes/clip",
    "recipes/detection",
    "recipes/segmentation",
)
DOCS = Path(__file__).resolve().parent
CATALOGS = DOCS / "locale" / LANGUAGE / "LC_MESSAGES"
TEMPLATES = DOCS / "_build" / "gettext"


def main(action: str) -> int:
    """Update the catalogs, or count what they lack. Return the exit code."""
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "gettext", "-d", str(DOCS / "_build" / "doctrees-gettext")]
    subprocess.run([*command, str(DOCS), str(TEMPLATES)], check=True)  # noqa: S603 - this interpreter, paths of this folder
    incomplete = 0
    for page in PAGES:
        catalog, place = merge_catalog(page), CATALOGS / f"{page}.po"
        texts = [message for message in catalog if message.id]
        missing = sum(not message.string for message in texts)
        outdated = sum(message.fuzzy for message in texts)
        print(f"{page}: {len(texts)} texts, {missing} missing, {outdated} outdated")
        incomplete += missing + outdated
        if action == "update":
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                write_po(file, catalog, width=0, omit_header=False)
    return int(action == "check" and incomplete > 0)


def merge_catalog(page: str) -> Catalog:
    """Return the translations of a page, merged with the texts that the page has now."""
    with (TEMPLATES / f"{page}.pot").open("rb") as file:
        template = read_po(file)
    for message in template:
        message.locations = []  # line numbers change with every edit
    place = CATALOGS / f"{page}.po"
    if place.is_file():
        with place.open("rb") as file:
            catalog = read_po(file, locale=LANGUAGE)
    else:
        catalog = Catalog(LANGUAGE, project="camscope", fuzzy=False)
    catalog.update(template, update_creation_date=False)
    catalog.obsolete.clear()
    return catalog


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
