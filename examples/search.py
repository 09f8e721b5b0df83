"""Search a learning rate for handwritten digits, with KerasTuner.

    python examples/search.py
    tf-dgc-run -n 2 --strategy dgc examples/search.py
    tf-dgc-run -n 4 --trials 2 --strategy dgc examples/search.py

The script is written for one process. The second command trains each trial on two
workers, the third two trials at a time, each on two workers. At the end it prints the
accuracy on images not trained on, with Keras's own learning rate and with the best one
that was found.
"""

import argparse
import tempfile

import keras
import keras_tuner
import numpy as np
from digits import Split, load  # images of 8x8 pixels, which come with scikit-learn

DEFAULT_RATE = 0.01  # of keras.optimizers.SGD


def build(hp: keras_tuner.HyperParameters) -> keras.Model:
    """Returns a network of three layers; its rate and its width are searched."""
    keras.utils.set_random_seed(1)
    rate = hp.Float("rate", 1e-3, 1.0, sampling="log", default=DEFAULT_RATE)
    width = hp.Choice("width", [32, 64, 128], default=64)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    sgd = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(sgd, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def accuracy_without_search(train: Split, test: Split, epochs: int) -> float:
    """Returns the accuracy that Keras's own learning rate reaches."""
    model = build(keras_tuner.HyperParameters())
    model.fit(*train, batch_size=64, epochs=epochs, verbose=0)
    return model.evaluate(*test, verbose=0)[1]


def main() -> None:
    """Searches, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=4, help="of each trial")
    parser.add_argument("--folder", help="of the search, which goes on if it is there")
    args = parser.parse_args()
    train, validation, test = load()
    before = accuracy_without_search(train, test, args.epochs)
    tuner = keras_tuner.RandomSearch(
        build,
        objective="val_accuracy",
        max_trials=args.trials,
        seed=1,
        directory=args.folder or tempfile.mkdtemp(),
        project_name="digits",
    )
    settings = {"batch_size": 64, "epochs": args.epochs, "verbose": 0}
    tuner.search(*train, validation_data=validation, **settings)
    (best,) = tuner.get_best_hyperparameters()
    (model,) = tuner.get_best_models()
    after = model.evaluate(*test, verbose=0)[1]
    trials = tuner.oracle.trials.values()
    rates = [trial.hyperparameters.get("rate") for trial in trials]
    print(f"trials             {len(rates)}, rates {np.round(sorted(rates), 4)}")
    print(f"best               rate {best.get('rate'):.4f}, width {best.get('width')}")
    print(f"accuracy before    {before:.2%} at a rate of {DEFAULT_RATE}")
    print(f"accuracy           {after:.2%} of {len(test[0])} images")


if __name__ == "__main__":
    main()
