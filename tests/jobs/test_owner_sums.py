"""Sums by owners between real workers: the same bits, over every transport."""

import unittest
import zlib
from typing import Any

import pool
import pytest


def by_strategy(transport: str, value_dtype: str) -> dict[str, Any]:
    import features
    import keras

    import tf_dgc

    config = tf_dgc.DGCConfig(
        sparsity=0.75,
        min_elements=1,
        warmup_steps=4,
        warmup_stages=(0.5,),
        value_dtype=value_dtype,
        exchange="owners",
        growth=1.0,
    )
    strategy = tf_dgc.DGCStrategy(config, transport=transport)
    with strategy.scope():
        # So wide that its kernel has blocks of every owner.
        layers = [keras.layers.Dense(96, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    options = {"epochs": 4, "verbose": 0, "shuffle": False}
    losses = model.fit(features.batches(), **options).history["loss"]
    (exchange,) = strategy._ledger.exchanges()
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return {
        "crc": zlib.crc32(weights),
        "fell": losses[-1] < losses[0],
        "sums": [type(each).__name__ for each in exchange.sums],
    }


@pytest.mark.processes
class OwnersTest(unittest.TestCase):
    def check(self, value_dtype: str, *places: tuple[str, int]) -> None:
        found = []
        for transport, workers in places:
            args = {"transport": transport, "value_dtype": value_dtype}
            place = transport, workers
            found += pool.run(*place, "test_owner_sums", "by_strategy", **args)
        self.assertTrue(found[0]["fell"])
        self.assertIn("OwnerSum", found[0]["sums"])
        self.assertEqual(found, [found[0]] * len(found))

    @pytest.mark.extended
    def test_train_to_the_same_bits(self) -> None:
        self.check("float32", ("collective", 2))

    @pytest.mark.slow
    def test_train_to_the_same_bits_over_every_transport(self) -> None:
        self.check("float32", ("collective", 2), ("horovod", 2), ("hybrid", 2))

    @pytest.mark.slow
    def test_three_have_regions_of_two_sizes(self) -> None:
        # Of three, transports add up what is dense in orders of their own.
        self.check("float16", ("collective", 3))
        self.check("float16", ("horovod", 3))
