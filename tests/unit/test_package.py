"""Tests of the package as a whole: its surface, its imports, its house rules."""

import ast
import collections
import contextlib
import functools
import importlib
import inspect
import itertools
import pathlib
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf
from homes import TESTED_IN

import tf_dgc
from tf_dgc import _host, transports

ROOT = pathlib.Path(tf_dgc.__file__).parent

# A file imports from its own room and from those above it in this list only.
ROOMS = (
    "version",
    "imported",
    "config",
    "_host",
    "values",
    "bands",
    "compression",
    "averaging",
    "transports",
    "search",
    "servers",
    "exchanges",
    "prediction",
    "optimizers",
    "step",
    "strategies",
    "horovod",
    "layers",
    "callbacks",
    "simulate",
    "lab",
    "advise",  # the names of two of the laboratory's files, for users
    "plots",
    "launcher",
    "check",
    "verify",
    "run",
    "",  # the package itself
)
PURE = ("config", "values", "bands", "compression", "averaging")


def room_of(module: str) -> str:
    return module.split(".")[0]


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Return the source of every module, by its name within the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts)] = path
    return found


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in modules().items()}


def imports(tree: ast.AST, deep: bool = True) -> Iterator[str]:
    """Yield what is imported, as "package.module" or "package.module.name"."""
    for node in ast.walk(tree) if deep else ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def hosts() -> dict[str, ast.Module]:
    """Return the modules in which private names of others stand."""
    return {name: tree for name, tree in trees().items() if room_of(name) == "_host"}


def wanted() -> list[tuple[Any, str]]:
    """Return all private names, with the object or class that must have each."""
    parts = (
        _host.datasets,
        _host.distribute,
        _host.flow,
        _host.iterators,
        _host.keras,
        _host.patches,
        _host.scopes,
        _host.shared,
        _host.startup,
        _host.stores,
        _host.tensorflow,
    )
    return [each for part in parts for each in part.wanted()]


def own_imports(tree: ast.AST) -> set[str]:
    """Return the modules of the package that are imported, without its name."""
    known, found = modules(), set()
    for name in imports(tree):
        if name.split(".")[0] == "tf_dgc":
            parts = name.split(".")[1:]
            while ".".join(parts) not in known:
                parts = parts[:-1]
            found.add(".".join(parts))
    return found


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield node


class SurfaceTest(tf.test.TestCase):
    def test_public_names_are_pinned(self) -> None:
        self.assertEqual(
            tf_dgc.__all__,
            [
                "AutoStrategy",
                "AveragingConfig",
                "DGCConfig",
                "DGCStrategy",
                "DenseStrategy",
                "DownpourConfig",
                "DownpourStrategy",
                "ParameterAveragingStrategy",
                "RoundStats",
                "StepStats",
                "TensorStats",
                "__version__",
                "callbacks",
                "joined",
                "launch",
                "layers",
                "search",
                "simulate",
                "split_dense",
                "transports",
            ],
        )
        self.assertEqual(transports.__all__, ["Transport", "resolve"])

    def test_public_names_are_sorted_and_there(self) -> None:
        for package in (tf_dgc, transports):
            self.assertEqual(package.__all__, sorted(package.__all__))
            for name in package.__all__:
                self.assertTrue(hasattr(package, name), name)

    def test_what_is_not_listed_is_a_module_or_private(self) -> None:
        submodules = {info.name for info in pkgutil.iter_modules(tf_dgc.__path__)}
        for name in set(vars(tf_dgc)) - set(tf_dgc.__all__):
            self.assertTrue(name.startswith("_") or name in submodules, name)

    def test_the_version_is_a_literal(self) -> None:
        # So setuptools reads it without importing TensorFlow.
        (assignment,) = [
            node for node in trees()["version"].body if isinstance(node, ast.Assign)
        ]
        self.assertEqual(ast.literal_eval(assignment.value), tf_dgc.__version__)
        self.assertRegex(tf_dgc.__version__, r"^\d+\.\d+\.\d+$")

    def test_everything_public_has_a_docstring(self) -> None:
        for name, tree in trees().items():
            self.assertTrue(ast.get_docstring(tree), name)
            for node in public(tree):
                place = f"{name}.{node.name}"
                self.assertTrue(ast.get_docstring(node), place)
                if isinstance(node, ast.ClassDef):
                    for method in node.body:
                        if (
                            isinstance(method, ast.FunctionDef)
                            and method.name[0] != "_"
                        ):
                            where = f"{place}.{method.name}"
                            self.assertTrue(ast.get_docstring(method), where)

    def test_types_are_announced(self) -> None:
        self.assertTrue((ROOT / "py.typed").exists())


