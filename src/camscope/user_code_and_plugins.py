"""Run Python code of the user: files that create models, and plugins, which are files that register methods.

A plugin is executed only if the user names its file. What a run records of a plugin, its file name and digest, tells
which plugin is needed; it never loads one.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from camscope.atomic_writes_and_folder_locks import describe_file_problem
from camscope.errors import CamscopeError, InputError
from camscope.registry import METHODS

Result = TypeVar("Result")
PLUGIN_MODULE_PREFIX = "_camscope_plugin_"


@dataclass(frozen=True)
class Plugin:
    """A Python file that registers methods. `source` is its code, which other processes execute to load the same plugin."""

    file: str
    source: bytes = field(repr=False)
    method_names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The name of the file without its folder."""
        return Path(self.file).name

    @property
    def digest(self) -> str:
        """A hash of the code with 16 hex digits."""
        return hashlib.sha256(self.source).hexdigest()[:16]

    @property
    def module_name(self) -> str:
        """The module name of the plugin. It is the same in every process, so that classes of the plugin can be pickled."""
        return f"{PLUGIN_MODULE_PREFIX}{self.digest}"


_plugins: dict[str, Plugin] = {}  # by the name of the module


def load_plugin_file(path: str | Path) -> Plugin:
    """Execute a Python file that registers methods. The same code is never executed twice.

    Raises:
        InputError: There is no such file, or it raises an error, or it registers no method.

    """
    file = Path(path).expanduser()
    if file.suffix != ".py":
        raise InputError(f"the plugin {path} is not a Python file; expected FILE.py")
    if not file.is_file():
        raise InputError(f"there is no plugin {path}: {describe_file_problem(file)}; expected FILE.py")
    return load_plugin(Plugin(str(file), file.read_bytes()))


def load_plugin(plugin: Plugin) -> Plugin:
    """Execute the code of a plugin. Return the plugin and the names of the methods that it registered."""
    loaded = _plugins.get(plugin.module_name)
    if loaded is not None and all(name in METHODS for name in loaded.method_names):
        return loaded
    METHODS.load()  # a plugin may not take the name of an existing method
    known_names = set(METHODS)
    with METHODS.entries_removed_on_error():
        execute_python_source(plugin.source, Path(plugin.file), plugin.module_name, InputError)
        names = tuple(name for name in METHODS if name not in known_names)
        if not names:
            del sys.modules[plugin.module_name]
            raise InputError(f"the plugin {plugin.file} registers no method; decorate its class with @register")
    _plugins[plugin.module_name] = loaded = Plugin(plugin.file, plugin.source, names)
    return loaded


def find_plugins(classes: Iterable[type]) -> list[Plugin]:
    """Return the plugins that define the given classes, without duplicates."""
    names = dict.fromkeys(cls.__module__ for cls in classes)
    return [_plugins[name] for name in names if name in _plugins]


def execute_python_source(source: bytes, file: Path, module_name: str, error_cls: type[CamscopeError]) -> ModuleType:
    """Execute Python code as a module named `module_name`. Do not write bytecode next to the file.

    Afterwards the module is in `sys.modules`, unless the code raised an error.
    """
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None:
        raise error_cls(f"{file} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        run_user_code(lambda: exec(compile(source, file, "exec"), vars(module)), str(file), error_cls)  # noqa: S102 - the user named the file
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def run_user_code(action: Callable[[], Result], location: str, error_cls: type[CamscopeError]) -> Result:
    """Call code of the user. If the code raises an error or exits, raise an `error_cls` that names `location`."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        hint = "; is it installed, or on PYTHONPATH?" if isinstance(error, ImportError) else ""
        raise error_cls(f"{location} raised {type(error).__name__}: {error}{hint}") from error
