"""Hosts of two workers each, which are processes of one machine under two names."""

import pathlib
import tempfile
import unittest
import zlib
from typing import Any
from unittest import mock

import numpy as np
import pool
import pytest


def by_strategy(transport: str, hierarchical: bool, by: str, folder: str) -> Any:
    import features
    import keras

    import tf_dgc
    from tf_dgc import transports

    over = transports.resolve(transport)
    config = tf_dgc.DGCConfig(
        sparsity=0.75,
        min_elements=1,
        value_dtype="float32",
        exchange=by,
        hierarchical=hierarchical,
    )
    name = property(lambda own: "ab"[own.rank // 2])
    with mock.patch.object(type(over), "host", name):
        strategy = tf_dgc.DGCStrategy(config, transport=over)
    with strategy.scope():
        layers = [keras.layers.Dense(96, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    options = {"epochs": 3, "verbose": 0, "shuffle": False}
    losses = model.fit(features.batches(), **options).history["loss"]
    stats = strategy.stats()
    found = {
        "losses": losses,
        "bytes": [int(stats.sent_bytes), int(stats.received_bytes)],
        "crc": _crc(model),
        "norm": float(stats.residual_norm),
        "voices": strategy.mesh.voices.size,
    }
    strategy.save_state(folder)
    model.fit(features.batches(), **(options | {"epochs": 1}))
    strategy.restore_state(folder)
    found["restored"] = float(strategy.stats().residual_norm)
    strategy.flush(model)
    return found | {
        "flushed": _crc(model),
        "left": float(strategy.stats().residual_norm),
        "files": sorted(path.name[:10] for path in pathlib.Path(folder).iterdir()),
    }


def _crc(model: Any) -> int:
    return zlib.crc32(b"".join(weight.tobytes() for weight in model.get_weights()))


@pytest.mark.processes
class HostsTest(unittest.TestCase):
    def found(self, transport: str, workers: int, by: str, hosts: bool) -> list[Any]:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        args = {"transport": transport, "hierarchical": hosts, "by": by}
        place = transport, workers, "test_hosts", "by_strategy"
        return pool.run(*place, folder=folder, **args)

    def check(self, transport: str, by: str) -> None:
        found = self.found(transport, 4, by, hosts=True)
        norms = [[each.pop("norm"), each.pop("restored")] for each in found]
        self.assertEqual(norms[0], norms[1])
        for norm, restored in norms:
            self.assertGreater(norm, 0.0)
            self.assertEqual(norm, restored)
        self.assertEqual(found, [found[0]] * 4)
        one = found[0]
        self.assertEqual(one["voices"], 2)
        self.assertLess(one["losses"][-1], one["losses"][0])
        self.assertEqual(one["left"], 0.0)
        ranks = [f"rank-{rank:05d}" for rank in range(4)]
        self.assertEqual(one["files"], ["manifest.j", *ranks])
        # Two workers with the rows of a host each.
        flat = self.found(transport, 2, by, hosts=False)[0]
        np.testing.assert_allclose(one["losses"], flat["losses"], rtol=1e-3)
        # Each of 4 workers tells three numbers more than its rows, of 2 as well.
        for mine, other in zip(one["bytes"], flat["bytes"], strict=True):
            self.assertLess(abs(mine - other), 100)

    @pytest.mark.extended
    def test_hosts_train_as_workers_over_collectives(self) -> None:
        self.check("collective", "owners")

    @pytest.mark.slow
    def test_hosts_train_as_workers_over_horovod(self) -> None:
        self.check("horovod", "allgather")

    @pytest.mark.slow
    def test_hosts_train_as_workers_over_both(self) -> None:
        self.check("hybrid", "owners")


if __name__ == "__main__":
    unittest.main()
