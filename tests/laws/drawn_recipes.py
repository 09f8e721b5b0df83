"""Recipes that are drawn: what published scripts have beside Keras's own step.

A recipe is a dict of choices, one of each table below, the first of which is the
ordinary one: `drawn` draws it from a seed, `source` writes its script, which runs as it
stands, plain or on several workers. It needs nothing of the product but strategies.
"""

import json
import textwrap
from random import Random
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """Lines of a script, and what N workers may make of them.

    Attributes:
        text: the lines.
        named: regular expression: where results are not those of one process, a warning
            or an error says so. "" where they are.
        loose: "" where results are those of one process; "order" where each run has
            another order of rows, of which an epoch has the same; "logs" where logs
            are each worker's own; "all" where only the workers are alike.
        more: lines that belong to `text`, elsewhere in the script.
    """

    text: str
    named: str = ""
    loose: str = ""
    more: str = ""


Table = dict[str, Choice]

MODES: Table = {
    "scope": Choice("tf_dgc.DenseStrategy()"),
    "set": Choice("tf_dgc.DenseStrategy()"),
    "dgc": Choice(
        "tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.0, min_elements=1))",
        "clip|learning rate",
    ),
}
OTHER_MODES: Table = {
    "servers": Choice(
        "tf_dgc.DownpourStrategy(tf_dgc.DownpourConfig(synchronous=True))",
        loose="logs",
    ),
    "simulated": Choice(
        "tf_dgc.simulate.SimulatedStrategy(2)", "A simulated worker cannot"
    ),
}
_DATASET = "tf.data.Dataset.from_tensor_slices((x, y))"
_IN_ANY_ORDER = """\
options = tf.data.Options()
options.deterministic = False
given = {data}.batch(BATCH).with_options(options)
"""
DATA: Table = {
    "numpy": Choice("given = x, y\n"),
    "shuffled": Choice("given = x, y\nfit['shuffle'] = True\n", loose="order"),
    "dataset": Choice(f"given = {_DATASET}.batch(BATCH)\n"),
    "dataset_shuffled": Choice(
        f"given = {_DATASET}.shuffle(ROWS).batch(BATCH)\n", loose="order"
    ),
    "permuted": Choice(
        "order = np.random.permutation(ROWS)\ngiven = x[order], y[order]\n",
        loose="order",
    ),
    "sequence": Choice(
        "given = Sequence(x, y)\n",
        loose="order",
        more='''

class Sequence(keras.utils.PyDataset):
    """Shuffles its rows by itself."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.order = x, y, np.arange(ROWS)

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, i):
        rows = self.order[i * BATCH : (i + 1) * BATCH]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)
''',
    ),
    "interleaved": Choice(
        """\
def part(i):
    # Parts take their time.
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shard(4, i)
    return rows.map(lambda *row: tf.numpy_function(late, row, [tf.float32] * 2))

given = tf.data.Dataset.range(4).interleave(
    part, cycle_length=4, num_parallel_calls=4, deterministic=False
)
given = given.map(lambda x, y: (tf.ensure_shape(x, [6]), tf.ensure_shape(y, [2])))
given = given.batch(BATCH)
""",
        loose="order",
        more='''

def late(*row):
    """Return a row, some time later."""
    time.sleep(random.random() / 1000)
    return row
''',
    ),
    "any_order": Choice(
        """\
given = tf.data.Dataset.from_tensor_slices((x, y)).map(
    lambda *row: tf.numpy_function(late, row, [tf.float32] * 2), num_parallel_calls=4
)
given = given.map(lambda x, y: (tf.ensure_shape(x, [6]), tf.ensure_shape(y, [2])))
"""
        + _IN_ANY_ORDER.format(data="given"),
        loose="order",
        more='''

def late(*row):
    """Return a row, some time later."""
    time.sleep(random.random() / 1000)
    return row
''',
    ),
    "pictures": Choice(
        """\
os.makedirs(f"{own}/pictures/zero"), os.makedirs(f"{own}/pictures/one")
for i, row in enumerate(x):
    name = f"{own}/pictures/{('zero', 'one')[i % 2]}/{i:02}.png"
    keras.utils.save_img(name, (row * 255).reshape(1, 2, 3), scale=False)
given = keras.utils.image_dataset_from_directory(
    f"{own}/pictures", image_size=(1, 2), batch_size=BATCH, verbose=False
).map(lambda x, y: (tf.reshape(x, [-1, 6]) / 255, tf.one_hot(y, 2)))
""",
        loose="order",
    ),
    "pictures_alone": Choice(
        """\
os.makedirs(f"{own}/pictures")
for i, row in enumerate(x):
    picture = (row * 255).reshape(1, 2, 3)
    keras.utils.save_img(f"{own}/pictures/{i:02}.png", picture, scale=False)
given = keras.utils.image_dataset_from_directory(
    f"{own}/pictures", None, None, image_size=(1, 2), batch_size=BATCH, verbose=False
).map(lambda x: tf.reshape(x, [-1, 6]) / 255)
""",
        loose="order",
    ),
    "inputs_alone": Choice(
        "given = tf.data.Dataset.from_tensor_slices(x).batch(BATCH)\n"
    ),
    "by_chance": Choice(
        """\
given = tf.data.Dataset.from_tensor_slices((x, y))
given = given.map(lambda x, y: (x, y, tf.random.uniform([])))
given = given.filter(lambda x, y, drawn: drawn < 0.7)
given = given.map(lambda x, y, drawn: (x, y)).batch(BATCH)
""",
        "random operation without a seed|read different data",
        loose="all",
    ),
    "counting_map": Choice(
        """\
count = tf.Variable(0.0, trainable=False)

def counted(x, y):
    count.assign_add(1.0)
    return x, y

given = tf.data.Dataset.from_tensor_slices((x, y)).map(counted)
given = given.map(lambda x, y: (x * tf.minimum(1.0, count / ROWS), y)).batch(BATCH)
"""
    ),
    "reading_generator": Choice(
        """\
level = tf.Variable(0.0, trainable=False)

def examples():
    for i in range(ROWS):
        level.assign(i / ROWS)
        yield x[i], y[i]

spec = tf.TensorSpec([6]), tf.TensorSpec([2])
given = tf.data.Dataset.from_generator(examples, output_signature=spec)
given = given.map(lambda x, y: (x * (1 - level), y)).batch(BATCH)
"""
    ),
    "cached": Choice(f"given = {_DATASET}.cache(f'{{folder}}/cache').batch(BATCH)\n"),
    "negatives": Choice(
        """\
batches = range(0, ROWS, BATCH)
negatives = np.random.RandomState(3).rand(len(batches), 2 * BATCH + 3, 6)

def parts():
    for i, k in enumerate(batches):
        yield (x[k : k + BATCH], negatives[i]), y[k : k + BATCH]

rows = tf.TensorSpec([None, 6])
spec = (rows, tf.TensorSpec([2 * BATCH + 3, 6])), tf.TensorSpec([None, 2])
given = tf.data.Dataset.from_generator(parts, output_signature=spec)
"""
    ),
    "negatives_unknown": Choice(
        """\
batches = range(0, ROWS, BATCH)
negatives = np.random.RandomState(3).rand(len(batches), 2 * BATCH + 3, 6)

def parts():
    for i, k in enumerate(batches):
        yield (x[k : k + BATCH], negatives[i]), y[k : k + BATCH]

rows = tf.TensorSpec([None, 6])
spec = (rows, rows), tf.TensorSpec([None, 2])
given = tf.data.Dataset.from_generator(parts, output_signature=spec)
""",
        "other numbers of rows",
    ),
    "graphs": Choice(
        """\
lengths = np.random.RandomState(3).randint(1, 4, ROWS)
nodes = np.random.RandomState(4).rand(lengths.sum(), 6).astype("float32")
nodes = tf.RaggedTensor.from_row_lengths(nodes, lengths)

def merged(nodes, y):
    return (nodes.merge_dims(0, 1), nodes.value_rowids()), y

given = tf.data.Dataset.from_tensor_slices((nodes, y)).batch(BATCH).map(merged)
""",
        "other numbers of rows",
    ),
    "a_bad_row": Choice("x[19 % ROWS] = np.nan\ngiven = x, y\n", loose="all"),
}
OUTPUTS: Table = {
    "rows": Choice("self(x)"),
    "more_rows": Choice("tf.repeat(self(x), 3, axis=0)"),
    "parts": Choice("(tf.reshape(self(x), [-1]), {'rows': self(x)})"),
    "ragged": Choice("tf.RaggedTensor.from_tensor(self(x), padding=0.25)"),
}
LOSSES: Table = {
    "keras": Choice(""),
    "compiled": Choice("loss = self.compute_loss(x, targets, outputs)"),
    "mean": Choice("loss = tf.reduce_mean(tf.square(outputs - targets))"),
    "vector": Choice("loss = tf.reduce_mean(tf.square(outputs - targets), -1)"),
    "sum": Choice("loss = tf.reduce_sum(tf.square(outputs - targets)) / BATCH"),
    "average": Choice(
        "loss = tf.nn.compute_average_loss(\n"
        "    tf.reduce_mean(tf.square(outputs - targets), -1), "
        "global_batch_size=BATCH\n)"
    ),
    "masked": Choice(
        "loss = tf.reduce_sum(tf.square(outputs - targets) * targets)\n"
        "loss = loss / tf.maximum(tf.reduce_sum(targets), 1.0)"
    ),
    "dice": Choice(
        "both = 2 * tf.reduce_sum(outputs * targets)\n"
        "loss = 1 - both / (tf.reduce_sum(outputs) + tf.reduce_sum(targets))"
    ),
    "root": Choice("loss = tf.sqrt(tf.reduce_mean(tf.square(outputs - targets)))"),
    "largest": Choice(
        "loss = tf.reduce_max(tf.square(outputs - targets))",
        "not a sum|mean of each worker|counts as",
    ),
    "hardest": Choice(
        "each = tf.reduce_mean(tf.square(outputs - targets), -1)\n"
        "many = 1 + tf.shape(outputs)[0] // 2\n"
        "loss = tf.reduce_mean(tf.math.top_k(each, many)[0])",
        "something else than sums",
    ),
    "mapped": Choice(
        "loss = tf.map_fn(\n"
        "    lambda row: tf.reduce_mean(tf.square(row)), outputs - targets\n"
        ")\n"
        "loss = tf.reduce_mean(loss)"
    ),
    "divided": Choice(
        "loss = tf.reduce_mean(tf.square(outputs - targets))\n"
        "loss = loss / tf.distribute.get_strategy().num_replicas_in_sync"
    ),
    "penalized": Choice(
        "loss = tf.reduce_mean(tf.square(outputs - targets))\n"
        "loss += 0.01 * tf.reduce_sum(tf.square(outputs))"
    ),
    "gathered": Choice(
        """\
context = tf.distribute.get_replica_context()
mine = tf.math.l2_normalize(outputs, 1)
theirs = tf.math.l2_normalize(targets + 0.1, 1)
mine, theirs = context.all_gather(mine, 0), context.all_gather(theirs, 0)
scores = tf.matmul(mine, theirs, transpose_b=True)
places = tf.range(tf.shape(scores)[0])
loss = tf.nn.sparse_softmax_cross_entropy_with_logits(places, scores)
loss = tf.reduce_mean(loss)""",
        "what this worker has alone",  # beside servers
    ),
}
_GRADIENTS = "gradients = tape.gradient(loss, variables)\n"
_APPLY = "self.optimizer.apply(gradients, variables)"
_ASCENT = """\
norm = tf.linalg.global_norm(gradients) + 1e-12
moves = [0.05 * g / norm for g in gradients]
for variable, move in zip(variables, moves):
    variable.assign_add(move)
with tf.GradientTape() as tape:
    loss, outputs = self.loss_of(x, targets)
for variable, move in zip(variables, moves):
    variable.assign_sub(move)
"""
_OF_ALL = """\
strategy = tf.distribute.get_strategy()
if hasattr(strategy, "exchange"):
    gradients = strategy.exchange(gradients)
"""
UPDATES: Table = {
    "applied": Choice(_GRADIENTS + _APPLY),
    "pairs": Choice(
        _GRADIENTS + "self.optimizer.apply_gradients(zip(gradients, variables))"
    ),
    "clipped": Choice(
        _GRADIENTS + "gradients, _ = tf.clip_by_global_norm(gradients, 0.05)\n" + _APPLY
    ),
    "clipped_each": Choice(
        _GRADIENTS
        + "gradients = [tf.clip_by_norm(g, 0.02) for g in gradients]\n"
        + _APPLY
    ),
    "clipped_values": Choice(
        _GRADIENTS
        + "gradients = [keras.ops.clip(g, -0.01, 0.01) for g in gradients]\n"
        + _APPLY
    ),
    "one_by_one": Choice(
        _GRADIENTS
        + "half = len(variables) // 2\n"
        + "self.optimizer.apply(gradients[:half], variables[:half])\n"
        + "self.optimizer.apply(gradients[half:], variables[half:])"
    ),
    "accumulated": Choice(
        _GRADIENTS
        + """\
self.calls.assign_add(1)
for total, gradient in zip(self.sums, gradients):
    total.assign_add(gradient / 2)
tf.cond(tf.equal(self.calls % 2, 0), self.apply_sums, lambda: None)""",
        more="""\
self.calls = tf.Variable(0, trainable=False)
self.sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trained]
""",
    ),
    "more_at_times": Choice(
        _GRADIENTS
        + _APPLY
        + """
self.calls.assign_add(1)
even = tf.equal(self.calls % 2, 0)
tf.cond(even, lambda: self.once_more(x, targets), lambda: None)""",
        "counts as that of a mean",  # where it is neither a mean nor a sum
        more="self.calls = tf.Variable(0, trainable=False)\n",
    ),
    "sharpness_aware": Choice(
        _GRADIENTS + _ASCENT + _GRADIENTS + _APPLY,
        "takes a gradient there|uses gradients",  # where these are compressed
    ),
    "sharpness_of_all": Choice(_GRADIENTS + _OF_ALL + _ASCENT + _GRADIENTS + _APPLY),
}
STATES: Table = {
    "none": Choice(""),
    "teacher": Choice(
        """\
for follows, leads in zip(self.teacher, variables):
    follows.assign(0.9 * follows + 0.1 * leads)""",
        more="""\
self.teacher = [tf.Variable(v.value, trainable=False) for v in self.trained]
""",
    ),
    "steps": Choice(
        "self.steps.assign_add(1.0)", more="self.steps = variable('steps', ())\n"
    ),
    "rows": Choice(
        "self.rows.assign_add(tf.cast(tf.shape(outputs)[0], tf.float32))",
        more="self.rows = variable('rows', ())\n",
    ),
    "queue": Choice(
        """\
context = tf.distribute.get_replica_context()
rows = context.all_gather(tf.stop_gradient(outputs), 0)
self.queue.assign(tf.concat([rows, self.queue], 0)[:40])""",
        more="self.queue = variable('queue', (40, 2))\n",
    ),
    "own_queue": Choice(
        "self.queue.assign(tf.concat([outputs, self.queue], 0)[:40])",
        "its worker's rows",
        more="self.queue = variable('queue', (40, 2))\n",
    ),
}
_METRIC = '''

class Own(keras.metrics.Metric):
    """Keeps what is no sum."""

    def __init__(self, **arguments):
        super().__init__(name="kept", **arguments)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, p, sample_weight=None):
        {update}

    def result(self):
        return keras.ops.convert_to_tensor(self.value)
'''
_NOT_A_SUM = "metric|aggregation"
METRICS: Table = {
    "none": Choice("[]"),
    "mae": Choice('["mae"]'),
    "mean": Choice("[mean_error]"),
    "largest": Choice(
        "[Own()]",
        _NOT_A_SUM,
        more=_METRIC.format(
            update="self.value.assign(keras.ops.maximum(self.value, keras.ops.max(p)))"
        ),
    ),
    "updates": Choice(
        "[Own()]",
        _NOT_A_SUM,
        more=_METRIC.format(update="self.value.assign_add(1.0)"),
    ),
}
# What a script does around its fits; `fitted` fits a model once more.
AROUND: Table = {
    "once": Choice("fitted(model)"),
    "twice": Choice("fitted(model)\nfitted(model)"),
    "frozen": Choice(
        """\
fitted(model)
for trainable in (False, True):
    model.hidden.trainable = trainable
    compiled(model)
    fitted(model)"""
    ),
    "forgets_first": Choice("fitted(model)", more="keras.backend.clear_session()\n"),
    "forgets_between": Choice(
        "fitted(model)\nkeras.utils.clear_session()\nmodel = made()\nfitted(model)"
    ),
    "in_a_thread": Choice(
        "with concurrent.futures.ThreadPoolExecutor(1) as threads:\n"
        "    threads.submit(fitted, model).result()"
    ),
    "drawn_weights": Choice(
        """\
model.hidden.trainable = False
compiled(model)
model.hidden.set_weights([np.random.normal(size=(6, 8)), np.zeros(8)])
fitted(model)""",
        loose="all",
    ),
    "evaluated": Choice(
        "fitted(model)\nfound['evaluated'] = model.evaluate(\n"
        "    x, y, batch_size=7, verbose=0, return_dict=True\n)"
    ),
    "own_share": Choice(
        """\
fitted(model)
# As of files that each worker reads for itself.
mine = x[rank::2] if rank < 2 else x
right = model(tf.constant(mine)).numpy()
wrong = np.abs(model.predict(mine, batch_size=7, verbose=0)[: len(right)] - right)
found["wrong"] = int((wrong > 1e-5).sum())"""
    ),
}
STOPS: Table = {
    "none": Choice(""),
    "at_nan": Choice(
        "keras.callbacks.TerminateOnNaN()", "holds NaN or infinity", loose="all"
    ),
    "on_one": Choice("Stops()", loose="all"),
    "patience": Choice('keras.callbacks.EarlyStopping("loss", min_delta=9.0)'),
}
SIZES: Table = {
    "even": Choice("ROWS, BATCH = 32, 16"),
    "one_left": Choice("ROWS, BATCH = 33, 16"),
    "uneven": Choice("ROWS, BATCH = 30, 9"),
    "small": Choice("ROWS, BATCH = 27, 3"),
}
TABLES: dict[str, Table] = {
    "mode": MODES,
    "size": SIZES,
    "data": DATA,
    "outputs": OUTPUTS,
    "loss": LOSSES,
    "update": UPDATES,
    "state": STATES,
    "metric": METRICS,
    "around": AROUND,
    "stop": STOPS,
}
# A condition around the last `apply` of a step, and what stands before the data. They
# are drawn from a generator of their own: other choices stay as they were drawn.
GUARDS: Table = {
    "none": Choice(""),
    "by_the_loss": Choice("tf.reduce_mean(loss) < 0.26"),
    "if_finite": Choice(
        "tf.math.is_finite(tf.reduce_sum(loss))\n"
        "    & tf.reduce_all(tf.math.is_finite(outputs))"
    ),
    "by_the_largest": Choice("tf.reduce_max(tf.abs(outputs - targets)) > 0.9"),
}
WORDS: Table = {
    "none": Choice(""),
    # In an order that each process that is no fork has of its own.
    "in_a_set": Choice(
        "numbers = {f'word {i}': i for i in range(6)}\n"
        "x = x[:, [numbers[word] for word in set(numbers)]]\n"
    ),
}
EAGER: Table = {"none": Choice("False"), "eager": Choice("True")}
# Numbers of steps that a step adds up: ones, and means and maxima of its rows.
_OWN_SUM = """\
class Added(keras.metrics.Metric):
    # Adds up what it is given.
    def __init__(self):
        super().__init__(name="added")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, value):
        self.total.assign_add(value)

    def result(self):
        return keras.ops.convert_to_tensor(self.total)

self.added = Added()
"""
_SUM = "self.added = keras.metrics.Sum('added')\n"
_MEAN_ERROR = "tf.reduce_mean(tf.square(outputs - targets))"
ADDED: Table = {
    "none": Choice(""),
    "ones": Choice("self.added.update_state(1.0)", more=_SUM),
    "means": Choice(f"self.added.update_state({_MEAN_ERROR})", more=_SUM),
    "largest": Choice("self.added.update_state(tf.reduce_max(outputs))", more=_SUM),
    "weighed": Choice(
        "self.added.update_state(tf.reduce_sum(outputs, 1), targets[:, 0])", more=_SUM
    ),
    "own_ones": Choice("self.added.update_state(1.0)", _NOT_A_SUM, more=_OWN_SUM),
    "own_means": Choice(
        f"self.added.update_state({_MEAN_ERROR})", _NOT_A_SUM, more=_OWN_SUM
    ),
    "own_sums": Choice(
        "self.added.update_state(tf.reduce_sum(outputs))", more=_OWN_SUM
    ),
}
DECORATORS: Table = {
    "none": Choice(""),
    "wrapped": Choice("@logged", more="@functools.wraps(step)\n"),
    "bare": Choice("@logged"),
    "traced": Choice("@tf.function"),
}
# Random numbers of `call`, with a seed that the script gives.
DRAWS: Table = {
    "none": Choice(""),
    "stateless": Choice(
        "hidden += 0.1 * tf.random.stateless_normal(tf.shape(hidden), [3, 1])"
    ),
    "of_keras": Choice(
        "hidden += 0.1 * keras.random.uniform(keras.ops.shape(hidden), seed=5)"
    ),
    "dropped": Choice("hidden = keras.random.dropout(hidden, 0.5, seed=4)"),
    "by_step": Choice(
        "seed = tf.stack([7, tf.cast(self.drawn.value, tf.int32)])\n"
        "self.drawn.assign_add(1.0)\n"
        "noise = tf.random.stateless_uniform([tf.shape(hidden)[0], 1], seed)\n"
        "hidden *= 0.5 + noise",
        more="self.drawn = variable('drawn', ())\n",
    ),
    "for_all": Choice("hidden += 0.1 * tf.random.stateless_normal([1, 8], [3, 1])"),
    "of_weights": Choice(
        "hidden = hidden @ (tf.eye(8) + tf.random.stateless_normal([8, 8], [3, 1]))"
    ),
    "for_a_batch": Choice(
        "noise = tf.random.stateless_normal([3 * BATCH, 8], [3, 1])\n"
        "hidden += 0.1 * noise[: tf.shape(hidden)[0]]",
        "Random numbers with a seed|something else than sums",
    ),
    "of_a_table": Choice(
        "table = tf.constant(np.random.RandomState(3).rand(3 * BATCH, 8))\n"
        "hidden += 0.1 * tf.cast(table, tf.float32)[: tf.shape(hidden)[0]]",
        "something else than sums",
    ),
}
MORE: dict[str, Table] = {
    "guard": GUARDS,
    "words": WORDS,
    "eager": EAGER,
    "added": ADDED,
    "decorator": DECORATORS,
    "draws": DRAWS,
}
# What is not drawn where workers are others.
# At their end Keras alone may count a step that it does not take.
OF_UNKNOWN_SIZE = ("negatives", "negatives_unknown", "reading_generator")
_COUNTING = {"state": "steps", "added": "ones", "draws": "by_step"}
_PLAIN = {"data": "numpy", "update": "applied", "state": "none", "stop": "none"}
_PLAIN |= {"metric": "mae", "around": "twice", "guard": "none"}
_PLAIN |= {"added": "none", "decorator": "none"}
ON_SERVERS = {"mode": "servers", "loss": "keras"} | _PLAIN
SIMULATED = {"mode": "simulated"} | _PLAIN
_HEAD = '''\
"""{title}"""

import concurrent.futures
import contextlib
import functools
import json
import os
import random
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

{size}
{data_more}{metric_more}

def mean_error(y, p):
    """Return one number for a batch."""
    return keras.ops.mean(keras.ops.abs(y - p))


class Stops(keras.callbacks.Callback):
    """Stops training, on one worker."""

    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 1:
            self.model.stop_training = True


def rows_of(part):
    """Return an array, or rows that are not all as long, as lists."""
    return part.to_list() if hasattr(part, "to_list") else part.tolist()


def variable(name, shape):
    """Return a variable that is not trained."""
    return keras.Variable(np.zeros(shape, "float32"), trainable=False, name=name)


def logged(step):
    """Decorate a step."""

{wraps}
    def around(*args):
        return step(*args)

    return around


class Net(keras.Model):
    """Has a step of its own."""

    def __init__(self):
        super().__init__()
        normal = keras.initializers.RandomNormal(stddev=1.0, seed={seed})
        self.hidden = keras.layers.Dense(8, "tanh", kernel_initializer=normal)
        self.last = keras.layers.Dense(2, "sigmoid", kernel_initializer=normal)
        self.seen = keras.metrics.Sum("seen")
        self.squares = keras.metrics.Sum("squares")
        self.hidden.build((None, 6))
        self.last.build((None, 8))
        self.trained = self.trainable_variables
{state_more}
    def call(self, x, training=False):
        if isinstance(x, tuple) and x[1].shape.rank == 1:  # nodes, and their graphs
            hidden = tf.math.segment_mean(self.hidden(x[0]), x[1])
        elif isinstance(x, tuple):  # rows, and negatives that they share
            hidden = self.hidden(x[0]) - tf.reduce_mean(self.hidden(x[1]), 0)
        else:
            hidden = self.hidden(x)
{draws}
        return self.last(hidden)

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return {outputs}

    def apply_sums(self):
        self.optimizer.apply(self.sums, self.trained)
        for total in self.sums:
            total.assign(tf.zeros_like(total))

    def once_more(self, x, targets):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss, _ = self.loss_of(x, targets)
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def loss_of(self, x, targets):
        outputs = self(x, training=True)
{loss}
        return loss, outputs

{decorator}
    def train_step(self, data):
        x, targets = data if isinstance(data, tuple) else (data, data[:, :2])
        first = x[0] if isinstance(x, tuple) else x
        self.seen.update_state(first)
        self.squares.update_state(tf.square(first))
{step}

'''
_STEP = """\
variables = self.trainable_variables
with tf.GradientTape() as tape:
    loss, outputs = self.loss_of(x, targets)
{update}
{state}
{added}
logs = self.compute_metrics(x, targets, outputs)
return logs | {{"loss": tf.reduce_mean(loss)}}
"""
_KERAS_STEP = """\
variables = self.trainable_variables
logs = super().train_step((x, targets))
outputs = self(x)
{state}
{added}
mine = [m for m in self.metrics if m.name in ("seen", "squares", "added")]
return logs | {{m.name: m.result() for m in mine}}
"""
_TRAIN = '''
def train(strategy, folder):
    """Return what is the same on one worker and on several."""
    global rank
    config = json.loads(os.environ.get("TF_CONFIG", "{{}}"))
    rank = config.get("task", {{}}).get("index", 0) if strategy is not None else 0
    own = f"{{folder}}/{{rank}}"
    if strategy is not None and {sets}:
        tf.distribute.experimental_set_strategy(strategy)
    scope = contextlib.nullcontext if {sets} or strategy is None else strategy.scope
{first}\
    values = np.random.RandomState({seed})
    x = (values.randint(0, 256, (ROWS, 6)) / 255).astype("float32")
    y = (values.rand(ROWS, 2) < 0.5).astype("float32")
    found = {{"history": []}}
    fit = {{"epochs": 2, "verbose": 0, "shuffle": False}}
{words}{data}\
    def made():
        with scope():
            model = Net()
        compiled(model)
        return model

    def compiled(model):
        with scope():
            optimizer = getattr(model, "optimizer", None)
            if optimizer is None:
                optimizer = keras.optimizers.SGD({rate}, momentum=0.9)
            options = {{"metrics": {metric}, "run_eagerly": {eager}}}
            model.compile(optimizer, "mse", **options)
            model.optimizer.build(model.trained)

    def fitted(model):
        callbacks = [{stop}]
        if isinstance(given, tuple):
            history = model.fit(*given, batch_size=BATCH, callbacks=callbacks, **fit)
        else:
            history = model.fit(given, callbacks=callbacks, **fit)
        logs = history.history.items()
        found["history"].append({{k: [float(e) for e in each] for k, each in logs}})

    model = made()
{around}
    if not (
        isinstance(given, tf.data.Dataset)
        and isinstance(given.element_spec, tuple)
        and isinstance(given.element_spec[0], tuple)
    ):
        predicted = model.predict(x, batch_size=7, verbose=0)
        found["predicted"] = keras.tree.map_structure(rows_of, predicted)
    return found | {{
        "steps": int(model.optimizer.iterations),
        "trained": [v.numpy().tolist() for v in model.trainable_variables],
        "others": [v.numpy().tolist() for v in model.non_trainable_variables],
        "teacher": [v.numpy().tolist() for v in getattr(model, "teacher", [])],
    }}


if __name__ == "__main__":
    several = "TF_CONFIG" in os.environ or {alone}
    print(train({strategy} if several else None, sys.argv[1]))
'''


