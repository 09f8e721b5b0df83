"""What comes from the network or a disk is parsed as data, whatever it is.

From valid inputs others are made, by seeded changes. Each is either refused with the
error that is documented for it, or parsed to something wholly within its bounds.

TF_DGC_FUZZ=1000000 tries so many inputs of each kind, instead of some thousands.
"""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledgers import compressing, exchange, only
from loopback import OWNER, Loopback, Tampering, outcomes

from tf_dgc import averaging
from tf_dgc.compression import arena as layout_lib
from tf_dgc.compression import dgc
from tf_dgc.compression import message as packing
from tf_dgc.compression import selection as sparsify
from tf_dgc.compression.message import HEADER_WORDS, Format
from tf_dgc.config import VALUE_DTYPES, DGCConfig
from tf_dgc.exchanges import Dense, Ledger, rounds, state_files
from tf_dgc.exchanges import records as saving
from tf_dgc.exchanges.formats import message_format
from tf_dgc.transports import handshake, rendezvous
from tf_dgc.transports.sums import receive

WORDS = np.array(
    [0, 1, -1, 2, 5, 127, -127, 2**15, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00000],
    np.int64,
).astype(np.uint32)
ODD = (None, True, -1, 0, 2**31, 2**63, 10**400, 0.5, 1e308, float("nan"), "", "1", [])
ODD += ({}, [[]], {"a": 1}, "x" * 300, "\x1b[2J", "\ud800", [0] * 70, [None], {"": {}})


def inputs(few: int) -> int:
    """Return how many inputs to try."""
    return int(os.environ.get("TF_DGC_FUZZ", few))


def mutated(random: np.random.Generator, whole: bytes, other: bytes) -> bytes:
    """Change bits, bytes, words or the length; or put in a piece of another input."""
    octets, size = bytearray(whole), len(whole)
    for _ in range(random.integers(1, 4)):
        place, length = (int(n) for n in random.integers(0, max(size, 1), 2))
        match random.integers(8):
            case 0:
                octets[place : place + 1] = bytes(
                    each ^ (1 << int(random.integers(8)))
                    for each in octets[place : place + 1]
                )
            case 1:
                octets[place : place + 1] = random.bytes(1)
            case 2:
                start = place // 4 * 4
                octets[start : start + 4] = random.choice(WORDS).tobytes()
            case 3:
                del octets[place:]
            case 4:
                octets += random.bytes(length)
            case 5:
                octets[place : place + length] = other[place : place + length]
            case 6:
                octets[place : place + length] = bytes(length)
            case _:
                octets[place:place] = octets[length : length + 16]
    return bytes(octets)


def with_odd_leaf(random: np.random.Generator, tree: Any) -> Any:
    """Return a tree of JSON in which something is something else, or is not there."""
    if isinstance(tree, dict | list) and tree and random.random() < 0.8:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        chosen, found = keys[int(random.integers(len(keys)))], tree.copy()
        if random.random() < 0.1:
            del found[chosen]
        else:
            found[chosen] = with_odd_leaf(random, tree[chosen])
        return found
    return ODD[int(random.integers(len(ODD)))]


def selection(form: Format, random: np.random.Generator) -> np.ndarray:
    """Return a valid message."""
    count = int(random.integers(form.slots + 1))
    positions = np.sort(random.permutation(form.size)[:count])
    values = tf.cast(tf.constant(random.normal(size=count)), form.value_dtype)
    scales = None
    if form.begins:
        values = tf.constant(random.integers(2**form.code_bits, size=count), tf.uint8)
        scales = tf.cast(random.uniform(size=len(form.begins)), tf.bfloat16)
    message = packing.pack(
        form,
        tf.constant(positions, tf.int64),
        values,
        tf.constant(7 if form.value_dtype == tf.float16 else 0),
        scales,
        checksum=-7,
        step=tf.constant(3, tf.int64),
    )
    return message.numpy()


def as_message(form: Format, octets: bytes) -> np.ndarray:
    """Cut or fill up to the fixed length, as transports do not carry another."""
    return np.frombuffer(octets[: form.bytes].ljust(form.bytes, b"\0"), np.int32)


