"""What the pages say: links, code, commands, settings and names are there."""

import ast
import configparser
import dataclasses
import functools
import pathlib
import re
import shlex
import textwrap
import unicodedata
import unittest
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tf_dgc import config, run, version
from tf_dgc.check import command as check
from tf_dgc.launcher import settings

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "tf_dgc"
REFERENCE = DOCS / "reference"
BESIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^\1\2 *$", re.M | re.S)
SHELLS = ("bash", "sh", "shell", "console")
RECORDS = (config.DGCConfig, config.AveragingConfig, config.DownpourConfig)
README_LINES = 150
# Lines to put into a script of one's own: they begin blocks that stand in no example.
FRAGMENTS = (
    "compression = tf_dgc.DGCConfig(sparsity=0.99)",
    "config = tf_dgc.AveragingConfig(period=16, compression=tf_dgc.DGCConfig())",
    "from ray import tune",
)


class Block(NamedTuple):
    language: str
    code: str


@functools.cache
def pages() -> dict[str, str]:
    """Return the text of every page, by its path."""
    paths = [*(ROOT / name for name in BESIDE), *sorted(DOCS.rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def nav() -> list[str]:
    """Return the pages that mkdocs.yml names."""
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r": (\S+\.md)$", text[text.index("\nnav:") :], re.M)


def blocks(text: str) -> list[Block]:
    found = FENCE.findall(text)
    return [
        Block((info.split() or [""])[0], textwrap.dedent(code))
        for _, _, info, code in found
    ]


def prose(text: str) -> str:
    """Return a page without blocks of code, spans of code and comments."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.S)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "`code`", text)


def links(text: str) -> list[str]:
    """Return the links of a page to pages and files."""
    found = re.findall(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)", prose(text))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def python(text: str) -> list[str]:
    return [b.code for b in blocks(text) if b.language in ("python", "py")]


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield the syntax of all Python of all pages, with the page's name."""
    for name, text in pages().items():
        for code in python(text):
            for node in ast.walk(ast.parse(code)):
                yield name, node


def plain_lines(code: str) -> list[str]:
    """Return the lines of Python without comments, line breaks and indentation."""
    text = ast.unparse(ast.parse(textwrap.dedent(code)))
    return [line.strip() for line in text.splitlines()]


def slug(heading: str) -> str:
    """Return the anchor that mkdocs gives a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    letters = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", letters).strip().lower())


def anchors(text: str) -> set[str]:
    found: Counter[str] = Counter()
    result = set(re.findall(r"\{[^}\n]*#([\w-]+)", text))
    for heading in re.findall(
        r"^#+ +(.*?)(?: *\{[^}]*\})? *$", FENCE.sub("", text), re.M
    ):
        name = slug(heading)
        result.add(f"{name}_{found[name]}" if found[name] else name)
        found[name] += 1
    return result


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the tables of a page, as rows of cells; the first has the headings."""
    for table in re.findall(r"(?:^ *\|.*\n)+", FENCE.sub("", text + "\n"), re.M):
        lines = [line.strip() for line in table.strip().splitlines()]
        rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
        yield [[cell.strip() for cell in row] for row in [rows[0], *rows[2:]]]


def commands(text: str) -> Iterator[str]:
    """Yield commands of a page: lines of shell, and spans of code that begin so."""
    code = [block.code for block in blocks(text) if block.language in SHELLS]
    spans = re.findall(r"`+([^`]+)`+", FENCE.sub("", text))
    begun = r"(?:\w+=\S+ )*(?:tf-dgc-run|python -m tf_dgc|scripts/|examples/)"
    code += [" ".join(s.split()) for s in spans if re.match(begun, s)]
    code += re.findall(rf"^ {{4,}}({begun}.*)$", FENCE.sub("", text), re.M)
    for part in code:
        for line in part.replace("\\\n", " ").splitlines():
            line = re.sub(r"^\s*(\$ |> )?", "", line)
            if line and not line.startswith("#"):
                yield line


def words_of(command: str) -> list[str]:
    """Return the words of a command, without variables, comments and what follows."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # a part of a command of several lines
        words = command.split()
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    for end in ("|", "||", "&&", "&", ";", ">", "2>&1"):
        words = words[: words.index(end)] if end in words else words
    return words


def strange_options(words: list[str], parser: Any) -> tuple[list[str], list[str]]:
    """Return options that a parser does not know, and the words from the script on."""
    strange, known = [], parser._option_string_actions
    while words and words[0].startswith("-") and words[0] != "--":
        option, given, _ = words[0].partition("=")
        words = words[1:]
        if option not in known:
            strange.append(option)
        elif not given and known[option].nargs is None:
            words = words[1:]
    return strange, words


def strange_in(words: list[str]) -> list[str]:
    """Return modules, files and options of a command that are not there."""
    strange = []
    for module in re.findall(r"-m (tf_dgc[.\w]*)", " ".join(words)):
        path = ROOT.joinpath(*module.split("."))
        if not (path.with_suffix(".py").exists() or path.is_dir()):
            strange.append(module)
    if "tf-dgc-run" in words:
        rest = words[words.index("tf-dgc-run") + 1 :]
        unknown, words = strange_options(rest, run._parser())
        if "--check" in rest:
            unknown, words = strange_options([*unknown, *words], check._parser())
        strange += unknown
    for i, word in enumerate(words):
        path = ROOT / word
        if word.startswith(("scripts/", "examples/")) and path.suffix == ".py":
            options = words[i + 1 :]
            options = options[: options.index("--")] if "--" in options else options
            text = path.read_text() if path.exists() else ""
            given = [word.partition("=")[0] for word in options if word[:2] == "--"]
            strange += [option for option in given if f'"{option}"' not in text]
    return strange


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def exported(module: str) -> list[str]:
    """Return `__all__` of a module, which is not imported."""
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def defined(path: pathlib.Path) -> list[str]:
    """Return public classes and functions that stand in a file."""
    kinds = ast.ClassDef | ast.FunctionDef
    names = [node.name for node in tree(path).body if isinstance(node, kinds)]
    return [name for name in names if not name.startswith("_")]


class Pages(unittest.TestCase):
    """What is wrong is told of all pages at once."""

    def test_links_lead_to_pages_and_files_that_are_there(self) -> None:
        wrong = []
        for name, text in pages().items():
            for link in links(text):
                target, _, anchor = link.partition("#")
                path = (ROOT / name).parent / target if target else ROOT / name
                there = path.exists()
                if there and anchor and path.suffix == ".md":
                    there = anchor in anchors(path.read_text())
                if not there:
                    wrong.append(f"{name}: {link}")
        self.assertEqual(wrong, [])

    def test_the_site_links_to_nothing_outside_of_it(self) -> None:
        wrong = []
        for name in nav():
            path = DOCS / name
            for link in links(path.read_text()):
                target = (path.parent / link.partition("#")[0]).resolve()
                if not target.is_relative_to(DOCS):
                    wrong.append(f"{name}: {link}")
        self.assertEqual(wrong, [])

    def test_the_site_has_every_page(self) -> None:
        own = {name.removeprefix("docs/") for name in pages() if name[:5] == "docs/"}
        self.assertEqual(sorted(own), sorted(nav()))

    def test_pictures_have_a_text(self) -> None:
        for name, text in pages().items():
            self.assertNotRegex(prose(text), r"!\[\s*\]\(", name)

    def test_python_compiles(self) -> None:
        wrong = []
        for name, text in pages().items():
            for code in python(text):
                try:
                    ast.parse(code)
                except SyntaxError as error:
                    wrong.append(f"{name}: {error.text}")
        self.assertEqual(wrong, [])

    def test_python_of_a_tutorial_is_run_or_stands_in_an_example(self) -> None:
        paths = (ROOT / "examples").rglob("*.py")
        examples = [plain_lines(path.read_text()) for path in paths]
        wrong = []
        for page in sorted((DOCS / "tutorials").glob("*.md")):
            text = page.read_text()
            for found in FENCE.finditer(text):
                sentence = text[: found.start()].rstrip().rpartition("\n\n")[2]
                # tests/lab/test_tutorials.py runs these.
                run = re.search(r"Save this as `|the script now reads:$", sentence)
                if found[3] != "python" or run:
                    continue
                lines = plain_lines(found[4])
                if lines[0] not in FRAGMENTS and not any(
                    all(line in left for line in lines) for left in map(iter, examples)
                ):
                    wrong.append(f"{page.name}: {lines[0]}")
        self.assertEqual(wrong, [])

    def test_settings_in_python_are_those_of_the_records(self) -> None:
        known = {
            record.__name__: {field.name for field in dataclasses.fields(record)}
            for record in RECORDS
        }
        known["DGCConfig.paper"] = known["DGCConfig"]
        wrong = []
        for name, node in nodes():
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func).removeprefix("tf_dgc.")
                given = {word.arg for word in node.keywords if word.arg}
                strange = given - known.get(function, given)
                wrong += [f"{name}: {function}({each}=)" for each in strange]
        self.assertEqual(wrong, [])

    def test_names_in_python_are_those_of_the_package(self) -> None:
        public = {*exported(""), *(path.stem for path in PACKAGE.iterdir())}
        wrong = []
        for name, node in nodes():
            used: list[str] = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tf_dgc":
                used = [node.attr]
            if isinstance(node, ast.ImportFrom) and node.module == "tf_dgc":
                used = [alias.name for alias in node.names]
            wrong += [f"{name}: tf_dgc.{each}" for each in used if each not in public]
        self.assertEqual(wrong, [])

    def test_files_that_are_named_are_there(self) -> None:
        folders = r"(?:scripts|examples|tests|tf_dgc)/"
        wrong = []
        for name, text in pages().items():
            named = re.findall(rf"(?<![\w/.-]){folders}[\w/.-]*\w\.(?:py|sh)\b", text)
            wrong += [f"{name}: {p}" for p in named if not (ROOT / p).exists()]
        self.assertEqual(wrong, [])

    def test_commands_have_options_that_are_there(self) -> None:
        wrong = []
        for name, text in pages().items():
            for command in commands(text):
                strange = strange_in(words_of(command))
                wrong += [f"{name}: {each} in {command}" for each in strange]
        self.assertEqual(wrong, [])

    def test_readme_is_short(self) -> None:
        self.assertLessEqual(len(pages()["README.md"].splitlines()), README_LINES)


class ReferencePages(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.api = (REFERENCE / "api.md").read_text()
        self.settings = (REFERENCE / "settings.md").read_text()
        listed = re.findall(r"^::: (\S+)\n((?:    .*\n)*)", self.api + "\n", re.M)
        self.entries = dict(listed)

    def test_every_entry_is_defined_where_it_says(self) -> None:
        for entry, options in self.entries.items():
            with self.subTest(entry):
                module, _, name = entry.rpartition(".")
                path = ROOT.joinpath(*entry.split(".")).with_suffix(".py")
                if path.exists():  # of a module, with names
                    names = set(re.findall(r"^        - (\w+)$", options, re.M))
                    self.assertTrue(names)
                    self.assertLessEqual(names, set(defined(path)))
                else:
                    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
                    self.assertIn(name, defined(path))

    def described(self) -> set[str]:
        """Return the names that have an entry, of their own or in a module's."""
        names = {entry.rpartition(".")[2] for entry in self.entries}
        for options in self.entries.values():
            names |= set(re.findall(r"^        - (\w+)$", options, re.M))
        return names

    def test_every_public_name_has_an_entry(self) -> None:
        names = self.described()
        modules = {"callbacks", "layers", "search", "simulate", "transports"}
        for module in (
            "",
            "layers",
            "search",
            "transports",
            "advise",
            "plots",
            "horovod",
        ):
            with self.subTest(module):
                public = set(exported(module)) - modules - {"__version__"}
                self.assertLessEqual(public, names)
        for module in ("callbacks", "horovod/callbacks"):
            with self.subTest(module):
                found = defined(PACKAGE / f"{module}.py")
                self.assertLessEqual(set(found), names)
        for name in ("SimulatedStrategy", "State", "ServerStats"):
            self.assertIn(name, names)
        self.assertIn("`tf_dgc.__version__`", self.api)

    def section(self, title: str) -> str:
        return self.settings.split(f"\n## {title}\n")[1].split("\n## ")[0]

    def test_every_setting_has_one_row_with_its_default(self) -> None:
        for record in RECORDS:
            (table,) = tables(self.section(record.__name__))
            self.assertEqual(table[0], ["Setting", "Default", "Meaning"])
            fields = dataclasses.fields(record)
            names = [row[0].strip("`") for row in table[1:]]
            self.assertEqual(names, [field.name for field in fields])
            for field, (_, default, _) in zip(fields, table[1:], strict=True):
                if default.startswith("*chosen*"):
                    chosen = getattr(record(), field.name)
                    default = default.split(";")[0].removeprefix("*chosen*: ")
                else:
                    chosen = field.default
                given = ast.literal_eval(default.strip("`"))
                self.assertEqual(given, chosen, f"{record.__name__}.{field.name}")

    def test_settings_stand_in_no_other_page(self) -> None:
        for name, text in pages().items():
            for table in tables(text):
                if table[0][:2] == ["Setting", "Default"]:
                    self.assertEqual(name, "docs/reference/settings.md")

    def test_every_option_has_one_row(self) -> None:
        for title, parser in (
            ("tf-dgc-run", run._parser()),
            ("tf_dgc.check", check._parser()),
        ):
            (table,) = tables(self.section(title))
            rows = [row[0].strip("`").split()[0] for row in table[1:]]
            options = [
                action.option_strings[0]
                for action in parser._actions
                if action.option_strings and action.dest != "help"
            ]
            self.assertEqual(sorted(rows), sorted(options))
        adviser = (PACKAGE / "lab" / "advise.py").read_text()
        (table,) = tables(self.section("tf_dgc.advise"))
        rows = [row[0].strip("`").split()[0] for row in table[1:]]
        self.assertEqual(sorted(rows), sorted(re.findall(r'add\("(--\S+)"', adviser)))

    def test_every_strategy_of_the_command_line_is_named(self) -> None:
        for name in settings.STRATEGIES:
            self.assertIn(f"`{name}`", self.section("tf-dgc-run"))

    @pytest.mark.long
    def test_every_variable_of_the_environment_has_one_row(self) -> None:
        read: set[str] = set()
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if re.fullmatch(r"TF_DGC_[A-Z_]+", node.value):
                        read.add(node.value)
        self.assertGreater(len(read), 8)
        rows: Counter[str] = Counter()
        for text in pages().values():
            for table in tables(text):
                for row in table[1:]:
                    rows.update(re.findall(r"`(TF_DGC_[A-Z_]+)`", row[0]))
        for name in sorted(read):
            self.assertEqual(rows[name], 1, f"{name} has so many rows")


class Release(unittest.TestCase):
    def test_the_version_is_the_same_everywhere(self) -> None:
        cited = (ROOT / "CITATION.cff").read_text()
        (number,) = re.findall(r"^version: (\S+)$", cited, re.M)
        (date,) = re.findall(r'^date-released: "(\S+)"$', cited, re.M)
        released = re.findall(
            r"^## \[(\d\S*)\] - (\S+)$", pages()["CHANGELOG.md"], re.M
        )
        self.assertEqual(number, version.__version__)
        self.assertEqual(released[0], (number, date))

    def test_extras_that_pages_name_are_there(self) -> None:
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        extras = set(setup["options.extras_require"])
        for name, text in pages().items():
            for found in re.findall(r"(?:tf_dgc|\.)\[([\w,-]+)\]", text):
                self.assertLessEqual(set(found.split(",")), extras, name)


if __name__ == "__main__":
    unittest.main()
