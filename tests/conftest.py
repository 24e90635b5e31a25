"""What any test may rely on. None touches the network: what is not on this machine fails at once, as on a plane."""

import atexit
import functools
import gc
import logging
import os
import random
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

gc.disable()  # what is collected stays: to look through it while it grows costs seconds

os.environ.setdefault("CAMSCOPE_KEY", "the key of the tests")  # names of scans: none is made in anybody's home

BEGAN = pytest.StashKey[float]()
SECONDS: Counter[str] = Counter()  # processor time by file
SHARED_SECONDS: list[float] = []  # that the current test took to make what all files share
FILE_BUDGET = 30  # seconds of processor time
FILE_SHARE = 0.06  # of a whole run, for machines that are slower or busy
LOCAL = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0"}


def processor_seconds() -> float:
    """What this process and those that it started and waited for have taken."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--thorough` asks every model of the zoo and runs what takes long; `--write-models` also writes docs/evidence/models.md."""
    parser.addoption("--thorough", action="store_true", help="ask all models of the zoo, and run tests marked thorough")
    parser.addoption("--write-models", action="store_true", help="write docs/evidence/models.md from what is measured")


def pytest_collection() -> None:
    """Start the second worker at the last file: each worker then compiles half of the files, and finds the others compiled."""
    if os.environ.get("PYTEST_XDIST_WORKER") != "gw1" or sys.dont_write_bytecode:
        return
    root = Path(__file__).parents[1]
    for path in sorted(root.glob("tests/**/test_*.py"), reverse=True):
        with suppress(Exception, pytest.skip.Exception):  # it is said when the file is collected
            import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are marked thorough, unless they are asked for."""
    mark_thorough_cases(items)
    if not config.getoption("--thorough") and not config.getoption("--write-models"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)


def mark_thorough_cases(items: list[pytest.Item]) -> None:
    """Mark as thorough what `one_in` and `by_family` leave out of the cases of a test."""
    from tests.tools import REPRESENTATIVES

    numbers: Counter[str] = Counter()
    for item in items:
        step, by_family = item.get_closest_marker("one_in"), item.get_closest_marker("by_family")
        if step is not None:
            name = item.nodeid.partition("[")[0]
            if numbers[name] % step.args[0]:
                item.add_marker(pytest.mark.thorough)
            numbers[name] += 1
        if by_family is not None and item.callspec.params["method"] not in REPRESENTATIVES:
            item.add_marker(pytest.mark.thorough)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when a test begins, in processor time."""
    item.stash[BEGAN] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The last report of a test carries what the test has taken with its fixtures."""
    if call.when == "teardown":  # the only report that has it
        shared, SHARED_SECONDS[:] = sum(SHARED_SECONDS), []  # of what all files share
        item.user_properties.append(("processor_seconds", processor_seconds() - item.stash[BEGAN] - shared))
        item.user_properties.append(("shared_seconds", shared))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the processor time of each file."""
    spent = dict(report.user_properties)
    SECONDS[report.nodeid.partition("::")[0]] += spent.get("processor_seconds", 0.0)
    SECONDS["what files share"] += spent.get("shared_seconds", 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A file over the budget fails the run, unless it is a thorough one."""
    if files_over_budget() and session.exitstatus == 0 and not session.config.getoption("--thorough"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the processor time of the run, and of the files that take most of it."""
    slowest = ", ".join(f"{file} {seconds:.0f}" for file, seconds in SECONDS.most_common(12))
    terminalreporter.write_line(f"processor time of the tests: {SECONDS.total():.0f} s (most: {slowest})")
    for file, seconds in files_over_budget():
        terminalreporter.write_line(
            f"{file} takes {seconds:.0f} s, more than {FILE_BUDGET}: use fewer cases, or move some to benchmarks/",
            red=True,
        )


def files_over_budget() -> list[tuple[str, float]]:
    """Return the files that take more processor time than a file may."""
    budget = max(FILE_BUDGET, FILE_SHARE * SECONDS.total())
    return [(file, seconds) for file, seconds in SECONDS.items() if seconds > budget and file.endswith(".py")]


def seed_the_cpu_alone() -> None:
    """Without a card, `torch.manual_seed` need not note its stack for cards that may come: a millisecond less a test."""
    import torch

    def manual_seed(seed: int) -> torch.Generator:
        return torch.default_generator.manual_seed(seed)

    if not torch.accelerator.is_available():
        torch.manual_seed = torch.random.manual_seed = manual_seed


def pytest_collection_finish() -> None:
    """What is here by now stays to the end: no garbage collector need look through it again and again.

    Torch's loggers pass on what they are told: pytest then listens at the root, not at each of them in every test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    seed_the_cpu_alone()
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Python takes itself apart in its usual way, after pytest has looked for what its tests left alone."""
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Names other than this machine's do not resolve, for as long as the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        original = socket.getaddrinfo

        def only_local(host: str | bytes | None, *args: object, **kwargs: object) -> object:
            name = host.decode() if isinstance(host, bytes) else host
            if name in LOCAL or name == socket.gethostname():
                return original(host, *args, **kwargs)  # type: ignore[arg-type] - handed on as it came
            raise socket.gaierror(socket.EAI_NONAME, f"tests use no network (asked for {name})")

        patch.setattr(socket, "getaddrinfo", only_local)
        yield


@pytest.fixture(scope="session", autouse=True)
def templates_compiled_once() -> Iterator[None]:
    """Each page of an audit has its own Jinja environment, which would compile the same 18 templates again: half a second."""
    if find_spec("jinja2") is None:
        yield
        return
    import jinja2

    compile_template, known = jinja2.Environment.compile, {}

    def compile_once(self: jinja2.Environment, source: object, *args: object) -> object:
        options = type(self), self.finalize, self.autoescape, self.undefined, self.trim_blocks, self.lstrip_blocks
        key = source, args, options, frozenset(self.filters.items())
        if key not in known:
            known[key] = compile_template(self, source, *args)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", compile_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def command_line_built_once() -> Iterator[None]:
    """Each call of a command in a test would build all commands again: 12 ms."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`made_once(name, build)`: a folder that `build(folder)` fills once for all workers of a run; not to be changed."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(name: str, build: Callable[[Path], None]) -> Path:
        folder, finished = base / name, base / f"{name}-finished"
        with FileLock(base / f"{name}.lock"):
            if not finished.exists():
                began = processor_seconds()
                folder.mkdir()
                build(folder)
                finished.touch()
                SHARED_SECONDS.append(processor_seconds() - began)
        return folder

    return make


@pytest.fixture(scope="session", autouse=True)
def demo_models_trained_once(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Iterator[None]:
    """Both workers need the nets of the demo studies: each is trained once, in three seconds."""
    if find_spec("pydantic") is None:
        yield
        return
    from safetensors.torch import load_file, save_file

    from camscope.audit import demo_dataset_and_model
    from camscope.phantom.shortcut_study import ShortcutNet

    train = demo_dataset_and_model._train_demo_model

    @functools.cache
    def load(marker_probability: float, seed: int) -> ShortcutNet:
        def build(folder: Path) -> None:
            save_file(train(marker_probability, seed).state_dict(), folder / "net.safetensors")

        net = ShortcutNet()
        folder = made_once(f"net-{marker_probability}-{seed}", build)
        net.load_state_dict(load_file(folder / "net.safetensors"))
        return net.eval()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_dataset_and_model, "_train_demo_model", load)
        yield


@pytest.fixture
def passes_of_maps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pass of noise that a model, input size and class has once: for tests that count passes."""
    monkeypatch.setattr("camscope.explainers.core.run_methods_in_shared_passes.flag_constant_scores", lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def seeded_module() -> None:
    """What a file draws for all its tests is the same in every run, whatever ran before it."""
    seed()


@pytest.fixture(autouse=True)
def seeded(seeded_module: None) -> None:
    """What a test draws is the same in every run, alone or among others."""
    seed()


def seed() -> None:
    """The generators that a test may use without naming one."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Networks as small as those of most tests are faster on one thread than on several."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
