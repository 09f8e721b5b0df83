"""Tests of the message."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_dgc.compression import coarse
from tf_dgc.compression import message as packing
from tf_dgc.compression.message import Format

steady = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

DTYPES = (tf.float32, tf.float16, tf.bfloat16)


@st.composite
def formats(draw: st.DrawFn) -> Format:
    size = draw(st.integers(1, 6000))
    slots = draw(st.integers(1, min(size, 600)))
    low_bits, code_bits = (draw(st.sampled_from(each)) for each in ([8, 16], [0, 1, 4]))
    if not code_bits:
        return Format(slots, size, draw(st.sampled_from(DTYPES)), low_bits)
    begins = {0, *draw(st.lists(st.integers(0, size - 1), max_size=5))}
    return Format(slots, size, tf.uint8, low_bits, code_bits, tuple(sorted(begins)))


def selection(form: Format, count: int, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return `count` random positions, ascending, and random values."""
    random = np.random.default_rng(seed)
    positions = tf.constant(np.sort(random.permutation(form.size)[:count]), tf.int64)
    if form.code_bits:
        codes = random.integers(2**form.code_bits, size=count)
        return positions, tf.constant(codes, tf.uint8)
    values = random.normal(size=count) * 10.0 ** random.integers(-8, 5, size=count)
    return positions, tf.cast(tf.constant(values, tf.float32), form.value_dtype)


def scales_of(form: Format) -> tf.Tensor | None:
    """Return other scales for each tensor, where there are."""
    if not form.begins:
        return None
    return tf.cast(tf.range(1, len(form.begins) + 1), tf.bfloat16) / 2