class Parsed:
    """What NumPy makes of messages [B, words], all at once; the reference.

    Attributes:
        whole: which of them are, shape [B].
        positions, values: shape [B, K]; filled up with -1 and 0.
    """

    def __init__(self, form: Format, messages: np.ndarray) -> None:
        batch, slots = len(messages), form.slots
        kind, exponent, _, _, count = messages[:, :HEADER_WORDS].astype(np.int64).T
        body = np.ascontiguousarray(messages[:, HEADER_WORDS:]).view(np.uint8)
        ends = np.cumsum(form.body_bytes)
        parts = np.split(body.reshape(batch, -1), ends[:3], axis=1)
        scales, values, low, high = parts
        rows, index = np.nonzero(np.unpackbits(high, axis=1, bitorder="little"))
        found = np.bincount(rows, minlength=batch)
        order = np.arange(len(rows)) - (np.cumsum(found) - found)[rows]
        most = 126 if form.value_dtype == tf.float16 else 0
        self.whole = (kind == packing.FORMAT) & (abs(exponent) <= most)
        self.whole &= (found == count) & (found <= slots)
        kept = order < slots
        rows, index, order = rows[kept], index[kept], order[kept]
        low = np.ascontiguousarray(low).view(f"<u{form.low_bits // 8}")
        where = (index - order) * 2**form.low_bits + low[rows, order]
        scales = np.ascontiguousarray(scales).view("<u2").astype(np.uint32) << 16
        scales = scales.view(np.float32)
        self.whole &= (np.isfinite(scales) & (scales >= 0)).all(axis=1)
        shift = -exponent[rows].clip(-126, 126) * (most > 0)
        with np.errstate(all="ignore"):
            if form.begins:
                tensor = np.searchsorted(form.begins, where, side="right") - 1
                scale = scales[rows, tensor.clip(0)]
                what = scale * _read_codes(form, values)[rows, order]
            else:
                dtype = form.value_dtype.as_numpy_dtype
                values = np.ascontiguousarray(values).view(dtype)
                what = np.ldexp(values[rows, order].astype(np.float32), shift)
        bad = (where >= form.size) | ~np.isfinite(what)
        bad[1:] |= (rows[1:] == rows[:-1]) & (where[1:] <= where[:-1])
        self.whole &= np.bincount(rows, bad, batch) == 0
        self.positions = np.full([batch, slots], -1)
        self.positions[rows, order] = where
        self.values = np.zeros([batch, slots], np.float32)
        self.values[rows, order] = what


def _read_codes(form: Format, octets: np.ndarray) -> np.ndarray:
    """Return what codes stand for, of a scale of one: shape [B, slots and more]."""
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    if form.code_bits == 1:
        return np.where(bits, -1.0, 1.0).astype(np.float32)
    one, two, four, negative = np.moveaxis(bits.reshape(len(octets), -1, 4), 2, 0)
    magnitudes = 2.0 ** (-(one + 2.0 * two + 4.0 * four) / 2)
    rounded = np.round(magnitudes * 256) / 256
    return np.where(negative, -rounded, rounded).astype(np.float32)


def parser_of(form: Format) -> Callable[..., Any]:
    """Return a function that parses messages [B, words]."""

    def parse(messages: tf.Tensor) -> tuple[tf.Tensor, ...]:
        found = packing.unpack(form, messages)
        found = found._replace(values=packing.numbers(form, found))
        nothing = tf.constant(-1, tf.int64)
        used = found.positions != form.size
        positions = tf.where(used, found.positions, nothing)
        return packing.faults(form, messages, found), positions, found.values

    return tf.function(parse)


FORMATS = (
    Format(20, 2000, tf.float32, 8),
    Format(12, 70_000, tf.float16, 16),
    Format(9, 256, tf.bfloat16, 8),
    Format(21, 2048, tf.uint8, 8, 1, (0, 128, 1024)),
    Format(21, 70_000, tf.uint8, 16, 4, (0, 128, 1024, 4096)),
    packing.make_format(0, 2000, "float32"),
)


