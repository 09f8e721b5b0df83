#!/usr/bin/env python
"""Measure what a step of compression costs, in units of a bare update.

    scripts/bench_step.py --json step.json
    scripts/bench_step.py --elements 1000000 --repeats 100 --no-fit

The bare update is u = m*u + g, v = v + u in place, compiled by XLA: what no momentum
correction can do without. All is measured in turns, in one process, and the medians of
the ratios are printed, so that other load on the machine matters less:

    step_ratio              clip, accumulate, select, write and read the own message,
                            mask; one tensor
    many_tensors_ratio      the same with the shapes of ResNet-50, over one tensor
    sign_ratio              the same with the signs of four times the elements, at equal
                            bytes, over that; and with log4 and three times
    apply_ratio             read the messages of 4 workers and change the weights
    owners_ratio_4, ...     what a worker does with what it receives by owners: read the
                            parts of N workers, add them up, choose, read what N owners
                            pass on and change the weights; for 4, 64 and 256 workers
    overhead_alone_dgc      share by which `fit` on one worker takes longer than
    overhead_alone_dense    without a strategy
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]

WORKERS = 4
OWNERS = (4, 64, 256)
MOMENTUM = 0.9


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of the 161 trainable variables of ResNet-50."""
    shapes: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,), (64,)]
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for block in range(blocks):
            sides = [(1, width, inner), (3, inner, inner), (1, inner, 4 * inner)]
            if block == 0:
                sides.append((1, width, 4 * inner))
            for side, before, after in sides:
                shapes.append((side, side, before, after))
                shapes += [(after,)] * 3  # bias, gamma, beta
            width = 4 * inner
    return [*shapes, (width, 1000), (1000,)]


def bare_update(elements: int) -> Callable[[], Any]:
    """Returns the update of u and v, and nothing else, in place."""
    import tensorflow as tf

    u, v = tf.Variable(tf.zeros([elements])), tf.Variable(tf.zeros([elements]))
    gradient = tf.random.stateless_normal([elements], [1, 2])

    @tf.function(autograph=False, jit_compile=True)
    def update(gradient: tf.Tensor) -> None:
        u.assign(MOMENTUM * u + gradient)
        v.assign_add(u)

    return lambda: update(gradient)


