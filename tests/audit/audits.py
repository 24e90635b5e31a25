"""Settings of the audits that the tests share, and what is read from an audit."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")


from camscope.audit.config_generation import build_config
from camscope.audit.core.config import Config

SMALL = {"faithfulness": 8, "robustness": 8, "sanity": 5, "gallery": 4}
IMAGES = 72
SLOW = ("faithfulness", "robustness", "sanity")
FAST = {
    "data": {"subgroups": ("site",)},
    "explain": {"findings": ("lesion",), "settings": {"integratedgradients": {"n_steps": 2}}},
    "n_resamples": 500,
    "sample_sizes": SMALL,
    "margins": {"reliance_prevalence": 0.25},  # of thirteen patients with the token some would have shown that
}


@contextmanager
def figures_left_out() -> Iterator[None]:
    """Reports have no charts, which take a third of a small audit: test_page draws them, and tests/cli/test_audit.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("camscope.audit.report.render_html_page.draw_figures", lambda summary: defaultdict(list))
        yield


def changed(config: Config, **tables: object) -> Config:
    """The config with other tables."""
    plain = config.model_dump()
    for name, table in tables.items():
        plain[name] = {**plain[name], **table} if isinstance(table, dict) else table
    return Config.from_source(plain)


def word(run, question, subject=None):
    found = [one for one in run.verdicts if one.question == question and subject in (None, one.qualifier)]
    assert len(found) == 1, (question, subject, [one.claim for one in found])
    return found[0]


def digests(folder):
    from camscope.audit.provenance.provenance_file import digest_outputs

    return digest_outputs(folder)


def flip(path):
    """Change the lowest bit of a digit or letter in the middle."""
    data = bytearray(path.read_bytes())
    place = next(i for i in range(len(data) // 2, len(data)) if chr(data[i]).isalnum())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def generate_config(manifest, model, **options):
    """The text of the config that `audit init` writes."""
    return build_config(manifest, model, **options).text
