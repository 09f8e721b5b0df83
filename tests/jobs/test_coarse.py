"""Values of a few bits between real workers: the same bits, over every transport."""

import unittest
import zlib
from typing import Any

import pool
import pytest


def config_of(value_dtype: str) -> Any:
    import tf_dgc

    return tf_dgc.DGCConfig(
        sparsity=0.9,
        min_elements=1,
        warmup_steps=4,
        warmup_stages=(0.6,),
        value_dtype=value_dtype,
    )


def sgd() -> Any:
    import keras

    return keras.optimizers.SGD(0.05, momentum=0.9)


def outcome(model: Any, history: Any) -> dict[str, Any]:
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    losses = history.history["loss"]
    return {"crc": zlib.crc32(weights), "fell": losses[-1] < losses[0]}


def by_strategy(transport: str, value_dtype: str) -> dict[str, Any]:
    import features

    import tf_dgc

    strategy = tf_dgc.DGCStrategy(config_of(value_dtype), transport=transport)
    with strategy.scope():
        model = features.mlp()
        model.compile(sgd(), "mse")
    history = model.fit(features.batches(), epochs=4, verbose=0, shuffle=False)
    return outcome(model, history)


def by_averaging(transport: str, value_dtype: str) -> dict[str, Any]:
    import features

    import tf_dgc

    averaging = tf_dgc.AveragingConfig(period=2, compression=config_of(value_dtype))
    strategy = tf_dgc.ParameterAveragingStrategy(averaging, transport=transport)
    with strategy.scope():
        model = features.mlp()
        model.compile(sgd(), "mse")
    history = model.fit(features.batches(), epochs=4, verbose=0, shuffle=False)
    return outcome(model, history)


def by_optimizer(value_dtype: str) -> dict[str, Any]:
    import features
    from front_ends import own_batches

    import tf_dgc.horovod as hvd

    model = features.mlp()
    model.compile(hvd.DistributedOptimizer(sgd(), config_of(value_dtype)), "mse")
    fit = {"verbose": 0, "shuffle": False, "epochs": 4}
    history = model.fit(
        own_batches(), callbacks=[hvd.callbacks.BroadcastVariables()], **fit
    )
    return outcome(model, history)


def types_differ(transport: str) -> None:
    import tf_dgc

    rank = tf_dgc.DenseStrategy(transport=transport).rank
    config = tf_dgc.DGCConfig(value_dtype=("sign", "log4")[rank])
    tf_dgc.DGCStrategy(config, transport=transport)


@pytest.mark.processes
class CoarseValuesTest(unittest.TestCase):
    @pytest.mark.slow
    def test_train_to_the_same_bits_over_every_transport(self) -> None:
        found = []
        for transport in ("collective", "horovod", "hybrid"):
            args = {"transport": transport, "value_dtype": "sign"}
            found += pool.run(transport, 2, "test_coarse", "by_strategy", **args)
        self.assertTrue(found[0]["fell"])
        self.assertEqual(found, [found[0]] * 6)

    @pytest.mark.slow
    def test_in_rounds_of_averaging(self) -> None:
        args = {"transport": "collective", "value_dtype": "log4"}
        first, second = pool.run("collective", 2, "test_coarse", "by_averaging", **args)
        self.assertTrue(first["fell"])
        self.assertEqual(first["crc"], second["crc"])

    @pytest.mark.slow
    def test_in_the_front_end_of_horovod(self) -> None:
        first, second = pool.run(
            "horovod", 2, "test_coarse", "by_optimizer", value_dtype="log4"
        )
        self.assertEqual(first["crc"], second["crc"])

    @pytest.mark.extended
    def test_other_types_are_refused(self) -> None:
        with self.assertRaises(pool.WorkerError) as caught:
            args = {"transport": "collective"}
            pool.run("collective", 2, "test_coarse", "types_differ", **args)
        text = r"`value_dtype` differs: 'sign' on ranks \[0\]; 'log4' on ranks \[1\]"
        self.assertRegex(str(caught.exception), text)