@pytest.mark.processes
class ImportTest(tf.test.TestCase):
    def run_alone(self, code: str) -> str:
        """Run code in a process of its own; return the last line of its stderr."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""

    @pytest.mark.slow
    def test_importing_the_package_imports_no_horovod(self) -> None:
        # None in sys.modules makes an import raise ImportError.
        code = "import sys; sys.modules['horovod'] = None; import tf_dgc"
        every = "[getattr(tf_dgc, name) for name in tf_dgc.__all__]"
        self.assertEqual(self.run_alone(f"{code}; {every}"), "")

    def test_importing_the_package_and_its_settings_imports_no_tensorflow(self) -> None:
        code = "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None"
        used = "import tf_dgc, tf_dgc.run; tf_dgc.DGCConfig(); dir(tf_dgc)"
        self.assertEqual(self.run_alone(f"{code}; {used}"), "")

    @pytest.mark.extended
    def test_whoever_takes_a_strategy_is_told_of_versions_that_do_not_fit(self) -> None:
        code = (
            "import keras.src.random.seed_generator as s; del s.global_seed_generator"
        )
        for used in ("tf_dgc.DenseStrategy", "from tf_dgc import DGCStrategy"):
            told = self.run_alone(f"{code}; import tf_dgc; {used}")
            self.assertRegex(told, "ImportError: tf_dgc needs .*global_seed_generator")

    def test_names_are_those_that_are_listed(self) -> None:
        self.assertLessEqual(set(tf_dgc.__all__), set(dir(tf_dgc)))
        with self.assertRaisesRegex(AttributeError, "'tf_dgc' has no attribute 'x'"):
            tf_dgc.x  # noqa: B018

    def test_every_module_is_in_a_room(self) -> None:
        self.assertEqual({room_of(name) for name in modules()}, set(ROOMS))

    def test_imports_point_one_way(self) -> None:
        for name, tree in trees().items():
            for other in own_imports(tree) - {name}:
                if name:
                    self.assertNotEqual(other, "", f"{name} imports the package itself")
                self.assertLessEqual(
                    ROOMS.index(room_of(other)),
                    ROOMS.index(room_of(name)),
                    f"{name} imports {other}",
                )

    def test_imports_make_no_circles(self) -> None:
        graph = {name: own_imports(tree) - {name} for name, tree in trees().items()}
        done: set[str] = set()
        while len(done) < len(graph):
            ready = {n for n in graph if n not in done and graph[n] <= done}
            self.assertNotEmpty(ready, f"in a circle: {sorted(graph.keys() - done)}")
            done |= ready

    def test_pure_modules_know_no_state_and_no_transport(self) -> None:
        for name, tree in trees().items():
            if room_of(name) in PURE:
                found = set(map(room_of, own_imports(tree)))
                self.assertLessEqual(found, {*PURE, "_host"})
                used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
                self.assertNotIn("Variable", used, name)

    def test_the_settings_need_the_standard_library_only(self) -> None:
        for name in imports(trees()["config"]):
            self.assertIn(name.split(".")[0], sys.stdlib_module_names)

    def test_exchanges_know_no_keras_and_no_horovod(self) -> None:
        for module, tree in trees().items():
            if room_of(module) in ("values", "compression", "exchanges"):
                found = {name.split(".")[0] for name in imports(tree)}
                self.assertNoCommonElements(found, {"keras", "horovod"})

    def test_horovod_is_imported_late_and_where_it_belongs(self) -> None:
        allowed = {
            "transports.mesh",
            "transports.horovod",
            "transports.hybrid",
            "transports.rendezvous",
            "horovod.elastic",
        }
        for name, tree in trees().items():
            if any(found.split(".")[0] == "horovod" for found in imports(tree)):
                self.assertIn(name, allowed)
            for found in imports(tree, deep=False):
                self.assertNotEqual(found.split(".")[0], "horovod", name)

    def test_transports_know_of_keras_nothing_and_no_strategies(self) -> None:
        for module, tree in trees().items():
            if room_of(module) == "transports":
                for node in ast.walk(tree):
                    if isinstance(node, ast.Attribute):
                        for name in ("distribute", "keras", "patches"):
                            self.assertNotEqual(
                                ast.unparse(node), f"_host.{name}", module
                            )

    def test_private_host_names_stand_in_one_room(self) -> None:
        for name, tree in trees().items():
            if room_of(name) == "_host":
                continue
            for found in imports(tree):
                self.assertNotRegex(found, r"^(tensorflow\.python|keras\.src)\b", name)
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    dotted = f"{node.value.id}.{node.attr}"
                    self.assertNotIn(
                        dotted, ("tf.python", "tensorflow.python", "keras.src"), name
                    )

    def test_imports_are_absolute(self) -> None:
        for name, tree in trees().items():
            for found in imports(tree):
                self.assertFalse(found.startswith("."), f"{name}: {found}")


# Lines of a class, and of how many at most there are so many.
LARGEST, LARGE, FEW = 200, 150, 5
RELATIVE = "What Which Who Whose Whom Where Whether When How".split()
_NAMES = re.compile(r"parameterized\.|named\(")


class HouseRulesTest(tf.test.TestCase):
    def test_nothing_is_printed_or_asserted(self) -> None:
        for name, tree in trees().items():
            for node in ast.walk(tree):
                where = f"{name}:{getattr(node, 'lineno', 0)}"
                self.assertNotIsInstance(node, ast.Assert, where)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    self.assertNotEqual(node.func.id, "print", where)

    def test_there_is_one_logger(self) -> None:
        for name, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and "getLogger" in ast.unparse(node.func):
                    self.assertEqual(
                        ast.unparse(node), "logging.getLogger('tf_dgc')", name
                    )

    def test_sources_are_ascii(self) -> None:
        for name, path in modules().items():
            self.assertTrue(path.read_bytes().isascii(), name)

    def test_classes_have_one_idea_each_and_a_name_of_their_own(self) -> None:
        sizes: dict[str, list[int]] = {}
        for name, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    sizes.setdefault(node.name, []).append(lines)
                    self.assertLessEqual(lines, LARGEST, f"{name}.{node.name}")
        self.assertEmpty([name for name, of in sizes.items() if len(of) > 1])
        large = [name for name, of in sizes.items() if max(of) > LARGE]
        self.assertLessEqual(len(large), FEW, large)

    def test_docstrings_begin_with_a_noun_or_an_imperative(self) -> None:
        kinds = ast.ClassDef | ast.FunctionDef | ast.Module
        for name, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    where = f"{name}:{getattr(node, 'lineno', 1)}"
                    self.assertNotIn(text.split()[0].strip(",."), RELATIVE, where)

    def test_raised_errors_are_instances_with_a_message(self) -> None:
        for name, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    where = f"{name}:{node.lineno}"
                    self.assertIsInstance(node.exc, ast.Call, where)
                    self.assertNotEmpty(node.exc.args, where)

    def test_each_module_is_tested_in_a_file_of_its_name_or_of_the_table(self) -> None:
        tests = pathlib.Path(__file__).parents[1]
        files = {path.relative_to(tests) for path in tests.rglob("test_*.py")}
        named = {path.stem.removeprefix("test_") for path in files}
        listed = [name for modules in TESTED_IN.values() for name in modules.split()]
        for path in TESTED_IN:
            self.assertIn(pathlib.Path(f"{path}.py"), files)
        self.assertLen(listed, len(set(listed)))
        homeless = {
            name
            for name, path in modules().items()
            if path.stem not in ("__init__", "__main__")
            and name.rpartition(".")[2] not in named
        }
        hint = "name a file of tests for it, or enter it in tests/homes.py"
        self.assertEqual(homeless, set(listed), hint)

    @pytest.mark.slow
    def test_marks_of_tests_stand_below_their_parameters(self) -> None:
        # Those above are lost, without a word.
        for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    own = [ast.unparse(each) for each in node.decorator_list]
                    named = [i for i, each in enumerate(own) if _NAMES.match(each)]
                    for each in own[: max(named, default=0)]:
                        where = f"{path.name}: {node.name}"
                        self.assertFalse(each.startswith("pytest.mark"), where)

    def test_files_of_tests_have_names_of_their_own(self) -> None:
        # pytest imports them by name: of two of one name it reads one.
        found = pathlib.Path(__file__).parents[1].rglob("*.py")
        names = collections.Counter(path.name for path in found)
        twice = [name for name, count in names.items() if count > 1]
        self.assertEqual([each for each in twice if each != "__init__.py"], [])


@pytest.mark.long
class HostTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_a_name_that_moved_is_named_with_the_versions(self) -> None:
        for owner, name in wanted():
            place = getattr(owner, "__name__", type(owner).__name__)
            with self.subTest(f"{place}.{name}"), contextlib.ExitStack() as stack:
                for definer, each in places_of(owner, name):
                    stack.enter_context(without(name, definer, each))
                with self.assertRaises(ImportError) as caught:
                    fresh_host()
                message = str(caught.exception)
                self.assertIn(
                    f"tf_dgc needs {place}.{name}, which this version", message
                )
                self.assertIn(f"TensorFlow {tf.__version__}", message)
                self.assertIn(f"Keras {keras.__version__}", message)
        fresh_host()

    @pytest.mark.extended
    def test_a_module_that_moved_is_named_with_the_versions(self) -> None:
        for name in itertools.chain(*(imports(tree) for tree in hosts().values())):
            module = name.rpartition(".")[0]
            if module.startswith(("tensorflow.python", "keras.src")):
                with (
                    mock.patch.dict(sys.modules, {module: None}),
                    self.assertRaisesRegex(ImportError, f"tf_dgc needs {module}, wh"),
                ):
                    fresh_host()

    def test_another_backend_is_named_before_names_that_it_lacks(self) -> None:
        lacking = {"keras.src.random": None}
        with (
            mock.patch.dict(sys.modules, lacking),
            mock.patch.object(keras.config, "backend", return_value="jax"),
            self.assertRaisesRegex(
                ImportError,
                r"Received: keras\.config\.backend\(\)='jax'.*"
                "Set KERAS_BACKEND=tensorflow before",
            ),
        ):
            fresh_host()

    def test_every_private_name_is_probed(self) -> None:
        probed = {name for _, name in wanted()}
        own = set().union(*(defined(tree) for tree in trees().values()))
        for module, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute):
                    where = f"{module}:{node.lineno}"
                    if ast.unparse(node.value) in ("os", "sys"):  # documented names
                        continue
                    if is_private(node.attr) and node.attr not in probed:
                        self.assertIn(node.attr, own, where)
                    if (
                        room_of(module) != "_host"
                        and node.attr in probed - own - PUBLIC
                    ):
                        self.assertEqual(ast.unparse(node.value), "self", where)

    def test_every_hook_that_is_filled_in_is_probed(self) -> None:
        base = tf.compat.v1.distribute.StrategyExtended
        own = tf_dgc.strategies.extended.OneReplicaExtended.__mro__
        own = own[: own.index(base)]
        for name in {name for kind in own for name in vars(kind)}:
            if is_private(name) and hasattr(base, name):
                self.assertIn((base, name), wanted(), name)

    def test_every_name_of_a_private_module_is_probed(self) -> None:
        probed = {(id(owner), name) for owner, name in wanted()}
        for host, tree in hosts().items():
            known = vars(importlib.import_module(f"tf_dgc.{host}"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    module = known.get(node.value.id)
                    if module in (tf, keras) or not inspect.ismodule(module):
                        continue
                    place = module.__name__
                    if place.startswith(("tensorflow.", "keras.")) and (
                        module is not context_itself(node)
                    ):
                        self.assertIn(
                            (id(module), node.attr), probed, f"{host}: {place}"
                        )


# Names that are probed because of who has them, and are common elsewhere.
PUBLIC = {
    "FuncGraph",
    "caller",
    "cond",
    "get",
    "get_default",
    "get_default_graph",
    "global_seed",
    "make_train_function",
    "next",
    "random",
    "resolve",
    "stack",
    "value_container",
}


def context_itself(node: ast.Attribute) -> Any:
    """Return the module of the context where the node is the call that returns it."""
    return _host.tensorflow.context if node.attr == "context" else None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.Module) -> set[str]:
    """Return what a module defines itself: functions, classes, fields, attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "other"):
                found.add(node.attr)
    return found | set(NAMED_TUPLE)


