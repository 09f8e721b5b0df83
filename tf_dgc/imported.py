"""The moment in which a module has been imported, by whomever."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

_done: set[tuple[str, Callable[[types.ModuleType], None]]] = set()


def when_imported(name: str, prepare: Callable[[types.ModuleType], None]) -> None:
    """Call a function with a module: now, or as soon as it is imported; once.

    Args:
        name: of a package or module at the top.
        prepare: takes the module.
    """
    if (name, prepare) in _done:
        return
    _done.add((name, prepare))
    if name in sys.modules:
        prepare(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, prepare))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as others do, and prepares it when it has run."""

    def __init__(self, name: str, prepare: Callable[[types.ModuleType], None]) -> None:
        self._name, self._prepare = name, prepare

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # it may be installed later
            return None
        spec.loader = _Loader(spec.loader, self._prepare)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs a module by its own loader, then prepares it."""

    def __init__(
        self,
        loader: importlib.abc.Loader,
        prepare: Callable[[types.ModuleType], None],
    ) -> None:
        self._loader, self._prepare = loader, prepare

    def create_module(
        self, spec: importlib.machinery.ModuleSpec
    ) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._prepare(module)
