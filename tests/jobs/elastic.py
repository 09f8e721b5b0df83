"""Training whose workers come and go: run by horovodrun with a discovery script.

    horovodrun -np 2 --min-np 1 --max-np 3 --network-interface lo \
        --host-discovery-script FOLDER/hosts.sh python tests/jobs/elastic.py FOLDER die

FOLDER/hosts.sh prints FOLDER/hosts, which the first worker changes. Every worker
appends to FOLDER/log, each time a JSON object on a line. With `arguments`, one worker
prints what it is told about bad ones.
"""

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import features
import keras
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HostsUpdatedInterrupt

import tf_dgc
from tf_dgc import horovod as hvd
from tf_dgc.exchanges import records as saving
from tf_dgc.horovod import core, elastic

CONFIG = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, warmup_steps=3)
HOSTS = {2: "localhost:2", 3: "localhost:2\n127.0.0.1:1"}
SIZES = {"add_remove": (2, 3, 2), "die": (3, 2), "die_early": (3, 2)}
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
sizes = SIZES.get(how, ())


def tell(event: str, **record: Any) -> None:
    record |= {"event": event, "pid": os.getpid(), "size": hvd.size()}
    with (folder / "log").open("a") as log:
        log.write(json.dumps(record) + "\n")


def sums(kept: list[list[saving.Record]]) -> list[float]:
    arrays = [a for records in kept for r in records for a in r.arrays.values()]
    return [float(np.sum(np.abs(array), dtype=np.float64)) for array in arrays]


def own_batches() -> tf.data.Dataset:
    x, y = features.regression()
    part = slice(hvd.rank(), None, hvd.size())
    data = tf.data.Dataset.from_tensor_slices((x[part], y[part]))
    return data.batch(16, drop_remainder=True).repeat(2)


def after_epoch(state: elastic.State, loss: float) -> bool:
    """Change the world where it is time; tell whether training has ended."""
    tell("epoch", loss=loss, epochs=state.epochs)
    state.epochs += 1
    state.since += 1
    # Without a commit the number of the phase is forgotten, too.
    early = how == "die_early"
    last = hvd.size() == sizes[-1] if early else state.phase + 1 == len(sizes)
    if how != "add_remove" and state.since == 2 and not last:
        if how == "die":
            state.commit()
            tell("kept", sums=sums(state._kept))
        if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)  # Horovod loses what it is given while its thread ends
    elif state.since == 2 and not last and hvd.rank() == 0:
        (folder / "hosts").write_text(HOSTS[sizes[state.phase + 1]])
    if how == "add_remove" and state.since >= 2 and not last:
        time.sleep(0.2)  # until the discovery script is run again
    try:
        state.check_host_updates()
    except HostsUpdatedInterrupt:
        tell("kept", sums=sums(state._kept))
        raise
    return last and state.since >= 3


def by_fit(state: elastic.State) -> None:
    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = after_epoch(state, logs["loss"])

    callbacks = [hvd.callbacks.MetricAverage(), Watch()]
    state.model.fit(own_batches(), epochs=100, verbose=0, callbacks=callbacks)


stale: list[Any] = []


def by_tape(state: elastic.State) -> None:
    model, optimizer = state.model, state.optimizer

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape, CONFIG)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    if stale:
        try:
            stale[0](*next(iter(own_batches())))
        except tf.errors.InvalidArgumentError as error:
            tell("stale", error=error.message)
    stale.append(step)
    ended = False
    while not ended:
        loss = np.mean([float(step(x, y)) for x, y in own_batches()])
        (total,) = hvd.transport().all_reduce([tf.constant(loss)], "loss")
        ended = after_epoch(state, float(total) / hvd.size())


def check_arguments() -> None:
    model, sgd = features.mlp(), keras.optimizers.SGD()
    unbuilt = keras.Sequential([keras.layers.Dense(1)])

    def attempt(*arguments: Any, **values: Any) -> None:
        try:
            elastic.State(*arguments, **values)
        except (TypeError, ValueError) as error:
            print(error)

    attempt(model)
    attempt(model, "sgd")
    attempt(unbuilt, sgd)
    attempt(model, sgd, rng=object())
    state = elastic.State(model, sgd, epoch=3)
    state.epoch = 4
    state.save()
    state.epoch = 5
    before = model.get_weights()
    model.set_weights([weight + 1 for weight in before])
    state.restore()
    same = map(np.array_equal, before, model.get_weights())
    print(state.epoch, all(same))
    take_over_from_two()
    hvd.DistributedOptimizer(sgd, hierarchical=True)
    attempt(model, sgd)


def take_over_from_two() -> None:
    """One worker goes on with what two have kept back: here, twice the same."""
    model = features.mlp()
    adam = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), CONFIG)
    variables = model.trainable_variables
    adam.build(variables)
    adam.apply([tf.ones(v.shape) for v in variables], variables)
    state = elastic.State(model, adam)
    state.save()
    (records,) = [own for own in state._kept or [] if own]
    before = records[0].arrays
    twice = [
        r._replace(arrays={k: 2 * a for k, a in r.arrays.items()}) for r in records
    ]
    state._kept = [twice if own else own for own in state._kept or []]
    state._summed = 2
    state.sync()
    (after,) = [own[0].arrays for own in core.records() if own]
    for name in before:
        same = 2 if name.startswith(saving.OWED) else 1
        assert np.array_equal(after[name], same * before[name]), name
    print("taken over", len(before))


def main() -> None:
    hvd.init()
    if how == "arguments":
        check_arguments()
        return
    keras.utils.set_random_seed(1 + hvd.rank())
    model = features.mlp()
    sgd = keras.optimizers.SGD(0.05, momentum=0.0 if how == "die" else 0.9)
    if how != "die":
        sgd = hvd.DistributedOptimizer(sgd, CONFIG)
    model.compile(sgd, "mse")
    state = elastic.State(model, epochs=0, since=0, phase=-1)

    @elastic.run
    def train(state: elastic.State) -> None:
        kept = [saving.summed(hvd.transport(), own) for own in core.records()]
        steps = [record.step for records in kept for record in records]
        tell("begin", sums=sums(kept), steps=steps, epochs=state.epochs)
        state.phase += 1
        state.since = 0
        (by_tape if how == "die" else by_fit)(state)

    train(state)
    tell("end", weights=[np.asarray(w).ravel().tolist() for w in model.get_weights()])


if __name__ == "__main__":
    main()