@pytest.mark.long
class MessageTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*FORMATS)
    @pytest.mark.few(3)
    def test_is_refused_or_wholly_within_the_arena(self, *form: Any) -> None:
        form = Format(*form)
        random, parse = np.random.default_rng(0), parser_of(form)
        valid = [selection(form, random) for _ in range(50)]
        whole = total = 0
        while total < inputs(8000) // len(FORMATS):
            sources = random.integers(len(valid), size=(500, 2))
            messages = np.stack(
                [
                    as_message(
                        form,
                        mutated(random, valid[one].tobytes(), valid[two].tobytes()),
                    )
                    for one, two in sources
                ]
            )
            faults, positions, values = (part.numpy() for part in parse(messages))
            expected = Parsed(form, messages)
            np.testing.assert_array_equal(faults == 0, expected.whole)
            sound = expected.whole
            np.testing.assert_array_equal(positions[sound], expected.positions[sound])
            for found in (values, expected.values):
                found[abs(found) < sparsify.SMALLEST] = 0.0  # as TensorFlow may have it
            np.testing.assert_array_equal(values[sound], expected.values[sound])
            self.assertLess(positions[sound].max(initial=-1), form.size)
            total += len(messages)
            whole += int(sound.sum())
        self.assertBetween(whole / total, 0.005, 0.95)

    @parameterized.parameters(*FORMATS)
    @pytest.mark.few(3)
    def test_one_that_is_damaged_is_refused_for_all_workers(self, *form: Any) -> None:
        form, random = Format(*form), np.random.default_rng(1)
        function = tf.function(lambda messages: receive(form, messages)[1:3])
        valid = [selection(form, random) for _ in range(4)]
        positions, values = function(tf.constant(np.stack(valid)))
        expected = Parsed(form, np.stack(valid))
        self.assertTrue(expected.whole.all())
        for rank in range(4):
            where = expected.positions[rank]
            count = int((where >= 0).sum())
            self.assertAllEqual(positions[rank, :count], where[where >= 0])
            self.assertAllEqual(values[rank, :count], expected.values[rank][where >= 0])
            self.assertAllEqual(
                positions[rank, count:] == form.size, [True] * (form.slots - count)
            )
            self.assertAllEqual(values[rank, count:], [0.0] * (form.slots - count))
        refused = 0
        for trial in range(60):
            rank, octets = trial % 4, valid[(trial + 1) % 4].tobytes()
            damaged = mutated(random, valid[rank].tobytes(), octets)
            messages = [*valid]
            messages[rank] = as_message(form, damaged)
            same = all((m[2:4] == valid[0][2:4]).all() for m in messages)
            message = "not in the same step"
            if not Parsed(form, messages[rank][np.newaxis]).whole[0]:
                message += f"|The message of rank {rank} is damaged: "
                same, refused = False, refused + 1
            with contextlib.ExitStack() as stack:
                if not same:
                    error = tf.errors.InvalidArgumentError
                    stack.enter_context(self.assertRaisesRegex(error, message))
                function(tf.constant(np.stack(messages)))
        self.assertGreater(refused, 10)

    @parameterized.parameters(
        (0, 7, "its header"),
        (1, 1, "its header"),
        (4, 12, "the number of its elements"),
        (-1, -1, "the number of its elements"),
        (18, 0, "their positions"),
        (5, 0x7FC00000, "values that are not finite"),
        (5, 0x7F80, "values that are not finite", "sign"),
        (5, 0x7FC0, "values that are not finite", "log4"),
        (5, 0xBF80, "the scales of its values", "sign"),
        (5, 0xBF80, "the scales of its values", "log4"),
    )
    @pytest.mark.few(4, 10)
    def test_nothing_is_changed_by_one_that_is_damaged(
        self, place: int, word: int, what: str, value_dtype: str = "float32"
    ) -> None:
        def damage(message: np.ndarray) -> None:
            message[0, place] = word

        config = DGCConfig(sparsity=0.9, min_elements=0, value_dtype=value_dtype)

        def work(transport: Loopback) -> Any:
            transport = Tampering(transport, ".message", damage)
            synchronizer = compressing(transport, config)
            variables = [tf.Variable(tf.zeros([8, 16]))]
            gradient = tf.reshape(tf.range(128.0), [8, 16]) + transport.rank
            try:
                exchange(synchronizer, OWNER, [gradient], variables)
            except tf.errors.InvalidArgumentError as error:
                arena = only(synchronizer)
                return str(error), arena, gradient
            return None

        for message, arena, gradient in outcomes(2, work):
            self.assertIn(f"The message of rank 1 is damaged: {what}", message)
            self.assertAllEqual(arena.residual.v, tf.reshape(gradient, [-1]))
            self.assertAllEqual(arena.mode.target.variable, np.zeros(128))
            self.assertEqual(int(arena.residual.step), 0)
            self.assertEqual(arena.tensor_stats()[0].density, 0.0)


