"""Search of KerasTuner on small data, as it is written for one process.

    search.py FOLDER KIND [--fail] [--kill]

Prints the trials as a JSON object. With --fail worker 1 fails in trial 1, after its
`fit`; with --kill a worker of group 1 is killed in the first trial of its group.
"""

import json
import os
import signal
import sys

import keras
import keras_tuner
import launch
import numpy as np

folder, kind, *options = sys.argv[1:]
random = np.random.default_rng(0)
x = random.normal(size=(96, 8)).astype("float32")
y = (x[:, 0] + x[:, 1] > 0).astype("int32")
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
group = json.loads(os.environ.get("TF_DGC_TRIALS", "{}")).get("group")


class Model(keras_tuner.HyperModel):
    """A small network, its width and its learning rate."""

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        units = hp.Int("units", 4, 12, 2)
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(units, activation="relu"),
                keras.layers.Dense(2, activation="softmax"),
            ]
        )
        rate = hp.Float("rate", 1e-3, 1.0, sampling="log")
        loss = "sparse_categorical_crossentropy"
        model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
        return model

    def fit(
        self, hp: keras_tuner.HyperParameters, model: keras.Model, *args, **kwargs
    ) -> keras.callbacks.History:
        marker = os.path.join(folder, "killed")
        last = (group, task) == (1, 1)
        if "--kill" in options and last and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        found = super().fit(hp, model, *args, **kwargs)
        if "--fail" in options and task == 1 and len(tuner.oracle.trials) == 2:
            raise ValueError("worker 1 alone")
        return found


def make(overwrite: bool) -> keras_tuner.Tuner:
    """Return the tuner; its seed is that of the chief."""
    sizes = {"max_epochs": 3} if kind == "Hyperband" else {"max_trials": 3}
    return getattr(keras_tuner, kind)(
        Model(),
        objective="val_loss",
        directory=folder,
        project_name="search",
        overwrite=overwrite,
        **sizes,
    )


tuner = make(overwrite=True)
data = x[:64], y[:64]
held_out = x[64:], y[64:]
tuner.search(*data, validation_data=held_out, epochs=2, batch_size=16, verbose=0)
trials = tuner.oracle.trials
best = tuner.get_best_models()[0].evaluate(*held_out, verbose=0)
again = make(overwrite=False)
reloaded = again.get_best_models()[0].evaluate(*held_out, verbose=0)
launch.say(
    {
        "trials": {
            key: [trial.status, trial.score, trial.hyperparameters.values]
            for key, trial in sorted(trials.items())
        },
        "messages": [trial.message for trial in trials.values() if trial.message],
        "best": best,
        "reloaded": reloaded,
        "trials again": sorted(again.oracle.trials),
    }
)