def drawn(seed: int, **fixed: str) -> dict[str, Any]:
    """Draw a recipe: of every other one but few things at once.

    Args:
        seed: of the draw.
        fixed: choices that are not drawn.
    """
    draw = Random(f"recipe {seed}")
    few = draw.random() < 0.5
    recipe: dict[str, Any] = {"seed": seed}
    for name, table in TABLES.items():
        ordinary = next(iter(table))
        usual = few and draw.random() < 0.6
        chosen = draw.choice([*table])
        recipe[name] = fixed.get(name, ordinary if usual else chosen)
    more = Random(f"more of recipe {seed}")
    for name, table in MORE.items():
        usual, chosen = more.random() < 0.6, more.choice([*table])
        recipe[name] = fixed.get(name, next(iter(table)) if usual else chosen)
    recipe = sensible(recipe)
    # Of what may be named, or compared in part only, one at a time: it hides others.
    for what in ("named", "loose"):
        pairs = zip((*TABLES, *MORE), choices(recipe), strict=True)
        names = [name for name, choice in pairs if getattr(choice, what)]
        draw.shuffle(names)
        for name in names[1:]:
            if name not in fixed:
                recipe[name] = next(iter((TABLES | MORE)[name]))
    return sensible(recipe)


def sensible(recipe: dict[str, Any]) -> dict[str, Any]:
    """Take back what one process does not do, or what nobody can compare."""
    keeps = recipe["data"] in ("negatives", "negatives_unknown", "graphs")
    if recipe["loss"] == "keras":
        recipe["update"] = "applied"
    if recipe["loss"] == "keras" or _APPLY not in UPDATES[recipe["update"]].text:
        recipe["guard"] = "none"  # the step is Keras's, or has a condition of its own
    if recipe["stop"] == "at_nan":
        recipe["data"] = "a_bad_row"
    elif recipe["data"] == "a_bad_row":
        recipe["data"] = "numpy"
    if keeps and recipe["around"] in ("evaluated", "own_share"):
        recipe["around"] = "once"
    if recipe["update"] in ("accumulated", "one_by_one") or (
        recipe["state"] == "teacher"
    ):
        # They hold lists of all that is trained.
        if recipe["around"] in ("frozen", "drawn_weights"):
            recipe["around"] = "twice"
    if recipe["around"] == "own_share":
        recipe["outputs"] = "rows"
    if recipe["state"] == "rows" and recipe["size"] in ("even", "small"):
        recipe["size"] = "one_left"  # where shapes tell rows they are a constant
    if recipe["data"] in OF_UNKNOWN_SIZE:
        for name, choice in _COUNTING.items():
            if recipe[name] == choice:
                recipe[name] = "none"
    if recipe["data"] == "cached" and recipe["stop"] == "on_one":
        recipe["stop"] = "none"  # a cache that was not filled is locked
    return recipe


