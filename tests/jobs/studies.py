"""Studies of Optuna that all workers ask: by `ask` and `tell`, and by `optimize`."""

import json
import os

import keras
import launch
import numpy as np
import optuna

import tf_dgc

optuna.logging.set_verbosity(optuna.logging.WARNING)
strategy = tf_dgc.DenseStrategy()
random = np.random.default_rng(0)
x = random.normal(size=(64, 4)).astype("float32")


def train(rate: float, units: int) -> float:
    """Return the loss of a small network."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model.fit(x, x[:, :units], batch_size=16, verbose=0).history["loss"][-1]


def objective(trial: optuna.Trial) -> float:
    rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
    loss = train(rate, trial.suggest_int("units", 1, 4))
    trial.report(loss, 1)
    if trial.number == 1:
        raise optuna.TrialPruned("enough")
    return loss


with strategy.scope():
    study = tf_dgc.search.create_study()
    asked = []
    for _ in range(2):
        trial = study.ask()
        rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
        study.tell(trial, train(rate, 2))
        asked.append(rate)
    other = tf_dgc.search.create_study()
    seen: list[str] = []
    other.optimize(objective, 3, [lambda study, trial: seen.append(trial.state.name)])
    refused = ""
    try:
        tf_dgc.search.create_study().best_value  # noqa: B018
    except ValueError as error:
        refused = str(error)
launch.say(
    {
        "rank": json.loads(os.environ["TF_CONFIG"])["task"]["index"],
        "asked": asked,
        "best": [study.best_params, study.best_value],
        "states": seen,
        "trials": [[t.number, t.params, t.values] for t in other.trials],
        "refused": refused,
    }
)