def packed(form: Format, positions: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return packing.pack(
        form,
        positions,
        values,
        tf.constant(0),
        scales_of(form),
        checksum=-7,
        step=tf.constant(3, tf.int64),
    )


def raw(tensor: tf.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def unpacked(form: Format, message: tf.Tensor) -> packing.Contents:
    """Read one message, without its unused slots."""
    header, positions, values, scales = packing.unpack(form, message[tf.newaxis])
    used = positions[0] < form.size
    return packing.Contents(
        packing.Header(*[field[0] for field in header]),
        positions[0][used],
        values[0][used],
        scales[0],
    )


class RoundTripTest(tf.test.TestCase):
    def assert_round_trip(
        self, form: Format, positions: tf.Tensor, values: tf.Tensor
    ) -> None:
        message = packed(form, positions, values)
        self.assertEqual(message.dtype, tf.int32)
        self.assertEqual(message.shape, [form.words])
        header, found_positions, found_values, scales = unpacked(form, message)
        self.assertEqual(found_positions.dtype, tf.int64)
        self.assertEqual(found_values.dtype, form.value_dtype)
        self.assertAllEqual(found_positions, positions)
        self.assertEqual(raw(found_values), raw(values))
        self.assertEqual(int(header.count), int(tf.size(positions)))
        if form.begins:
            self.assertAllEqual(scales, scales_of(form))

    @settings(steady, max_examples=60)
    @given(formats(), st.data())
    @pytest.mark.long
    def test_unpack_inverts_pack(self, form: Format, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, form.slots), label="count")
        seed = data.draw(st.integers(0, 2**31), label="seed")
        self.assert_round_trip(form, *selection(form, count, seed))

    @pytest.mark.long
    def test_of_empty_single_and_full_selections(self) -> None:
        for dtype in DTYPES:
            for low_bits in (8, 16):
                for slots, size in ((1, 1), (1, 256), (40, 3000), (256, 256)):
                    form = Format(slots, size, dtype, low_bits)
                    for count in {0, 1, slots}:
                        with self.subTest(form=form, count=count):
                            self.assert_round_trip(form, *selection(form, count, 5))

    def test_of_the_first_and_the_last_positions(self) -> None:
        for size in (255, 256, 257, 65535, 65536, 65537, 200_000):
            for low_bits in (8, 16):
                form = Format(3, size, tf.float32, low_bits)
                for positions in ([0], [size - 1], [0, 1, size - 1]):
                    with self.subTest(form=form, positions=positions):
                        self.assert_round_trip(
                            form,
                            tf.constant(positions, tf.int64),
                            tf.ones([len(positions)]),
                        )

    def test_of_every_bit_of_a_value(self) -> None:
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38]
        for dtype in DTYPES:
            form = packing.make_format(len(special), 1000, dtype)
            values = tf.cast(tf.constant(special, tf.float32), dtype)
            self.assert_round_trip(form, tf.range(8, dtype=tf.int64) * 100, values)

    @pytest.mark.slow
    def test_one_of_several_formats_is_that_format(self) -> None:
        kinds = [(dtype, 0, ()) for dtype in DTYPES]
        kinds += [(tf.uint8, bits, (0, 256, 1100)) for bits in (1, 4)]
        for low_bits in (8, 16):
            for dtype, code_bits, begins in kinds:
                forms = [
                    Format(slots, 1500, dtype, low_bits, code_bits, begins)
                    for slots in (301, 40, 7)
                ]

                def both(
                    number: tf.Tensor, *chosen: tf.Tensor, forms: Any = forms
                ) -> Any:
                    form = packing.one_of(forms, number)
                    message = packed(form, *chosen)
                    found = packing.unpack(form, message[tf.newaxis])
                    faults = packing.faults(
                        form,
                        message[tf.newaxis],
                        found._replace(values=packing.numbers(form, found)),
                    )
                    return message, found, faults, form.bytes_now

                shared = tf.function(both, reduce_retracing=True)
                for number, form in enumerate(forms):
                    chosen = selection(form, form.slots - 2, 6)
                    got = shared(tf.constant(number), *chosen)
                    message = packed(form, *chosen)
                    with self.subTest(form=form):
                        self.assertAllEqual(got[0], message)
                        self.assertEqual(int(got[3]), form.bytes)
                        self.assertAllEqual(got[2], [0])
                        expected = packing.unpack(form, message[tf.newaxis])
                        for one, other in zip(
                            tf.nest.flatten(got[1]),
                            tf.nest.flatten(expected),
                            strict=True,
                        ):
                            self.assertEqual(raw(one), raw(other))

    @pytest.mark.long
    def test_in_a_graph_of_unknown_lengths(self) -> None:
        form = packing.make_format(20, 2000, "float16")

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None], tf.float16),
            ]
        )
        def there_and_back(positions: tf.Tensor, values: tf.Tensor) -> tuple:
            return unpacked(form, packed(form, positions, values))[1:3]

        for count in (0, 1, 13, 20):
            positions, values = selection(form, count, count)
            found_positions, found_values = there_and_back(positions, values)
            self.assertAllEqual(found_positions, positions)
            self.assertEqual(raw(found_values), raw(values))


class DecodedTest(tf.test.TestCase):
    def test_powers_of_two_are_exact(self) -> None:
        exponents = np.arange(-126, 127)
        found = packing.power_of_two(tf.constant(exponents, tf.int32))
        self.assertAllEqual(found, np.ldexp(np.float32(1), exponents))

    def test_an_exponent_is_taken_back_exactly(self) -> None:
        values = np.array([1.0, -1.5, 2.0**-14, 2.0**15], np.float16)
        for exponent in (-110, -7, 0, 5, 110):
            found = packing.decoded(tf.constant(values), tf.constant(exponent))
            expected = np.ldexp(values.astype(np.float32), -exponent)
            self.assertAllEqual(found, expected)

    def test_only_float16_has_one(self) -> None:
        for dtype in ("float32", "bfloat16"):
            values = tf.constant([1.0, -3.0], dtype)
            found = packing.decoded(values, tf.constant(0))
            self.assertEqual(found.dtype, tf.float32)
            self.assertAllEqual(found, [1.0, -3.0])


