"""Training steps that use their gradients before an optimizer applies them."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

ROWS, BATCH, FEATURES = 41, 10, 5  # in the last batch one worker has no row


class Model(keras.Model):
    """One dense layer, trained by a step that is given."""

    def __init__(self, step: Callable[["Model", Any, Any], Any]) -> None:
        super().__init__()
        self.dense, self._step = keras.layers.Dense(1), step
        shapes = (FEATURES, 1), (1,)
        self.sums = [tf.Variable(tf.zeros(s), trainable=False) for s in shapes]
        self.count = tf.Variable(0, trainable=False)
        self.multiplier = self.add_weight(
            name="multiplier", trainable=False, initializer="ones"
        )
        self.moving = tf.Variable(1.0, trainable=False)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def gradients(self, x: Any, y: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        logs: dict[str, Any] = self._step(self, *data)
        return logs

    def apply(self, gradients: Any) -> None:
        self.optimizer.apply(gradients, self.trainable_variables)


def norm_of(gradients: Any) -> Any:
    return tf.sqrt(tf.add_n([tf.reduce_sum(g * g) for g in gradients]))


def signs(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    model.apply([tf.sign(g) for g in gradients])
    return {"loss": loss}


def adaptively_clipped(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    clipped = []
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        most = 0.1 * tf.maximum(tf.norm(variable), 1e-3)
        norm = tf.norm(gradient)
        small = gradient * (most / tf.maximum(norm, 1e-6))
        clipped.append(tf.where(norm < most, gradient, small))
    model.apply(clipped)
    return {"loss": loss}


def sharpness_aware(model: Model, x: Any, y: Any) -> dict[str, Any]:
    _, gradients = model.gradients(x, y)
    moves = [0.05 * g / (norm_of(gradients) + 1e-12) for g in gradients]
    for variable, move in zip(model.trainable_variables, moves, strict=True):
        variable.assign_add(move)
    loss, gradients = model.gradients(x, y)
    for variable, move in zip(model.trainable_variables, moves, strict=True):
        variable.assign_sub(move)
    model.apply(gradients)
    return {"loss": loss}


def without_an_optimizer(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.01 * gradient)
    return {"loss": loss}


def against_one_another(model: Model, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape(persistent=True) as tape:
        found = model(x)
        losses = tf.reduce_mean(tf.square(found - y)), tf.reduce_mean(tf.abs(found - 1))
    first, second = (tape.gradient(each, model.trainable_variables) for each in losses)
    product = tf.add_n(
        [tf.reduce_sum(a * b) for a, b in zip(first, second, strict=True)]
    )
    part = tf.minimum(product, 0.0) / tf.square(norm_of(second))
    model.apply([a - part * b + b for a, b in zip(first, second, strict=True)])
    return {"loss": losses[0]}


def clipped_and_then_not(model: Model, x: Any, y: Any) -> dict[str, Any]:
    _, gradients = model.gradients(x, y)
    model.apply(tf.clip_by_global_norm(gradients, 1.0)[0])
    loss, gradients = model.gradients(x, y)
    model.apply(gradients)
    return {"loss": loss}


def of_a_norm(model: Model, x: Any, y: Any) -> dict[str, Any]:
    _, gradients = model.gradients(x, y)
    loss, gradients = model.gradients(x + 0.001 * norm_of(gradients), y)
    model.apply(gradients)
    return {"loss": loss}


def norm_in_logs(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    model.apply(gradients)
    return {"loss": loss, "norm": norm_of(gradients)}


def against_inputs(model: Model, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_mean(tf.square(model(x) - y))
    loss, gradients = model.gradients(x + 0.5 * tape.gradient(loss, x), y)
    model.apply(gradients)
    return {"loss": loss}


def accumulated(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    for total, gradient in zip(model.sums, gradients, strict=True):
        total.assign_add(gradient)
    model.count.assign_add(1)

    def apply() -> None:
        model.apply([total / 3 for total in model.sums])
        for total in model.sums:
            total.assign(tf.zeros_like(total))

    tf.cond(model.count % 3 == 0, apply, lambda: None)
    return {"loss": loss}


def scaled_and_added(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    model.apply([0.5 * g + g / 4 - tf.reduce_mean(g) for g in gradients])
    return {"loss": loss}


def skipped_by_a_loss(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    wanted = tf.cast(loss < 30.0, tf.float32)
    model.apply([wanted * g for g in gradients])
    return {"loss": loss}


def guarded_by_a_loss(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)

    def skip() -> None:
        model.count.assign_add(1)

    sound = (loss > 12.0) & tf.math.is_finite(loss)
    tf.cond(sound, lambda: model.apply(gradients), skip)
    return {"loss": loss, "skipped": tf.cast(model.count, tf.float32)}


def by_the_largest_error(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    errors = tf.abs(model(x) - y)
    tf.cond(
        tf.reduce_max(errors) > 6.0,
        lambda: model.apply(gradients),
        lambda: model.apply([0.1 * g for g in gradients]),
    )
    return {"loss": loss, "most": tf.reduce_max(errors), "least": tf.reduce_min(errors)}


def guarded_in_python(model: Model, x: Any, y: Any) -> dict[str, Any]:
    """Eagerly by Python, else by AutoGraph."""
    loss, gradients = model.gradients(x, y)
    if loss > 12.0 and tf.math.is_finite(loss):
        model.apply(gradients)
    else:
        model.count.assign_add(1)
    return {"loss": loss, "skipped": tf.cast(model.count, tf.float32)}


def by_a_number(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    if float(loss) > 12.0:
        model.apply(gradients)
    return {"loss": loss}


def constrained(model: Model, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        found = model(x)
        excess = tf.reduce_mean(found) - 0.5
        loss = tf.reduce_mean(tf.square(found - y))
        total = (loss + model.multiplier * excess) / model.moving
    model.apply(tape.gradient(total, model.trainable_variables))
    model.multiplier.assign(tf.maximum(0.0, model.multiplier + 0.3 * excess))
    model.moving.assign_sub(0.1 * (model.moving - loss))
    model.count.assign_add(tf.shape(x)[0])
    return {
        "loss": loss,
        "multiplier": tf.identity(model.multiplier),
        "moving": tf.identity(model.moving),
        "rows": tf.cast(model.count, tf.float32),
    }


def with_curvature(model: Model, x: Any, y: Any) -> dict[str, Any]:
    """Divides by the Hessian's diagonal, found by a product with a vector."""
    with tf.GradientTape() as outer:
        loss, gradients = model.gradients(x, y)
    signs = [tf.ones_like(g) for g in gradients]
    variables = model.trainable_variables
    products = outer.gradient(gradients, variables, output_gradients=signs)
    steps = zip(gradients, products, strict=True)
    model.apply([g / (1.0 + 0.1 * tf.abs(p)) for g, p in steps])
    return {"loss": loss}


