"""Errors as users read them: their own lines, and what was wrong, in a paragraph.

TensorFlow tells of an error in a graph how each operation was made, in hundreds of
lines (tensorflow/python/framework/errors_impl.py, and what C++ writes); most frames of
a traceback are of Keras, of TensorFlow and of this package.
"""

import os
import pathlib
import re
import sys
import textwrap
import traceback
import types
from typing import Any

import keras
import tensorflow as tf

# Name of the operations by which something is refused; see `values.require`.
REFUSAL = "tf_dgc_refuses"
# What a worker prints that ends for the error of another one; the launcher knows it.
ENDS_TOO = "This worker ends, too: "
# Everything is told where this is "all".
VARIABLE = "TF_DGC_TRACES"

_OWN = str(pathlib.Path(__file__).parents[1]) + os.sep
_FOREIGN = (
    _OWN,
    *(str(pathlib.Path(each.__file__).parent) + os.sep for each in (keras, tf)),
    "<frozen runpy>",
)
_GENERATED = "__autograph_generated_file"  # in the names of files
_ON_PURPOSE = (
    *(ValueError, TypeError, RuntimeError, TimeoutError, ImportError),
    tf.errors.OpError,
)
_FRAME = re.compile(r'^ {2}File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_NODES = re.compile(
    r"\s*\[\[\{\{(?:function_)?node .*?\}\}\]\]|\{\{function_node [^}]*\}\}\s*"
    r"|\s*\[\[\S*PartitionedCall\S*\]\]|\s*\[Op:\w+\](?: name: ?\S*)?"
)
_SCATTERED = re.compile(
    r"\d+ root error\(s\) found\.\s*|^\s*\(\d+\) \w+: ", re.MULTILINE
)
_ASSERTION = re.compile(r"assertion failed: \[(.*)\]", re.DOTALL)
# As `CollectiveTransport` tells others, and TensorFlow passes on.
_OF_ANOTHER = re.compile(r"Worker \d+ failed: .*", re.DOTALL)
# What gRPC and the collectives add, as often as an error is passed on.
_PASSED_ON = re.compile(
    r"\s*Additional GRPC error information.*|Collective ops is aborted by: "
    r"|\s*The error could be from a previous operation\. Restart your program to reset."
    r"|Error reported from /job:worker\S*: (?=Worker \d+ failed)",
    re.DOTALL,
)
# What AutoGraph makes of an error in a tf.function
# (tensorflow/python/autograph/impl/api.py): frames, of which those of functions that it
# has converted end in a star, and the text.
_OF_FUNCTION = re.compile(r"in user code:\n\n((?: {4}.*\n)+)\n {4}\w+: (.*)", re.DOTALL)
_FRAME_OF_USER = re.compile(
    r'^ {4}File "(.*)", line (\d+), in (.*?)  \*$', re.MULTILINE
)
_ESCAPED = re.compile(r"\\(['\"\\])")


def install() -> None:
    """Let errors that end this process be printed like that; once."""
    if getattr(sys.excepthook, "__module__", "") == __name__:
        return
    original = sys.excepthook

    def excepthook(
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        if (text := of_another(error)) is not None:
            new = "\n" * sys.stderr.isatty()  # there may be a progress bar
            sys.stderr.write(f"{new}{ENDS_TOO}{text}\n")
            return
        short = error if error.__traceback__ is not trace else brief(error)
        original(type(short), short, short.__traceback__)

    sys.excepthook = excepthook


def of_another(error: BaseException) -> str | None:
    """Return what another worker failed by, where tf-dgc-run shows its error."""
    if "TF_DGC_LAUNCH" not in os.environ or _whole():
        return None
    text = paragraph(str(error)) if isinstance(error, tf.errors.OpError) else ""
    found = _OF_ANOTHER.search(text)
    return found and found[0]


def _whole() -> bool:
    filters = keras.config.is_traceback_filtering_enabled()
    return os.environ.get(VARIABLE) == "all" or not filters


def brief(error: BaseException) -> BaseException:
    """Return an error of the same type that tells what users need; or the same one.

    Args:
        error: with its traceback.
    """
    if _whole() or not isinstance(error, Exception):
        return error
    shown = error
    if isinstance(error, tf.errors.OpError):
        text = paragraph(str(error.message))
        try:
            shown = type(error)(None, None, text)
        except TypeError:  # of a class with other arguments
            return error
        for note in getattr(error, "__notes__", ()):
            shown.add_note(note)
    elif _is_chained(error):
        return error  # a chain is told as it is
    elif (found := _OF_FUNCTION.fullmatch(str(error))) and _is_ours(error):
        text = textwrap.dedent(found[2]).strip()
        for path, line, name in _FRAME_OF_USER.findall(found[1])[-1:]:
            text += f'\n(in {name}, in "{path}", line {line})'
        shown = type(error)(text)
    return shown.with_traceback(_frames_of_users(error))


def _is_chained(error: BaseException) -> bool:
    """Tell whether Python would tell of another error, too."""
    before = None if error.__suppress_context__ else error.__context__
    return before is not None or error.__cause__ is not None


def _is_ours(error: BaseException) -> bool:
    """Tell whether an error was raised on purpose in this package."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    own = frame.f_code.co_filename.startswith(_OWN)
    return own and isinstance(error, _ON_PURPOSE)


def _frames_of_users(error: BaseException) -> types.TracebackType | None:
    """Return a traceback without frames of libraries, but for the last."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return None
    last = frames[-1][0].f_code.co_filename
    if last.startswith(_OWN) and not isinstance(error, _ON_PURPOSE):
        return error.__traceback__  # a mistake in this package
    files = [frame.f_code.co_filename for frame, _ in frames]
    kept = [
        each
        for each, file in zip(frames, files, strict=True)
        if not (file.startswith(_FOREIGN) or _GENERATED in file)
    ]
    if not isinstance(error, tf.errors.OpError) and frames[-1] not in kept:
        kept.append(frames[-1])
    found: types.TracebackType | None = None
    for frame, line in reversed(kept):
        found = types.TracebackType(found, frame, frame.f_lasti, line)
    return found or error.__traceback__


def paragraph(message: str) -> str:
    """Return what an error of a graph says, without how the graph was made.

    Where that was not all in libraries, the user's line is named.
    """
    frames = list(_FRAME.finditer(message))
    text = message[frames[-1].end() :] if frames else message
    text = _PASSED_ON.sub("", _SCATTERED.sub("", _NODES.sub("", text)))
    if REFUSAL in message and (found := _ASSERTION.search(text)):
        # Texts first: only the brackets of numbers stay.
        text = _ESCAPED.sub(r"\1", found[1].replace("] [", " [", 1))
        text += "]" * (text.count("[") > text.count("]"))
        return text
    text = text.strip() or message
    own = [each for each in frames if not each[1].startswith(_FOREIGN)]
    if len(own) > 1:  # the first is where the graph was run
        path, line, name = own[-1].groups()
        text += f'\n(in what was made by {name}, in "{path}", line {line})'
    return text


def told(error: BaseException) -> str:
    """Return type and text of an error in a line or few."""
    short: Any = brief(error)
    return f"{type(short).__name__}: {getattr(short, 'message', short)}"