class MessageTest(tf.test.TestCase):
    def test_header_holds_what_was_given(self) -> None:
        form = packing.make_format(4, 1000, "float32")
        message = packing.pack(
            form,
            tf.constant([5, 9], tf.int64),
            tf.constant([1.0, 2.0]),
            tf.constant(-9),
            checksum=-123456,
            step=tf.constant(2**31 + 17, tf.int64),
        )
        header = unpacked(form, message)[0]
        self.assertEqual([int(word) for word in header], message[:5].numpy().tolist())
        self.assertEqual(int(header.format), packing.FORMAT)
        self.assertEqual(int(header.exponent), -9)
        self.assertEqual(int(header.checksum), -123456)
        self.assertEqual(int(header.step), 17)
        self.assertEqual(int(header.count), 2)

    def test_without_slots_is_a_mere_header(self) -> None:
        for dtype in DTYPES:
            form = packing.make_format(0, 1000, dtype)
            self.assertEqual(form.bytes, 4 * packing.HEADER_WORDS)
            positions, values = tf.zeros([0], tf.int64), tf.zeros([0], dtype)
            message = packed(form, positions, values)
            self.assertEqual(message.shape, [packing.HEADER_WORDS])
            header, found_positions, found_values, _ = unpacked(form, message)
            self.assertEqual(int(header.count), 0)
            self.assertAllEqual(found_positions, positions)
            self.assertEqual(found_values.dtype, dtype)
            self.assertEqual(found_values.shape, [0])

    def test_is_laid_out_as_documented(self) -> None:
        # Positions 3, 258, 700 are 3, 2 and 188 above 0, 1 and 2 times 256.
        form = Format(5, 1024, tf.float16, 8)
        message = packed(
            form,
            tf.constant([3, 258, 700], tf.int64),
            tf.constant([1.0, -2.0, 0.5], tf.float16),
        )
        body = message.numpy()[packing.HEADER_WORDS :].tobytes()
        values = np.array([1.0, -2.0, 0.5, 0, 0], np.float16).tobytes()
        low = bytes([3, 2, 188, 0, 0])
        high = bytes([1 << 0 | 1 << 2 | 1 << 4, 0])
        self.assertEqual(body, values + low + high + bytes(3))

    def test_codes_are_laid_out_as_documented(self) -> None:
        positions = tf.constant([3, 258, 700], tf.int64)
        for bits, codes, octets in (
            (1, [1, 0, 1], [0b101]),
            (4, [0xE, 1, 7], [0x1E, 0x07, 0]),
        ):
            form = Format(5, 1024, tf.uint8, 8, bits, (0, 256))
            message = packed(form, positions, tf.constant(codes, tf.uint8))
            body = message.numpy()[packing.HEADER_WORDS :].tobytes()
            scales = np.array([0x3F00, 0x3F80], "<u2").tobytes()  # 0.5 and 1
            low, high = [3, 2, 188, 0, 0], [1 << 0 | 1 << 2 | 1 << 4, 0]
            expected = scales + bytes([*octets, *low, *high])
            self.assertEqual(body, expected.ljust(-(-len(expected) // 4) * 4, b"\0"))

    def test_each_code_has_its_own_tensors_scale(self) -> None:
        # The third tensor has nothing in this message.
        form = Format(8, 1024, tf.uint8, 8, 4, (0, 256, 384, 512))
        positions = tf.constant([0, 255, 256, 383, 512, 1023], tf.int64)
        codes = tf.constant([0, 8, 0, 2, 14, 7], tf.uint8)
        found = packing.unpack(form, packed(form, positions, codes)[tf.newaxis])
        values = packing.numbers(form, found)[0]
        least = np.round(256 * 2**-3.5) / 256
        expected = [0.5, -0.5, 1.0, 0.5, -0.25, 2 * least, 0.0, 0.0]
        self.assertAllEqual(values, expected)

    def test_one_large_value_does_not_make_the_scale_of_all(self) -> None:
        values = tf.constant([100.0] + [1.0] * 63)  # 8 means are 20.375
        tensors = tf.zeros([64], tf.int64)
        for used in (None, tf.ones([64], tf.bool)):
            _, scales = coarse.encode(4, values, tensors, 1, used)
            self.assertAllEqual(tf.cast(scales, tf.float32), [20.375])

    @settings(steady, max_examples=30)
    @given(formats(), st.data())
    def test_unused_slots_and_padding_are_zero(
        self, form: Format, data: st.DataObject
    ) -> None:
        count = data.draw(st.integers(0, form.slots), label="count")
        positions, values = selection(form, count, 1)
        body = packed(form, positions, values).numpy()[packing.HEADER_WORDS :].tobytes()
        scale_bytes, value_bytes, low_bytes, _ = form.body_bytes
        body = body[scale_bytes:]
        bits, low_width = (
            form.code_bits or 8 * form.value_dtype.size,
            form.low_bits // 8,
        )
        written = np.frombuffer(body[:value_bytes], np.uint8)
        unused = np.unpackbits(written, bitorder="little")[count * bits :]
        self.assertFalse(unused.any())
        low = body[value_bytes : value_bytes + low_bytes]
        self.assertEqual(low[count * low_width :].strip(b"\0"), b"")
        high = np.frombuffer(body[value_bytes + low_bytes :], np.uint8)
        self.assertEqual(int(np.unpackbits(high).sum()), count)
        padding = np.unpackbits(high, bitorder="little")[form.high_bytes * 8 :]
        self.assertEqual(int(padding.sum()), 0)

    @settings(steady, max_examples=50)
    @given(formats())
    def test_bytes_are_exact(self, form: Format) -> None:
        high_bits = form.slots + form.size // 2**form.low_bits
        bits = form.code_bits or 8 * form.value_dtype.size
        least = (
            2 * len(form.begins)
            + -(-form.slots * bits // 8)
            + form.slots * form.low_bits // 8
            + (high_bits + 7) // 8
        )
        self.assertEqual(sum(form.body_bytes), (least + 3) // 4 * 4)
        self.assertEqual(form.bytes, 20 + sum(form.body_bytes))
        self.assertEqual(form.bytes, 4 * form.words)
        self.assertEqual(
            packed(form, *selection(form, 0, 0)).numpy().nbytes, form.bytes
        )


class MakeFormatTest(tf.test.TestCase):
    @steady
    @given(st.integers(1, 10**8), st.floats(1e-6, 1), st.sampled_from(DTYPES))
    def test_takes_the_shorter_encoding(
        self, size: int, density: float, dtype: tf.DType
    ) -> None:
        slots = max(1, int(size * density))
        form = packing.make_format(slots, size, dtype)
        self.assertEqual(
            (form.slots, form.size, form.value_dtype), (slots, size, dtype)
        )
        others = [Format(slots, size, dtype, bits).bytes for bits in (8, 16)]
        self.assertEqual(form.bytes, min(others))

    def test_either_encoding_is_the_shorter_somewhere(self) -> None:
        self.assertEqual(packing.make_format(25_000, 25_000_000, "float32").low_bits, 8)
        self.assertEqual(packing.make_format(100, 25_000_000, "float32").low_bits, 16)

    def test_takes_the_name_of_a_type(self) -> None:
        form = packing.make_format(1, 2, "bfloat16")
        self.assertEqual(form.value_dtype, tf.bfloat16)

    def test_a_position_costs_less_than_two_bytes_at_a_thousandth(self) -> None:
        for size in (128_000, 1_000_000, 25_600_000, 500_000_000):
            slots = size // 1000
            form = packing.make_format(slots, size, "float32")
            position_bytes = form.bytes - 4 * packing.HEADER_WORDS - 4 * slots
            self.assertLess(position_bytes / slots, 2.0, size)

    def test_a_position_costs_little_more_than_one_byte_at_a_quarter(self) -> None:
        form = packing.make_format(250_000, 1_000_000, "float32")
        self.assertLess((form.body_bytes[2] + form.body_bytes[3]) / 250_000, 1.15)


if __name__ == "__main__":
    tf.test.main()
