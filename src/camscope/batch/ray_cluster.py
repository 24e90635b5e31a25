"""The connection to a Ray cluster, or to a Ray instance on this machine that ends with the run."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from camscope.errors import InputError, RunError
from camscope.optional import require

QUIET_RAY_ENVIRONMENT = {"RAY_BACKEND_LOG_LEVEL": "fatal"}  # else Ray logs every actor that it may restart


def import_ray_data() -> Any:
    """Import Ray with Ray Data; raise a MissingExtraError if it is not installed."""
    require("ray.data", extra="ray")
    return require("ray", extra="ray")


@contextlib.contextmanager
def ray_connection(address: str | None = None) -> Iterator[Any]:
    """Connect to Ray for a `with` block, or keep an existing connection; raise a RunError if the address does not answer.

    Without an address, the first of these is used: the address in `RAY_ADDRESS`, the instance that `ray start` started on
    this machine, a new instance.
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
            message = str(error).strip().partition("\n")[0]
            raise RunError(f"no Ray at {where} ({message}); leave the address out to start one here") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_address_reachable(address: str) -> None:
    """Raise an OSError if no process listens at HOST:PORT, where Ray itself would wait for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def plan_actor_pool(nodes: list[dict[str, Any]], num_workers: int | None, on_cuda: bool) -> tuple[int, int]:
    """Return how many actors to start and how many CPUs each gets.

    Without `num_workers` there is one actor per GPU (model on CUDA) or per CPU. The CPUs are divided among the actors.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    cpus_and_gpus = [(int(resource.get("CPU", 0)), int(resource.get("GPU", 0))) for resource in resources]
    if on_cuda and not any(gpus for _, gpus in cpus_and_gpus):
        raise InputError("the model is on CUDA, but the cluster has no GPU: move the model to the CPU, or add a GPU")
    n_actors = num_workers or sum(gpus if on_cuda else cpus for cpus, gpus in cpus_and_gpus) or 1
    max_cpus = max((cpus for cpus, gpus in cpus_and_gpus if gpus or not on_cuda), default=1)
    for share in range(max_cpus, 1, -1):
        if sum(min(cpus // share, gpus) if on_cuda else cpus // share for cpus, gpus in cpus_and_gpus) >= n_actors:
            return n_actors, share
    return n_actors, 1


def start_attempt_counter(ray: Any, max_attempts: int) -> Any:
    """Start an actor that counts the attempts at each chunk, since Ray restarts a chunk whose worker died without limit.

    Its method `record_attempt` returns 0, or the number of attempts that failed if the chunk must not be tried again.
    """

    class AttemptCounter:  # defined here, so that its process need not import camscope and PyTorch
        def __init__(self) -> None:
            self.n_attempts: dict[int, int] = {}

        def record_attempt(self, chunk: int) -> int:
            self.n_attempts[chunk] = self.n_attempts.get(chunk, 0) + 1
            return max_attempts if self.n_attempts[chunk] > max_attempts else 0

    return ray.remote(num_cpus=0)(AttemptCounter).remote()


@contextlib.contextmanager
def _suppress_ray_data_output() -> Iterator[None]:
    """Let Ray Data print only errors: no plans and no progress bars."""
    from ray.data import DataContext

    logger, context = logging.getLogger("ray.data"), DataContext.get_current()
    level, shows_bars = logger.level, context.enable_progress_bars
    logger.setLevel(logging.ERROR)
    context.enable_progress_bars = False
    try:
        yield
    finally:
        logger.setLevel(level)
        context.enable_progress_bars = shows_bars


@contextlib.contextmanager
def _default_environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for a `with` block."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Discard what the process writes to stderr, where Ray reports the log level that silences it."""
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        try:
            stderr_copy = os.dup(2)
        except OSError:  # there is no stderr
            yield
            return
        stack.callback(os.close, stderr_copy)
        stack.callback(os.dup2, stderr_copy, 2)
        with open(os.devnull, "wb") as null_device:  # noqa: PTH123 - a device
            os.dup2(null_device.fileno(), 2)
        yield
