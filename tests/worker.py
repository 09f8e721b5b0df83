"""A worker of a job of `pool.py`: runs what it is told, one thing after another.

    python tests/worker.py FOLDER TRANSPORT

What it prints goes to FOLDER/RANK. It ends when whoever started the job does.
"""

import faulthandler
import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

_PROBE = 977  # elements, which no test has: TensorFlow matches collectives by it


def main() -> None:
    folder, name = sys.argv[1:]
    rank = _own_rank()
    with open(os.path.join(folder, str(rank)), "ab", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    faulthandler.register(signal.SIGUSR1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(folder, "socket"))
    tell = _Teller(connection)
    tell({"rank": rank, "pid": os.getpid()})
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, told), daemon=True).start()
    worker: _Worker | None = None
    while True:
        command = told.get()
        try:
            worker = worker or _Worker(name)
            tell({"value": worker.run(**command)})
        except BaseException as error:
            tell(_described(error))


class _Teller:
    """Sends objects as lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def __call__(self, told: dict[str, Any]) -> None:
        text = json.dumps(told, default=lambda array: array.tolist())
        self._connection.sendall(text.encode() + b"\n")


def _listen(
    connection: socket.socket, told: "queue.SimpleQueue[dict[str, Any]]"
) -> None:
    with connection.makefile("rb") as lines:
        for line in lines:
            told.put(json.loads(line))
    os._exit(0)  # whatever the main thread waits for


def _own_rank() -> int:
    if "HOROVOD_RANK" in os.environ:
        return int(os.environ["HOROVOD_RANK"])
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return int(config.get("task", {}).get("index", 0))


def _described(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    found = {"type": type(error).__name__, "message": str(error), "traceback": text}
    return {"error": found}


class _Worker:
    """Runs functions; before each of them all is as it was in the beginning."""

    def __init__(self, name: str) -> None:
        # First of all: TensorFlow's collectives come before any operation.
        import keras  # noqa: F401
        import launch

        from tf_dgc import transports

        sys.path.remove(str(launch.LEAN))  # some functions want the real ones

        gc.freeze()  # modules stay; to look through them takes longer than most cases
        self._transport = transports.resolve(name)
        self._environment = dict(os.environ)

    def run(self, module: str, function: str, arguments: dict[str, Any]) -> Any:
        if not module:
            return self._prepare()
        return getattr(importlib.import_module(module), function)(**arguments)

    def _prepare(self) -> float:
        """Forget what was; return how many workers hear each other."""
        import keras
        import tensorflow as tf

        os.environ.clear()
        os.environ.update(self._environment)
        keras.utils.clear_session()
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        keras.config.set_image_data_format("channels_last")
        tf.config.run_functions_eagerly(False)
        if tf.distribute.has_strategy():
            tf.distribute.experimental_set_strategy(None)
        gc.collect()
        gc.freeze()  # nor need anybody look through what earlier cases have left
        keras.utils.set_random_seed(1)
        (total,) = self._transport.all_reduce([tf.ones([_PROBE])], "pool")
        return float(tf.reduce_mean(total))


if __name__ == "__main__":
    main()