NAMED_TUPLE = ("_asdict", "_fields", "_make", "_replace")


def places_of(owner: Any, name: str) -> list[tuple[Any, str]]:
    """Return where a name is defined, or what sets it."""
    if not hasattr(owner, name):
        return _host.probe.setters_of(owner, name)
    if inspect.ismodule(owner) or name in vars(owner):
        return [(owner, name)]
    mro = owner.__mro__ if inspect.isclass(owner) else type(owner).__mro__
    return [(each, name) for each in mro if name in vars(each)]


@contextlib.contextmanager
def without(name: str, owner: Any, place: str) -> Iterator[None]:
    """Remove what has the name, or let a method set something else."""
    kept = vars(owner)[place]
    delattr(owner, place)
    if place != name:
        function = inspect.unwrap(kept)
        names = [n.replace(name, "moved") for n in function.__code__.co_names]
        code = function.__code__.replace(co_names=tuple(names))
        moved = types.FunctionType(
            code, function.__globals__, closure=function.__closure__
        )
        setattr(owner, place, moved)
    try:
        yield
    finally:
        setattr(owner, place, kept)


def fresh_host() -> None:
    """Import the package once more, beside the one that is there."""
    with mock.patch.dict(sys.modules), mock.patch.object(tf_dgc, "_host", _host):
        for name in hosts():
            del sys.modules[f"tf_dgc.{name}"]
        importlib.import_module("tf_dgc._host")


if __name__ == "__main__":
    tf.test.main()