extremes = st.sampled_from([0.0, 1.0, 1e-45, 1e-38, 1e30, 3e38])


class SentTest(tf.test.TestCase):
    @settings(
        deadline=None,
        derandomize=True,
        max_examples=25,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=4),
        st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999]),
        st.sampled_from(VALUE_DTYPES),
        st.sampled_from([0.01, 1.0]),
        extremes,
        st.integers(0, 2**31),
    )
    @pytest.mark.long
    def test_what_a_worker_sends_is_never_refused(
        self,
        shapes: list[tuple[int, int]],
        sparsity: float,
        value_dtype: str,
        sample_fraction: float,
        scale: float,
        seed: int,
    ) -> None:
        layout = layout_lib.build([(str(i), s) for i, s in enumerate(shapes)])
        random, config = (
            np.random.default_rng(seed),
            DGCConfig(value_dtype=value_dtype, sample_fraction=sample_fraction),
        )
        tensors = [random.uniform(-1, 1, shape) * scale for shape in shapes]
        residual = layout_lib.flatten(layout, [np.float32(each) for each in tensors])
        form = message_format(layout, sparsity, config, 2)
        step = tf.constant(seed, tf.int64)
        if not form.slots:  # of a dense stage
            message = dgc.header(form, layout, step)
        else:
            message = dgc.send(
                residual,
                sparsify.peaks(residual),
                form=form,
                layout=layout,
                sparsities=[sparsity],
                config=config,
                step=step,
            )
        found = receive(form, tf.stack([message] * 2))
        (_, _, _, _, counts), positions, values, _ = found
        self.assertAllEqual(
            tf.reduce_sum(tf.cast(positions < form.size, tf.int32), 1), counts
        )
        self.assertEqual(positions.shape, [2, form.slots])
        self.assertEqual(values.shape, [2, form.slots])


class TamperingTest(parameterized.TestCase, tf.test.TestCase):
    """What else a worker tells, damaged on its way."""

    def outcomes(self, ending: str, value: Any, work: Callable[..., Any]) -> list[Any]:
        def damage(own: np.ndarray) -> None:
            own[...] = value

        return outcomes(2, lambda inner: work(Tampering(inner, ending, damage)))

    @parameterized.parameters(
        ("agree.digest", -1, "must be of at most 67108864 bytes, or is damaged"),
        ("agree.digest", 2**40, "must be of at most 67108864 bytes, or is damaged"),
        ("agree.record", 0xFF, "is damaged, no JSON: "),
        ("agree.record", ord("7"), "is damaged, no object: "),
    )
    def test_a_record_is_refused(self, ending: str, value: int, text: str) -> None:
        def work(transport: Tampering) -> None:
            handshake.agree(transport, "settings", {"a": transport.rank})

        for error in self.outcomes(ending, value, work):
            self.assertIsInstance(error, ValueError)
            self.assertIn(f"What rank 1 tells of its settings {text}", str(error))

    @parameterized.parameters(
        ("optimizer0.lengths", -1, "A worker's number of rows is damaged"),
        ("optimizer0.lengths", 2**40, "A worker's number of rows is damaged"),
        ("slices0.indices", 9, "IndexedSlices must be of rows that"),
        ("slices0.indices", -1, "IndexedSlices must be of rows that"),
    )
    def test_slices_are_refused(self, ending: str, value: int, text: str) -> None:
        def work(transport: Tampering) -> None:
            slices = tf.IndexedSlices(
                tf.ones([3, 2]), tf.constant([1, 2, 8], tf.int64), tf.constant([9, 2])
            )
            variables = [tf.Variable(tf.zeros([9, 2]))]
            exchange(Ledger(transport, Dense), OWNER, [slices], variables)

        for error in self.outcomes(ending, value, work):
            self.assertIsInstance(error, tf.errors.InvalidArgumentError)
            self.assertIn(text, str(error))


