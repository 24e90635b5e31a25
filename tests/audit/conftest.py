"""Finished audits of two nets, made once for all tests."""

import json
import shutil
from functools import partial

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")


from camscope import audit
from camscope.audit.core.config import Config
from camscope.audit.demo_dataset_and_model import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study
from tests.audit.audits import FAST, IMAGES, SLOW, changed, figures_left_out


@pytest.fixture(scope="module")
def cases(made_once, one_thread):
    """Of a clean and a confounded net: the config, and the finished audit."""

    def build(folder):
        for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
            config = changed(write_demo_study(folder / name / "study", p, n_images=IMAGES), **FAST)
            if name == "clean":  # whose audit is made again and again
                config = changed(config, skip=SLOW, data={"subgroups": ()}, regions={"presets": ("corners",)})
            (folder / f"{name}.json").write_text(config.model_dump_json())
            with figures_left_out():
                audit.run_audit(config, folder / name / "audit")

    folder = made_once("audits-of-two-nets", build)
    return {
        name: (
            Config.from_source(json.loads((folder / f"{name}.json").read_text())),
            audit.AuditRun(folder / name / "audit"),
        )
        for name in ("clean", "confounded")
    }


@pytest.fixture(scope="package", autouse=True)
def charts_drawn_once():
    """The pages of these tests show the same charts again and again: each is drawn once, in a tenth of a second."""
    from camscope.audit.report import section_figures

    drawn = {}

    def draw_once(draw, *args, **options):
        key = draw.__name__, repr(args), repr(options)
        if key not in drawn:
            drawn[key] = draw(*args, **options)
        return drawn[key]

    def convert_once(convert, figure, *texts):
        if (id(figure), texts) not in drawn:
            drawn[id(figure), texts] = convert(figure, *texts)
        return drawn[id(figure), texts]

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in vars(section_figures) if name.startswith("draw_") and name != "draw_figures"]:
            patch.setattr(section_figures, name, partial(draw_once, getattr(section_figures, name)))
        patch.setattr(section_figures, "to_inline_svg", partial(convert_once, section_figures.to_inline_svg))
        yield


@pytest.fixture
def without_figures():
    """Reports have no charts."""
    with figures_left_out():
        yield


@pytest.fixture
def copied(cases, tmp_path):
    """A copy of the confounded audit, to be damaged."""
    shutil.copytree(cases["confounded"][1].folder, tmp_path / "audit")
    return tmp_path / "audit"