def by_an_order(model: Model, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    middle = tf.sort(tf.reshape(model(x), [-1]))[0]
    tf.cond(middle > 0, lambda: model.apply(gradients), lambda: None)
    return {"loss": loss}


def through_a_step(model: Model, x: Any, y: Any) -> dict[str, Any]:
    with tf.GradientTape() as outer:
        _, (kernel, bias) = model.gradients(x, y)
        kernel = model.dense.kernel - 0.05 * kernel
        found = tf.matmul(x, kernel) + model.dense.bias - 0.05 * bias
        loss = tf.reduce_mean(tf.square(found - y))
    model.apply(outer.gradient(loss, model.trainable_variables))
    return {"loss": loss}


STEPS = {
    step.__name__: step
    for step in (
        signs,
        adaptively_clipped,
        sharpness_aware,
        without_an_optimizer,
        against_one_another,
        clipped_and_then_not,
        of_a_norm,
        norm_in_logs,
        against_inputs,
        accumulated,
        scaled_and_added,
        guarded_by_a_loss,
        by_the_largest_error,
        constrained,
        with_curvature,
    )
}
EAGER = {guarded_in_python.__name__: guarded_in_python}
REFUSED = {step.__name__: step for step in (by_an_order, by_a_number)}
TOLD = {step.__name__: step for step in (skipped_by_a_loss, through_a_step)}


def trained(name: str, eager: bool = False, strategy: str = "dense") -> Any:
    """Train by a step; return weights, and logs of the epochs."""
    made = {
        "": tf.distribute.get_strategy,
        "dense": tf_dgc.DenseStrategy,
        "dgc": lambda: tf_dgc.DGCStrategy(tf_dgc.DGCConfig(min_elements=1)),
    }[strategy]()
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, FEATURES)).astype("float32")
    y = x @ np.arange(float(FEATURES), dtype="float32")[:, np.newaxis]
    keras.utils.set_random_seed(5)
    with made.scope():
        model = Model((STEPS | EAGER | TOLD | REFUSED)[name])
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(optimizer, run_eagerly=eager)
        history = model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0).history
    logs = {key: [float(v) for v in history[key]] for key in history}
    return [np.asarray(w).tolist() for w in model.get_weights()], logs
