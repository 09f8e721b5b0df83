"""Examples of docstrings as code, for mkdocs: `Example:` has indented lines of Python.

An extension of griffe, which reads docstrings for mkdocstrings; mkdocs.yml names it.
"""

import re
import textwrap
from typing import Any

import griffe

# The word alone on its line, and the indented lines after it.
_SECTION = re.compile(r"^Example:\n((?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)


def _fenced(found: re.Match[str]) -> str:
    code = f"```python\n{textwrap.dedent(found[1]).strip()}\n```"
    return f"Example:\n{textwrap.indent(code, '    ')}\n\n"


class Examples(griffe.Extension):
    """Fences the code of each `Example:` section."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = _SECTION.sub(_fenced, obj.docstring.value).rstrip()
