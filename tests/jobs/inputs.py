"""Data of which workers have unequal shares: run by the workers of `pool.py`."""

import pathlib
import random
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

# Rows of each file; with two workers, the first and the last are one's.
ROWS = (9, 2, 4)
BATCH = 4


def write(folder: pathlib.Path) -> None:
    """Write files of numbers, each of which is there once."""
    for i, count in enumerate(ROWS):
        with tf.io.TFRecordWriter(str(folder / str(i))) as writer:
            for k in range(count):
                writer.write(np.float32([10 * i + k]).tobytes())


def numbers() -> list[float]:
    return [10.0 * i + k for i, count in enumerate(ROWS) for k in range(count)]


def parsed(record: tf.Tensor) -> Any:
    x = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [1])
    return x, 2 * x


def _files(folder: str) -> list[str]:
    return sorted(map(str, pathlib.Path(folder).iterdir()))


def by_file(strategy: Any, folder: str) -> tf.data.Dataset:
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.FILE
    options.experimental_distribute.auto_shard_policy = policy
    dataset = tf.data.TFRecordDataset(_files(folder)).map(parsed).batch(BATCH)
    return dataset.with_options(options)


def by_known_files(strategy: Any, folder: str) -> tf.data.Dataset:
    batches = -(-sum(ROWS) // BATCH)
    known = tf.data.experimental.assert_cardinality(batches)
    return by_file(strategy, folder).apply(known)


def by_worker(strategy: Any, folder: str) -> tf.data.Dataset:
    x = np.float32(numbers()[strategy.rank :: 2])[:, None]
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    dataset = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(BATCH)
    return dataset.with_options(options)


def by_function(strategy: Any, folder: str) -> Any:
    def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(_files(folder)).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        batch = context.get_per_replica_batch_size(BATCH)
        return files.flat_map(tf.data.TFRecordDataset).map(parsed).batch(batch)

    return strategy.distribute_datasets_from_function(own)


class Noting(keras.Model):
    """Notes the inputs of each step, but for rows that stand for none."""

    seen: list[list[float]]

    def train_step(self, data: Any) -> Any:
        strategy = tf.distribute.get_strategy()

        def note(x: np.ndarray, empty: np.bool_) -> np.ndarray:
            self.seen.append([] if empty else x.ravel().tolist())
            return x

        empty = strategy.inner.share.rows.empty
        x = tf.numpy_function(note, [data[0], empty], tf.float32)
        return super().train_step((tf.ensure_shape(x, [None, 1]), data[1]))


def trained(
    transport: str, make: str, folder: str, steps_per_execution: int
) -> dict[str, Any]:
    """Train for two epochs; tell what was seen, and checksums of the weights."""
    strategy = tf_dgc.DenseStrategy(transport=transport)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = keras.Input((1,))
        model = Noting(inputs, keras.layers.Dense(1)(inputs))
        model.seen = []
        sgd = keras.optimizers.SGD(1e-3)
        model.compile(sgd, "mse", steps_per_execution=steps_per_execution)
    makes = {
        "file": by_file,
        "known files": by_known_files,
        "function": by_function,
        "worker": by_worker,
    }
    dataset = makes[make](strategy, folder)
    model.fit(dataset, epochs=2, verbose=0)
    if isinstance(dataset, tf.data.Dataset):
        split = strategy.experimental_distribute_dataset(dataset)
        looped = [x.numpy().ravel().tolist() for x, _ in split]
        predicted = len(model.predict(dataset, verbose=0))
    else:
        looped = [x.numpy().ravel().tolist() for x, _ in dataset]
        predicted = len(numbers())
    weights = b"".join(each.tobytes() for each in model.get_weights())
    return {
        "seen": model.seen,
        "looped": looped,
        "predicted": predicted,
        "crc": zlib.crc32(weights),
    }


class Shuffling(keras.utils.PyDataset):
    """Shuffles its rows after each epoch, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = np.arange(12, dtype=np.float32)[:, None]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = self.rows[4 * index : 4 * index + 4]
        return rows, 2 * rows

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.rows)


def unordered() -> tf.data.Dataset:
    """Return rows that are read side by side, in whatever order."""

    def read(i: tf.Tensor) -> tf.data.Dataset:
        rows = tf.data.Dataset.range(3)
        return rows.map(lambda k: tf.cast([3 * i + k], tf.float32))

    parts = tf.data.Dataset.range(4)
    rows = parts.interleave(read, 4, 1, 4, deterministic=False)
    return rows.map(lambda x: (x, 2 * x), 4, deterministic=False).batch(4)


def drawn_without_seeds(transport: str, kind: str) -> dict[str, Any]:
    """Train on data and weights that are drawn without a seed; tell what was seen."""
    random.seed(), np.random.seed(None)  # each worker its own
    strategy = {
        "dense": tf_dgc.DenseStrategy,
        "dgc": tf_dgc.DGCStrategy,
        "averaging": tf_dgc.ParameterAveragingStrategy,
    }[kind](transport=transport)
    with strategy.scope():
        inputs = keras.Input((1,))
        frozen = keras.layers.Dense(3, trainable=False)
        model = Noting(inputs, keras.layers.Dense(1)(frozen(inputs)))
        model.seen = []
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    # Which nobody can make alike.
    generator = np.random.default_rng()
    frozen.set_weights([generator.normal(size=(1, 3)), np.zeros(3)])
    model.fit(Shuffling(), epochs=3, verbose=0, shuffle=False)
    model.fit(unordered(), epochs=2, verbose=0)
    rows = np.random.randn(12, 1)
    model.fit(rows, 2 * rows, epochs=2, batch_size=4, verbose=0)
    weights = b"".join(each.tobytes() for each in model.get_weights())
    rows = generator.normal(size=(12, 1))
    stopped = ""
    try:
        model.fit(rows, 2 * rows, epochs=2, batch_size=4, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        stopped = error.message
    return {"seen": model.seen, "crc": zlib.crc32(weights), "stopped": stopped}
