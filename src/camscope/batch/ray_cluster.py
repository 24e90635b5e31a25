"""The Ray that a run works on: the one there is, or one on this machine that ends with the run."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from camscope.errors import InputError, RunError
from camscope.optional import require

QUIET_RAY_ENVIRONMENT = {"RAY_BACKEND_LOG_LEVEL": "fatal"}  # Ray's core would tell of every actor that it may restart


def import_ray_data() -> Any:
    """Ray, with Ray Data; MissingExtraError names the extra that brings it."""
    require("ray.data", extra="ray")
    return require("ray", extra="ray")


@contextlib.contextmanager
def ray_connection(address: str | None = None) -> Iterator[Any]:
    """Ray, connected for as long as the `with` lasts, or as it was before; RunError where there is none at the address.

    Without an address: that of `RAY_ADDRESS`, the one that `ray start` has started on this machine, or a new one.
    """
    ray = import_ray_data()
    with _suppress_ray_data_output():
        if ray.is_initialized():
            yield ray
            return
        try:
            _check_address_reachable(address or os.environ.get("RAY_ADDRESS", ""))
            with _default_environment(QUIET_RAY_ENVIRONMENT), _suppress_stderr():
                ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            where = address or os.environ.get("RAY_ADDRESS", "this machine")
            said = str(error).strip().partition("\n")[0]
            raise RunError(f"no Ray at {where} ({said}); leave the address out to start one here") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_address_reachable(address: str) -> None:
    """OSError where nobody listens at HOST:PORT: Ray itself would wait there for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def plan_actor_pool(nodes: list[dict[str, Any]], num_workers: int | None, on_cuda: bool) -> tuple[int, int]:
    """How many actors, and with how many CPUs each: one a GPU, or a CPU, unless told; then the CPUs are shared out."""
    rooms = [
        (int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in (one["Resources"] for one in nodes if one["Alive"])
    ]
    if on_cuda and not any(gpus for _, gpus in rooms):
        raise InputError("the model is on CUDA, and the cluster has no GPU: put the model on the CPU, or add a GPU")
    count = num_workers or sum(gpus if on_cuda else cpus for cpus, gpus in rooms) or 1
    most = max((cpus for cpus, gpus in rooms if gpus or not on_cuda), default=1)
    for share in range(most, 1, -1):
        if sum(min(cpus // share, gpus) if on_cuda else cpus // share for cpus, gpus in rooms) >= count:
            return count, share
    return count, 1


def start_attempt_counter(ray: Any, max_attempts: int) -> Any:
    """An actor that counts how often each chunk is begun: Ray begins one whose worker died again, and would for ever.

    `start` gives the number of deaths where it is not to be begun again.
    """

    class Tries:  # here, so that it travels whole: its process need not import camscope, and PyTorch with it
        def __init__(self) -> None:
            self.begun: dict[int, int] = {}

        def begin(self, chunk: int) -> int:
            self.begun[chunk] = self.begun.get(chunk, 0) + 1
            return max_attempts if self.begun[chunk] > max_attempts else 0

    return ray.remote(num_cpus=0)(Tries).remote()


@contextlib.contextmanager
def _suppress_ray_data_output() -> Iterator[None]:
    """Of what Ray Data tells on the console only errors: no plans, no bars beside ours."""
    from ray.data import DataContext

    logger, context = logging.getLogger("ray.data"), DataContext.get_current()
    level, bars = logger.level, context.enable_progress_bars
    logger.setLevel(logging.ERROR)
    context.enable_progress_bars = False
    try:
        yield
    finally:
        logger.setLevel(level)
        context.enable_progress_bars = bars


@contextlib.contextmanager
def _default_environment(defaults: dict[str, str]) -> Iterator[None]:
    """Variables for as long as the `with` lasts, where they are not set."""
    mine = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Nothing on the process's stderr: Ray's core tells there of the level it is told to be quiet with."""
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
        except OSError:  # there is none
            yield
            return
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 2)
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - a device
            os.dup2(nothing.fileno(), 2)
        yield
