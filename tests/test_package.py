"""Tests of the package as a whole: its surface, its imports, its house rules."""

import ast
import contextlib
import importlib.util
import inspect
import pathlib
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

import tf_dgc
from tf_dgc import _host, transports

ROOT = pathlib.Path(tf_dgc.__file__).parent

# A module imports from its own tier or from lower ones.
TIERS = (
    ("config", "version", "_host", "plots", "rates", "state_files"),
    ("schedules", "layout", "sparsify", "packing"),
    ("dgc", "averaging", "inplace"),
    (
        "data",
        "state",
        "transports",
        "transports.base",
        "transports.collective",
        "transports.handshake",
        "transports.hierarchical",
        "transports.horovod",
        "transports.hybrid",
        "transports.local",
        "transports.rendezvous",
        "transports.resolver",
        "transports.turnstile",
        "transports.watchdog",
    ),
    (
        "synchronizers",
        "synchronizers.averaging",
        "synchronizers.base",
        "synchronizers.compressed",
        "synchronizers.dense",
        "synchronizers.replicas",
        "synchronizers.rounds",
        "synchronizers.saving",
    ),
    (
        "advise",
        "extended",
        "measure",
        "optimizers",
        "seam",
        "strategy",
        "averaging_strategy",
        "simulate",
        "callbacks",
        "horovod",
        "horovod.callbacks",
        "horovod.compressor",
        "horovod.core",
        "horovod.elastic",
        "horovod.optimizer",
        "horovod.tape",
    ),
    ("",),  # the package itself
)
TIER_OF = {name: tier for tier, names in enumerate(TIERS) for name in names}
PURE = ("config", "schedules", "layout", "sparsify", "packing", "dgc", "averaging")


def modules() -> dict[str, pathlib.Path]:
    """Return the source of every module, by its name within the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts)] = path
    return found


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
                "AveragingConfig",
                "DGCConfig",
                "DGCStrategy",
                "DenseStrategy",
                "ParameterAveragingStrategy",
                "RoundStats",
                "StepStats",
                "TensorStats",
                "__version__",
                "callbacks",
                "simulate",
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


class ImportTest(tf.test.TestCase):
    def test_importing_the_package_imports_no_horovod(self) -> None:
        # None in sys.modules makes an import raise ImportError.
        code = "import sys; sys.modules['horovod'] = None; import tf_dgc"
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT.parent,
            check=True,
            timeout=120,
            stdout=subprocess.DEVNULL,
        )

    def test_every_module_has_a_tier(self) -> None:
        self.assertEqual(sorted(modules().keys() - TIER_OF.keys()), [])

    def test_imports_point_one_way(self) -> None:
        for name, tree in trees().items():
            for other in own_imports(tree) - {name}:
                if name:
                    self.assertNotEqual(other, "", f"{name} imports the package itself")
                self.assertLessEqual(
                    TIER_OF[other], TIER_OF[name], f"{name} imports {other}"
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
            if name in PURE:
                self.assertLessEqual(own_imports(tree), set(PURE), name)
                used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
                self.assertNotIn("Variable", used, name)

    def test_the_settings_need_the_standard_library_only(self) -> None:
        for name in imports(trees()["config"]):
            self.assertIn(name.split(".")[0], sys.stdlib_module_names)

    def test_synchronizers_know_no_keras_and_no_horovod(self) -> None:
        for module, tree in trees().items():
            if module.startswith("synchronizers"):
                found = {name.split(".")[0] for name in imports(tree)}
                self.assertNoCommonElements(found, {"keras", "horovod"})

    def test_horovod_is_imported_late_and_where_it_belongs(self) -> None:
        allowed = {
            "transports.hierarchical",
            "transports.horovod",
            "transports.hybrid",
            "transports.rendezvous",
            "horovod.core",
            "horovod.elastic",
        }
        for name, tree in trees().items():
            if any(found.split(".")[0] == "horovod" for found in imports(tree)):
                self.assertIn(name, allowed)
            for found in imports(tree, deep=False):
                self.assertNotEqual(found.split(".")[0], "horovod", name)

    def test_private_host_names_stand_in_one_module(self) -> None:
        for name, tree in trees().items():
            if name == "_host":
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

    def test_raised_errors_are_instances_with_a_message(self) -> None:
        for name, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    where = f"{name}:{node.lineno}"
                    self.assertIsInstance(node.exc, ast.Call, where)
                    self.assertNotEmpty(node.exc.args, where)


class HostTest(tf.test.TestCase):
    def test_a_name_that_moved_is_named_with_the_versions(self) -> None:
        for owner, name in _host.wanted():
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

    def test_a_module_that_moved_is_named_with_the_versions(self) -> None:
        for name in imports(trees()["_host"]):
            module = name.rpartition(".")[0]
            if module.startswith(("tensorflow.python", "keras.src")):
                with (
                    mock.patch.dict(sys.modules, {module: None}),
                    self.assertRaisesRegex(ImportError, f"tf_dgc needs {module}, wh"),
                ):
                    fresh_host()

    def test_every_private_name_is_probed(self) -> None:
        probed = {name for _, name in _host.wanted()}
        own = set().union(*(defined(tree) for tree in trees().values()))
        for module, tree in trees().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute):
                    where = f"{module}:{node.lineno}"
                    if ast.unparse(node.value) in ("os", "sys"):  # documented names
                        continue
                    if is_private(node.attr) and node.attr not in probed:
                        self.assertIn(node.attr, own, where)
                    if module != "_host" and node.attr in probed - own - PUBLIC:
                        self.assertEqual(ast.unparse(node.value), "self", where)

    def test_every_hook_that_is_filled_in_is_probed(self) -> None:
        base = tf.compat.v1.distribute.StrategyExtended
        for name in vars(tf_dgc.extended.OneReplicaExtended):
            if is_private(name) and hasattr(base, name):
                self.assertIn((base, name), _host.wanted(), name)

    def test_every_name_of_a_private_module_is_probed(self) -> None:
        modules = {
            name: value
            for name, value in vars(_host).items()
            if inspect.ismodule(value)
        }
        probed = {(id(owner), name) for owner, name in _host.wanted()}
        for node in ast.walk(trees()["_host"]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                if module in (None, tf, keras, context_itself(node)):
                    continue
                if module.__name__ in sys.stdlib_module_names:
                    continue
                self.assertIn((id(module), node.attr), probed, ast.unparse(node))


# Names that are probed because of who has them, and are common elsewhere.
PUBLIC = {"FuncGraph", "resolve", "global_seed", "caller", "value_container"}


def context_itself(node: ast.Attribute) -> Any:
    """Return the module of the context where the node is the call that returns it."""
    return _host.context if node.attr == "context" else None


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
        return _host.setters_of(owner, name)
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
    """Import the module once more, under another name."""
    spec = importlib.util.spec_from_file_location("fresh_host", _host.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "__main__":
    tf.test.main()
