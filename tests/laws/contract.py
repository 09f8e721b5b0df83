"""What every transport promises: checks that all workers make together."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import transports
from tf_dgc.transports import Transport, grid

CHECKS: dict[str, Callable[[Transport], None]] = {}
NEEDS_GRAPHS: set[str] = set()

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.int64)
GATHERED = (tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
SHAPES = ((), (0,), (1,), (7,), (2, 3), (2, 0, 3))


def check(function: Callable[[Transport], None]) -> Callable[[Transport], None]:
    CHECKS[function.__name__] = function
    return function


def graph_check(function: Callable[[Transport], None]) -> Callable[[Transport], None]:
    NEEDS_GRAPHS.add(function.__name__)
    return check(function)


def mine(transport: Transport, shape: Any, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.fill(shape, transport.rank + 1), dtype)


def all_ranks(transport: Transport) -> list[int]:
    return list(range(1, transport.size + 1))


def same_everywhere(transport: Transport, tensors: list[tf.Tensor], name: str) -> None:
    octets = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    crc = tf.constant([zlib.crc32(octets)], tf.int64)
    found = transport.all_gather(crc, f"{name}.crc").numpy()
    assert len(set(found[:, 0])) == 1, found


def equal(found: Any, expected: Any) -> None:
    found, expected = (tf.convert_to_tensor(x).numpy() for x in (found, expected))
    np.testing.assert_array_equal(found, expected)


@check
def ranks_are_numbered(transport: Transport) -> None:
    found = transport.all_gather(tf.constant(transport.rank), "ranks")
    equal(found, range(transport.size))
    assert 0 <= transport.rank < transport.size
    assert transport.name in ("local", "collective", "horovod", "hybrid", "loopback")


@check
def sums_keep_shape_and_type(transport: Transport) -> None:
    total = sum(all_ranks(transport))
    for dtype in (*FLOATS, *INTEGERS):
        for shape in SHAPES:
            (found,) = transport.all_reduce([mine(transport, shape, dtype)], "sum")
            assert found.dtype == dtype, (found.dtype, dtype)
            equal(found, np.full(shape, total))


@check
def many_tensors_come_back_in_their_order(transport: Transport) -> None:
    tensors = [
        mine(transport, shape, dtype) * tf.cast(i, dtype)
        for i, (shape, dtype) in enumerate(
            (shape, dtype)
            for shape in SHAPES
            for dtype in (tf.float32, tf.int64, tf.float16)
        )
    ]
    found = transport.all_reduce(tensors, "many")
    assert len(found) == len(tensors)
    for i, (result, tensor) in enumerate(zip(found, tensors, strict=True)):
        assert result.dtype == tensor.dtype
        equal(result, np.full(tensor.shape, i * sum(all_ranks(transport))))


@check
def no_tensors_are_no_trouble(transport: Transport) -> None:
    assert transport.all_reduce([], "nothing") == []
    assert transport.broadcast([], "nothing") == []


@check
def sums_have_the_same_bits_everywhere(transport: Transport) -> None:
    random = np.random.default_rng(transport.rank)
    tensors = [
        tf.constant(random.normal(size=size) * 10.0**power, tf.float32)
        for size, power in ((1, 0), (1000, 6), (99_991, -3))
    ]
    found = transport.all_reduce(tensors, "bits")
    same_everywhere(transport, found, "bits")
    generators = [np.random.default_rng(rank) for rank in range(transport.size)]
    for result, power in zip(found, (0, 6, -3), strict=True):
        size = result.shape[0]
        expected = sum(g.normal(size=size) * 10.0**power for g in generators)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6 * 10.0**power)


@check
def gathers_are_in_the_order_of_rank(transport: Transport) -> None:
    for dtype in GATHERED:
        for shape in SHAPES:
            found = transport.all_gather(mine(transport, shape, dtype), "gather")
            assert found.dtype == dtype
            equal(found, np.stack([np.full(shape, r) for r in all_ranks(transport)]))


@check
def gathers_keep_bits(transport: Transport) -> None:
    # As in a message, where they are no numbers: NaN with a payload, minus zero.
    words = np.array([0x7FC00001, -(2**31), -1, 1], np.int32)
    found = transport.all_gather(tf.constant(words), "words")
    equal(found, np.stack([words] * transport.size))


@check
def rows_go_to_their_workers(transport: Transport) -> None:
    size, rank = transport.size, transport.rank
    for dtype in GATHERED:
        for shape in SHAPES:
            ones = tf.ones([size, *shape], dtype)
            marks = tf.cast(10 * tf.range(size) + rank, dtype)  # to whom, from whom
            tensor = ones * tf.reshape(marks, [size] + [1] * len(shape))
            found = transport.all_to_all(tensor, "rows")
            assert found.dtype == dtype
            expected = [np.full(shape, 10 * rank + other) for other in range(size)]
            equal(found, np.stack(expected))
            equal(transport.all_to_all(found, "rows.back"), tensor)


@check
def rows_keep_bits(transport: Transport) -> None:
    words = np.array([0x7FC00001, -(2**31), -1, 1], np.int32)
    own = tf.constant([words + rank for rank in range(transport.size)])
    for dtype in (tf.int32, tf.float32):
        found = transport.all_to_all(tf.bitcast(own, dtype), "bits_of_rows")
        expected = np.stack([words + transport.rank] * transport.size)
        equal(tf.bitcast(found, tf.int32), expected)


@check
def ragged_gathers_join_what_there_is(transport: Transport) -> None:
    for dtype in (*FLOATS, *INTEGERS, tf.bool):
        for rest in ((), (3,)):
            # Rank 0 has nothing.
            rows = tf.ones([2 * transport.rank, *rest], dtype)
            found = transport.all_gather_ragged(rows, "ragged")
            assert found.dtype == dtype, (found.dtype, dtype)
            count = sum(2 * rank for rank in range(transport.size))
            equal(tf.cast(found, tf.int32), np.ones([count, *rest]))
    rows = tf.fill([transport.rank + 1], transport.rank)
    expected = np.repeat(np.arange(transport.size), all_ranks(transport))
    equal(transport.all_gather_ragged(rows, "ragged"), expected)
    texts = [["", "\N{LATIN SMALL LETTER E WITH ACUTE} \0"], ["b", "long" * 9]]
    found = transport.all_gather_ragged(tf.constant(texts)[: transport.rank], "texts")
    assert found.dtype == tf.string
    assert found.shape[1:] == [2]
    rows = [row for rank in all_ranks(transport) for row in texts[: rank - 1]]
    expected_texts = np.array(rows, object).reshape(-1, 2)
    assert [[text.decode() for text in row] for row in found.numpy()] == (
        expected_texts.tolist()
    )
    nothing = transport.all_gather_ragged(tf.zeros([0, 3]), "ragged")
    assert nothing.shape == [0, 3]


@check
def slices_are_summed_by_row(transport: Transport) -> None:
    # Every worker has row 1 twice and a row of its own; the last one nothing.
    count = 0 if transport.rank == transport.size - 1 and transport.size > 1 else 3
    slices = tf.IndexedSlices(
        tf.ones([count, 2]),
        tf.constant([1, 5 + transport.rank, 1][:count], tf.int64),
        tf.constant([20, 2]),
    )
    found = transport.sum_slices(slices, "slices")
    same_everywhere(transport, [found.values, found.indices], "slices")
    equal(np.sort(found.indices), np.unique(found.indices))
    expected = np.zeros((20, 2))
    for rank in range(max(1, transport.size - 1)):
        expected[1] += 2
        expected[5 + rank] += 1
    equal(tf.convert_to_tensor(found), expected)


@check
def broadcasts_keep_bits(transport: Transport) -> None:
    def tensors(seed: int) -> list[tf.Tensor]:
        random = np.random.default_rng(seed)
        octets = tf.constant(random.integers(0, 256, 48), tf.uint8)
        found = [
            tf.bitcast(tf.reshape(octets, [-1, dtype.size]), dtype)
            for dtype in (*FLOATS, tf.int32, tf.int64, tf.complex64)
        ]
        found.append(tf.bitcast(octets, tf.int8))
        found.append(octets[:5] % 2 == 0)
        found.append(tf.constant([np.nan, -0.0, np.inf, 1e-45]))
        found.append(tf.constant(random.normal()))
        found.append(tf.zeros([0, 3]))
        return found

    for result, expected in zip(
        transport.broadcast(tensors(transport.rank), "bits"), tensors(0), strict=True
    ):
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        assert result.numpy().tobytes() == expected.numpy().tobytes()


@check
def groups_carry_tensors_of_their_own(transport: Transport) -> None:
    ranks = list(range(transport.size))
    whole = transport.group([ranks])
    equal(whole.all_gather(tf.constant(transport.rank), "whole"), ranks)
    parts = [part for part in (ranks[::2], ranks[1::2]) if part]
    group = transport.group(parts)
    (own,) = [part for part in parts if transport.rank in part]
    assert (group.rank, group.size) == (own.index(transport.rank), len(own))
    equal(group.all_gather(tf.constant(transport.rank), "group"), own)
    (total,) = group.all_reduce([tf.constant(float(transport.rank))], "group.sum")
    equal(total, sum(own))
    rows = tf.constant([100 * transport.rank + place for place in range(len(own))])
    received = group.all_to_all(rows, "group.rows")
    equal(received, [100 * rank + group.rank for rank in own])
    if ranks[1:]:
        others = transport.group([ranks[1:]])
        assert others.size == (len(ranks) - 1 if transport.rank else 1)
    equal(transport.all_gather(tf.constant(transport.rank), "after"), ranks)


@check
def a_barrier_lets_all_pass(transport: Transport) -> None:
    for _ in range(3):
        transport.barrier()


@graph_check
def graphs_compute_what_eager_calls_do(transport: Transport) -> None:
    traces = []

    def calls(x: tf.Tensor) -> list[tf.Tensor]:
        # Of equal size, and independent of each other: only the program orders them.
        first, second = transport.all_reduce([x, tf.cast(x, tf.int64)], "a")
        (third,) = transport.all_reduce([2 * x], "b")
        return [
            *(first, second, third),
            transport.all_gather(3 * x, "c"),
            transport.all_to_all(tf.stack([x] * transport.size), "f"),
            transport.all_gather_ragged(x[: transport.rank], "d"),
            *transport.broadcast([x], "e"),
        ]

    @tf.function
    def graph(x: tf.Tensor) -> list[tf.Tensor]:
        traces.append(x)
        return calls(x)

    for step in range(5):
        x = tf.range(4.0) + float(transport.rank + 10 * step)
        for found, expected in zip(graph(x), calls(x), strict=True):
            equal(found, expected)
    assert len(traces) == 1


@graph_check
def static_shapes_are_known(transport: Transport) -> None:
    @tf.function
    def graph(x: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        found = transport.all_reduce([x, s], "a")
        assert [t.shape for t in found] == [x.shape, s.shape]
        assert transport.all_gather(x, "b").shape == [transport.size, *x.shape]
        assert [t.shape for t in transport.broadcast([x], "c")] == [x.shape]
        rows = tf.stack([x] * transport.size)
        assert transport.all_to_all(rows, "d").shape == rows.shape
        return tf.reduce_sum(found[0])

    graph(tf.ones([2, 3]), tf.ones([]))


@graph_check
def loops_and_branches_work(transport: Transport) -> None:
    @tf.function
    def graph(x: tf.Tensor) -> tf.Tensor:
        total = tf.zeros_like(x)
        for i in tf.range(6):
            if i % 2 == 0:
                (part,) = transport.all_reduce([x], "even")
            else:
                part = tf.reduce_sum(transport.all_gather(2.0 * x, "odd"), axis=0)
            total += part
        return total

    for _ in range(2):
        found = graph(mine(transport, (5,), tf.float32))
        equal(found, np.full(5, 9.0 * sum(all_ranks(transport))))


@graph_check
def one_worker_may_trace_again(transport: Transport) -> None:
    @tf.function
    def graph(x: tf.Tensor, unused: int) -> list[tf.Tensor]:
        gathered = transport.all_gather(x, "again.gather")
        received = transport.all_to_all(tf.stack([x] * transport.size), "again.rows")
        return [*transport.all_reduce([x, 2 * x], "again"), gathered, received]

    for step in range(6):
        # A Python number that changes makes a new graph.
        changing = step if transport.rank == 0 else 0
        found = graph(mine(transport, (3,), tf.float32), changing)
        first, second, gathered, received = found
        equal(first, np.full(3, sum(all_ranks(transport))))
        equal(second, 2 * first)
        equal(tf.reduce_sum(gathered, axis=0), first)
        equal(received, gathered)


@graph_check
def shapes_may_change_from_call_to_call(transport: Transport) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def graph(x: tf.Tensor) -> list[tf.Tensor]:
        return [
            *transport.all_reduce([x], "changing"),
            transport.all_gather(x, "changing.gather"),
            transport.all_to_all(tf.stack([x] * transport.size), "changing.rows"),
        ]

    for length in (3, 1, 5, 5, 0, 3):
        found, gathered, received = graph(mine(transport, (length,), tf.float32))
        equal(found, np.full(length, sum(all_ranks(transport))))
        assert gathered.shape == [transport.size, length]
        equal(received, gathered)


@graph_check
def threads_do_not_pile_up(transport: Transport) -> None:
    @tf.function
    def graph(x: tf.Tensor) -> tf.Tensor:
        for _ in range(5):
            (x,) = transport.all_reduce([x], "threads")
            x = tf.reduce_mean(transport.all_gather(x, "threads.gather"), axis=0)
            rows = tf.stack([x] * transport.size)
            x = tf.reduce_mean(transport.all_to_all(rows, "threads.rows"), axis=0)
        return x

    def threads() -> int:
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("Threads:"))
        return int(line.split()[1])

    for _ in range(20):
        graph(tf.zeros([10]))
    before = threads()
    for _ in range(100):
        graph(tf.zeros([10]))
    assert threads() < before + 50, (before, threads())  # of 1500 collectives


def keeps(name: str, transport: str, over_grid: bool = False) -> list[Any]:
    """Make a check; for the workers of `pool.py`."""
    found = transports.resolve(transport)
    CHECKS[name](grid.Grid(found) if over_grid else found)
    return [found.rank, found.name]
