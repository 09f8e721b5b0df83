"""Train the digits while workers come and go: elastic Horovod with DGC.

    echo 'echo localhost:2' > hosts.sh; chmod +x hosts.sh
    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh \
        --network-interface lo python examples/horovod_elastic.py

Horovod runs hosts.sh once a second. Let it print `localhost:1` or `localhost:3` while
the workers train (`--epochs 200` gives time for it): one leaves, or another joins them.
`--network-interface` is for workers on one machine.
"""

import sys

import keras
from digits import build, load
from horovod.tensorflow.keras.elastic import (
    CommitStateCallback,
    UpdateEpochStateCallback,
)
from horovod_fit import arguments, config_of, own_part, report

from tf_dgc import horovod as hvd
from tf_dgc.horovod import elastic


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    hvd.init()
    train, _, test = load()
    model = build()
    sgd = keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
    # Workers that join later must find the same settings, whatever their number then.
    config = config_of(args.sparsity, len(train[0]) // (2 * args.batch_size))
    optimizer = hvd.DistributedOptimizer(sgd, config)
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"])
    state = elastic.State(model, epoch=0)

    def adapt_learning_rate() -> None:
        """The global batch has changed with the number of workers."""
        optimizer.learning_rate = 0.05 * hvd.size()
        print(f"worker {hvd.rank()} of {hvd.size()} goes on", flush=True)

    state.register_reset_callbacks([adapt_learning_rate])

    @elastic.run
    def fit(state: elastic.State) -> None:
        """Trains to the end, or until the workers change; then it is called again."""
        callbacks = [
            hvd.callbacks.MetricAverage(),
            UpdateEpochStateCallback(state),
            CommitStateCallback(state, 50),
        ]
        verbose = args.verbose if hvd.rank() == 0 else 0
        data, left = own_part(*train, args.batch_size), args.epochs - state.epoch
        model.fit(data, epochs=left, verbose=verbose, callbacks=callbacks)

    fit(state)
    return 0 if report(model, test, optimizer) else 1


if __name__ == "__main__":
    sys.exit(main())