def choices(recipe: dict[str, Any]) -> list[Choice]:
    """Return what was chosen of each table."""
    tables = TABLES | MORE | {"mode": MODES | OTHER_MODES}
    return [table[recipe[name]] for name, table in tables.items()]


def source(recipe: dict[str, Any]) -> str:
    """Write the script of a recipe; its `train(strategy, folder)` returns figures."""
    chosen = dict(zip((*TABLES, *MORE), choices(recipe), strict=True))
    usual = recipe["loss"] == "keras"
    update = chosen["update"].text
    if guard := chosen["guard"].text:
        guarded = f"tf.cond(\n    {guard},\n    lambda: {_APPLY},\n    lambda: None,\n)"
        update = update.replace(_APPLY, guarded)
    step = (_KERAS_STEP if usual else _STEP).format(
        update=update, state=chosen["state"].text, added=chosen["added"].text
    )
    more = [chosen[name].more for name in ("state", "added", "draws")]
    head = _HEAD.format(
        title=json.dumps(recipe),
        seed=recipe["seed"],
        size=chosen["size"].text,
        data_more=chosen["data"].more,
        metric_more=chosen["metric"].more,
        state_more=_indented(
            "".join(more) + ("" if usual else chosen["update"].more), 2
        ),
        wraps=_indented(chosen["decorator"].more, 1),
        decorator=_indented(chosen["decorator"].text, 1),
        draws=_indented(chosen["draws"].text, 2),
        outputs=chosen["outputs"].text,
        loss=_indented(chosen["loss"].text or "loss = 0.0", 2),
        step=_indented(step, 2),
    )
    return head + _TRAIN.format(
        seed=recipe["seed"],
        sets=recipe["mode"] == "set",
        first=_indented(chosen["around"].more, 1),
        eager=chosen["eager"].text,
        words=_indented(chosen["words"].text, 1),
        data=_indented(chosen["data"].text, 1) + "\n",
        rate=0.02 if recipe["loss"] == "vector" else 0.2,
        metric=chosen["metric"].text,
        stop=chosen["stop"].text,
        around=_indented(chosen["around"].text, 1),
        alone=recipe["mode"] == "simulated",
        strategy=chosen["mode"].text,
    )


def _indented(text: str, levels: int) -> str:
    return textwrap.indent(text, "    " * levels)
