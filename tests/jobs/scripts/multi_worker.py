"""TensorFlow's strategy of many workers: who saves where, and checkpoints."""

import os

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_dgc

strategy = tf_dgc.DenseStrategy()
keras.utils.set_random_seed(6)
data = load_digits()
images, labels = data.data[:480].astype("float32") / 16, data.target[:480]
GLOBAL_BATCH = 48

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def _is_chief(task_type, task_id):
    return task_type is None or task_type == "chief" or (
        task_type == "worker" and task_id == 0
    )  # fmt: skip


def _get_temp_dir(dirpath, task_id):
    temp_dir = os.path.join(dirpath, f"workertemp_{task_id}")
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    """Let workers other than the chief write to a place of their own."""
    dirpath, base = os.path.dirname(filepath), os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.shuffle(480, seed=7).repeat().batch(GLOBAL_BATCH)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
)
history = model.fit(
    dataset.with_options(options), epochs=3, steps_per_epoch=10, verbose=0
)

task_type = strategy.cluster_resolver.task_type
task_id = strategy.cluster_resolver.task_id
os.makedirs("models", exist_ok=True)
path = write_filepath(os.path.join("models", "digits.keras"), task_type, task_id)
model.save(path)
loaded = keras.models.load_model(path)
same = all(map(np.array_equal, loaded.get_weights(), model.get_weights()))
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(path))

checkpoint = tf.train.Checkpoint(model=model)
place = write_filepath(os.path.join("checkpoints", "x"), task_type, task_id)
manager = tf.train.CheckpointManager(checkpoint, os.path.dirname(place), max_to_keep=1)
manager.save()
kept = model.get_weights()
model.set_weights([w * 0 for w in kept])
checkpoint.restore(manager.latest_checkpoint)
restored = all(map(np.array_equal, kept, model.get_weights()))
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(place))
figures = {
    "history": history.history,
    "same": same,
    "restored": restored,
    "weights": [w.tolist() for w in model.get_weights()],
}