class HeaderOfRoundTest(tf.test.TestCase):
    @pytest.mark.long
    def test_is_refused_or_whole(self) -> None:
        own = averaging.write(averaging.RoundHeader(0, 3, 4, 4, 0, 0, 0.5, 0.1)).numpy()
        random, refused, step = np.random.default_rng(0), 0, tf.Variable(0)
        for _ in range(inputs(300)):
            octets = mutated(random, own.tobytes(), random.bytes(own.nbytes))
            other = np.frombuffer(octets[: own.nbytes].ljust(own.nbytes, b"\0"))
            other = np.where(abs(other) < 1e-300, 0.0, other)  # as TensorFlow has it
            headers = averaging.read(tf.constant(np.stack([own, other])))
            try:
                rounds._refuse(headers, step, ["w", "b"])
            except tf.errors.InvalidArgumentError as error:
                self.assertRegex(
                    str(error),
                    "is damaged|not in the same round|holds NaN or infinity|rate must",
                )
                refused += 1
            else:
                np.testing.assert_array_equal(other[:6], np.round(other[:6]))
                self.assertAllInRange(other[:6], 0, 2.0**53)
                self.assertAllEqual(other[[0, 1, 5]], own[[0, 1, 5]])
        self.assertBetween(refused, 50, 299)


ACCOUNTS = [
    {"variables": ["float32 (3, 2)"], "arrays": {"residual": [128]}, "step": 7},
    {"variables": [], "arrays": {"period": [], "anchor 0": [2, 3]}, "step": 0},
]
MANIFEST = state_files.manifest_of(0x1A2B, 2, ACCOUNTS)