class Training:
    """One worker's exchange of the gradients of some tensors."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], **settings: Any) -> None:
        import keras
        import tensorflow as tf

        from tf_dgc import DGCConfig
        from tf_dgc.compression import dgc
        from tf_dgc.exchanges import EachStep, Ledger
        from tf_dgc.transports.local import LocalTransport

        class Recorder(LocalTransport):
            """Keeps the last message that was sent eagerly."""

            message: tf.Tensor

            def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
                if tf.executing_eagerly():
                    self.message = tensor
                return super().all_gather(tensor, name)

        # The norm of the gradients is about 5000: all are clipped.
        self.config = DGCConfig.paper(clip_norm=100.0, min_elements=0, **settings)
        self.momentum = dgc.Momentum(MOMENTUM, False, 0.1)
        self.transport = Recorder()
        self.ledger = Ledger(self.transport, EachStep(self.config))
        self.sgd = keras.optimizers.SGD(0.1, momentum=MOMENTUM)
        self.variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        self.gradients = [
            tf.random.stateless_normal(shape, [3, i]) for i, shape in enumerate(shapes)
        ]
        self.step = tf.function(self._step, autograph=False)
        self.apply = tf.function(self._apply, autograph=False)

    def _step(self, gradients: list[Any]) -> Any:
        found = self.ledger.gradients(
            self.sgd, gradients, self.variables, self.momentum
        )
        return found.applies

    def _apply(self, messages: Any) -> None:
        from tf_dgc.exchanges import applied
        from tf_dgc.exchanges.formats import message_format
        from tf_dgc.transports import sums

        (exchange,) = self.ledger.exchanges()
        sparsity = self.config.sparsity
        form = message_format(exchange.layout, sparsity, self.config, WORKERS)
        found = sums.receive(form, messages)
        own = [v for v in self.variables if len(v.shape) > 1]
        sent = sums.Sparse(found.positions, found.values)
        applied.subtract(own, exchange.layout, sent, [form.slots])

    def messages(self) -> Any:
        """Returns messages that four workers could have sent in one step."""
        import tensorflow as tf

        found = []
        for number in range(WORKERS):
            order = [tf.roll(g, number, axis=0) for g in self.gradients]
            self._step([gradient * (1.0 + number) for gradient in order])
            message = self.transport.message.numpy().copy()
            message[3] = 0  # the step
            found.append(message)
        return tf.stack(found)


def by_owners(shape: tuple[int, ...], workers: int) -> Callable[[], Any]:
    """Returns what one of N workers does with what it receives, of one tensor.

    All regions have as many elements, so that all workers may send the same.
    """
    import tensorflow as tf

    from tf_dgc import DGCConfig
    from tf_dgc.compression import arena, selection, warmup
    from tf_dgc.exchanges import applied
    from tf_dgc.exchanges.owner_sum import OwnerSum
    from tf_dgc.transports import sums
    from tf_dgc.transports.local import LocalTransport

    class Crowd(LocalTransport):
        """One of N workers that all send the same."""

        def __init__(self) -> None:
            super().__init__()
            self.size = workers

        def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
            return tf.tile(tensor[tf.newaxis], [workers, 1])

    config, transport = DGCConfig.paper(exchange="owners"), Crowd()
    layout = arena.build([("tensor", shape)])
    wire = sums.Wire(transport, sums.one(transport), layout, config, "bench")
    (stage,) = warmup.stages(config)
    owners = OwnerSum(wire, {0: stage})
    weights = [tf.Variable(tf.zeros(shape))]
    residual = tf.random.stateless_normal([layout.size], [5, 6])
    step = tf.zeros([], tf.int64)
    parts = owners.split(residual, selection.peaks(residual), step, None)

    @tf.function(autograph=False)
    def take(*parts: tf.Tensor) -> tf.Tensor:
        total, _, traffic = owners.through(0, step, *parts)
        applied.subtract(weights, layout, total, owners.slots)
        return traffic

    return lambda: take(*parts)


def in_turns(
    functions: dict[str, Callable[[], Any]], repeats: int
) -> dict[str, list[float]]:
    """Returns the seconds that each function took, again and again in turns."""
    import tensorflow as tf

    for function in functions.values():
        function()
        function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            tf.test.experimental.sync_devices()  # a GPU works on after the call
            taken[name].append(time.perf_counter() - start)
    return taken


def ratio(taken: dict[str, list[float]], one: str, other: str) -> float:
    """Returns the median of the ratios of what was measured side by side."""
    pairs = zip(taken[one], taken[other], strict=True)
    return statistics.median(a / b for a, b in pairs)


def measure_step(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the ratios of the step, and the medians behind them."""
    shapes = resnet50_shapes()
    scale = args.elements / 25e6
    if scale != 1:  # narrower
        shapes = [(*s[:-1], max(1, round(s[-1] * scale))) for s in shapes]
    total = sum(_size(shape) for shape in shapes)
    one, many = Training([(total // 1024, 1024)]), Training(shapes)
    coarse = {
        name: Training(shapes, value_dtype=name, sparsity=1 - times * 0.001)
        for name, times in (("sign", 4), ("log4", 3))
    }
    bare = bare_update(total // 1024 * 1024)
    messages, of_many = one.messages(), many.messages()
    taken = in_turns(
        {
            "bare": bare,
            "step": lambda: one.step(one.gradients),
            "many_tensors": lambda: many.step(many.gradients),
            **{
                name: lambda each=each: each.step(each.gradients)
                for name, each in coarse.items()
            },
            "apply": lambda: one.apply(messages),
            "apply_many_tensors": lambda: many.apply(of_many),
            **{
                f"owners_{workers}": by_owners((total // 2**15 * 32, 1024), workers)
                for workers in OWNERS
            },
        },
        args.repeats,
    )
    return {
        "elements": total,
        "bare_elements": total // 1024 * 1024,
        "step_ratio": ratio(taken, "step", "bare"),
        "many_tensors_ratio": ratio(taken, "many_tensors", "step"),
        **{f"{name}_ratio": ratio(taken, name, "many_tensors") for name in coarse},
        "apply_ratio": ratio(taken, "apply", "bare"),
        **{f"owners_ratio_{n}": ratio(taken, f"owners_{n}", "bare") for n in OWNERS},
        "apply_many_tensors_ratio": ratio(taken, "apply_many_tensors", "bare"),
        **{f"{name}_seconds": statistics.median(each) for name, each in taken.items()},
    }


def measure_fit(args: argparse.Namespace) -> dict[str, Any]:
    """Returns by how much the strategies slow `fit` down on one worker."""
    import contextlib

    import cifar10
    import keras
    import tensorflow as tf

    import tf_dgc

    images = tf.random.stateless_uniform([args.batch, 32, 32, 3], [5, 6])
    labels = tf.zeros([args.batch], tf.int32)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat(args.steps)
    functions = {}
    for name, strategy in (
        ("plain", None),
        ("dgc", tf_dgc.DGCStrategy(transport="local")),
        ("dense", tf_dgc.DenseStrategy(transport="local")),
    ):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = cifar10.build(1, 32)
            sgd = keras.optimizers.SGD(0.01, momentum=MOMENTUM)
            # As under any strategy.
            model.compile(sgd, "sparse_categorical_crossentropy", jit_compile=False)
        functions[name] = lambda model=model: model.fit(data, verbose=0)
    taken = in_turns(functions, args.fit_repeats)
    return {
        "overhead_alone_dgc": ratio(taken, "dgc", "plain") - 1,
        "overhead_alone_dense": ratio(taken, "dense", "plain") - 1,
        **{
            f"fit_{name}_seconds": statistics.median(each)
            for name, each in taken.items()
        },
    }


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for axis in shape:
        size *= axis
    return size


def main() -> int:
    """Measures and reports; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=41, help="of the step")
    parser.add_argument("--fit-repeats", type=int, default=11, help="of an epoch")
    parser.add_argument("--steps", type=int, default=10, help="of an epoch")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--no-fit", action="store_true", help="only the step")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    figures = measure_step(args)
    if not args.no_fit:
        figures |= measure_fit(args)
    for name, figure in figures.items():
        print(f"{name:28} {figure:.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