class StateFileTest(tf.test.TestCase):
    @pytest.mark.long
    def test_is_refused_or_has_the_arrays_of_the_manifest(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        random = np.random.default_rng(0)
        shapes = {
            f"{i}.{name}": tuple(shape)
            for i, account in enumerate(ACCOUNTS)
            for name, shape in account["arrays"].items()
        }
        arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
        valid = []
        for write in (np.savez, np.savez_compressed):
            for dtype in (np.float32, np.int64):
                own = {name: array.astype(dtype) for name, array in arrays.items()}
                text = np.frombuffer(json.dumps(MANIFEST).encode(), np.uint8)
                write(folder / "other.npz", manifest=text, **own)
                valid.append((folder / "other.npz").read_bytes())
        file, refused, total = folder / state_files.name_of(1, 0x1A2B), 0, inputs(2000)
        for _ in range(total):
            one, two = random.integers(len(valid), size=2)
            file.write_bytes(mutated(random, valid[one], valid[two]))
            try:
                found = state_files.read(folder, 1, MANIFEST)
            except ValueError as error:
                self.assertStartsWith(str(error), f"{file}: ")
                refused += 1
            else:
                self.assertEqual({n: a.shape for n, a in found.items()}, shapes)
                self.assertTrue(all(a.dtype.kind in "fiu" for a in found.values()))
        self.assertBetween(refused / total, 0.3, 0.99)

    def test_manifest_is_refused_or_whole(self) -> None:
        random, path, refused = np.random.default_rng(0), pathlib.Path("manifest"), 0
        valid = json.dumps(MANIFEST).encode()
        total = inputs(4000)
        for i in range(total):
            text = mutated(random, valid, valid[::-1])
            if i % 2:
                text = json.dumps(with_odd_leaf(random, MANIFEST)).encode()
            try:
                found = state_files.checked_manifest(path, text)
            except ValueError as error:
                self.assertStartsWith(str(error), "manifest: ")
                refused += 1
                continue
            self.assertEqual(list(found), list(MANIFEST))
            self.assertBetween(found["save"], 0, 2**31)
            self.assertBetween(found["world_size"], 1, 2**31)
            for account in found["accounts"]:
                self.assertEqual(list(account), ["variables", "arrays", "step"])
                self.assertTrue(all(type(v) is str for v in account["variables"]))
                for shape in [[account["step"]], *account["arrays"].values()]:
                    self.assertTrue(all(type(n) is int and n >= 0 for n in shape))
        self.assertBetween(refused / total, 0.3, 0.99)


class TextTest(tf.test.TestCase):
    def test_records_of_workers_are_refused_or_objects(self) -> None:
        random, refused, total = np.random.default_rng(0), 0, inputs(2000)
        record = {"sparsity": 0.9, "clip": None, "stages": [0.75, 0.9], "name": "DGC"}
        valid = json.dumps(record).encode()
        for i in range(total):
            text = mutated(random, valid, valid[::-1])
            if i % 2:
                text = json.dumps(with_odd_leaf(random, record)).encode()
            try:
                found = handshake.read_object(text, "It")
                told = handshake._differences([record, found])
            except ValueError as error:
                self.assertStartsWith(str(error), "It is damaged, no ")
                refused += 1
            else:
                self.assertStartsWith(told, "Received: ")
                self.assertTrue(told.isprintable())
        self.assertBetween(refused / total, 0.1, 0.9)

    def test_nothing_goes_too_deep(self) -> None:
        for text in (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 700 + b"]" * 700):
            with self.assertRaisesRegex(ValueError, "It is damaged, no "):
                handshake.read_object(text, "It")
            with self.assertRaisesRegex(ValueError, "manifest: not a manifest"):
                state_files.checked_manifest(pathlib.Path("manifest"), text)
            with self.assertRaises(ValueError):
                rendezvous.read_tf_config(text.decode())

    def test_what_is_kept_back_is_refused_or_whole(self) -> None:
        random, refused, total = np.random.default_rng(0), 0, inputs(2000)
        told = [[["float32 (3, 2)"], 7, {"residual": [128], "velocity": [128]}]]
        for _ in range(total):
            changed = with_odd_leaf(random, [told, [], told])
            try:
                saving.check_told(changed)
            except ValueError as error:
                self.assertIn("of what is kept back is damaged: ", str(error))
                self.assertTrue(str(error).isprintable())
                refused += 1
                continue
            records = [each for part in changed or [] for each in part]
            for variables, step, arrays in records:
                self.assertTrue(all(isinstance(form, str) for form in variables))
                for shape in [[step], *arrays.values()]:
                    self.assertTrue(all(type(n) is int and n >= 0 for n in shape))
        self.assertBetween(refused / total, 0.1, 0.99)

    def test_addresses_are_refused_or_a_host_and_a_port(self) -> None:
        random, refused, total = np.random.default_rng(0), 0, inputs(3000)
        valid = [b"node-7.example_net.org:65535", b"10.0.0.1:2222", b"[fe80::1]:80"]
        for _ in range(total):
            one, two = random.integers(len(valid), size=2)
            text = mutated(random, valid[one], valid[two]).decode("utf-8", "replace")
            try:
                host, port = rendezvous.check_address(text)
            except ValueError as error:
                self.assertStartsWith(str(error), "A worker's address must be ")
                self.assertTrue(str(error).isprintable())
                refused += 1
            else:
                self.assertBetween(port, 1, 65535)
                self.assertRegex(host, r"\A[A-Za-z0-9_.:-]{1,255}\Z")
        self.assertBetween(refused / total, 0.1, 0.95)


if __name__ == "__main__":
    tf.test.main()
