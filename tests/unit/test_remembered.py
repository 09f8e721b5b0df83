"""What callbacks remember goes through a file, and is data there."""

import json
import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc import _host
from tf_dgc.strategies import remembered


def network() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])


class RememberedTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.path = pathlib.Path(folder) / "rest.npz"

    def write(self, callbacks: list[Any], model: keras.Model) -> None:
        np.savez(
            self.path, allow_pickle=False, **remembered.arrays_of(callbacks, model)
        )

    def test_each_callback_gets_back_what_its_like_remembered(self) -> None:
        def make() -> list[Any]:
            made = [
                keras.callbacks.EarlyStopping(restore_best_weights=True),
                keras.callbacks.ReduceLROnPlateau(),
                keras.callbacks.History(),
                keras.callbacks.ReduceLROnPlateau("loss"),
                keras.callbacks.ModelCheckpoint("a.keras", save_freq=3),
            ]
            made[0].on_train_begin()  # by which the oldest Keras makes its fields
            return made

        model, before, after = network(), make(), make()
        before[0].best_weights = model.get_weights()
        before[0].best, before[0].wait = np.float32(0.1), 2
        before[1].best, before[3].best = 0.3, float("inf")
        before[4]._last_batch_seen = 5
        self.write(before, model)
        found = remembered.read(self.path, model)
        remembered.restore(self.path, found, after[:2] + after[3:], model)
        for one, two in zip(before, after, strict=True):
            for field in _host.keras.remembered_by(one):
                self.assertEqual(getattr(one, field), getattr(two, field), field)
        for array, other in zip(
            before[0].best_weights, after[0].best_weights, strict=True
        ):
            self.assertAllEqual(array, other)

    def test_only_what_a_callback_remembers_is_set(self) -> None:
        model, callback = network(), keras.callbacks.ReduceLROnPlateau(patience=3)
        fields = {"best": 1.0, "patience": 99, "on_epoch_end": 1}
        entry = {"class": "ReduceLROnPlateau", "fields": fields, "best_weights": True}
        told = remembered.Remembered([entry], [])
        remembered.restore(self.path, told, [callback], model)
        self.assertEqual((callback.best, callback.patience), (1.0, 3))
        self.assertTrue(callable(callback.on_epoch_end))

    def test_optimizers_are_built_for_the_variables_they_were_built_for(self) -> None:
        one, two = network(), network()
        for model in (one, two):
            model.compile(keras.optimizers.SGD(momentum=0.9))
            model.others = {"bias": keras.optimizers.Adam()}
        one.others["bias"].build([one.weights[1]])
        self.write([], one)
        remembered.build_optimizers(remembered.read(self.path, two), two)
        self.assertFalse(two.optimizer.built)
        (built,) = _host.keras.variables_of(two.others["bias"])
        self.assertIs(built, two.weights[1])

    @parameterized.parameters(
        ("[", "no JSON"),
        ("[]", "no object"),
        ("{}", "damaged, or of another model: .*callbacks"),
        ('{"callbacks": 3, "optimizers": []}', "not iterable"),
        ('{"callbacks": [3], "optimizers": []}', "subscriptable"),
        ('{"callbacks": [], "optimizers": [[9]]}', "indices are .9."),
        ('{"callbacks": [], "optimizers": [["0"]]}', "indices are"),
        ('{"callbacks": [], "optimizers": [], "kinds": 3}', "not iterable"),
        ('{"callbacks": [], "optimizers": [], "kinds": [3]}', "logs of epochs"),
        (
            '{"callbacks": [{"class": "A", "best_weights": false, "fields": '
            '{"best": []}}], "optimizers": []}',
            "an entry is",
        ),
        (
            '{"callbacks": [{"class": "A", "best_weights": 1, "fields": {}}], '
            '"optimizers": []}',
            "an entry is",
        ),
    )
    def test_what_is_damaged_is_refused_by_name(self, text: str, message: str) -> None:
        octets = np.frombuffer(text.encode(), np.uint8)
        np.savez(self.path, allow_pickle=False, remembered=octets)
        with self.assertRaisesRegex(ValueError, f"rest.npz: field 'rem.*{message}"):
            remembered.read(self.path, network())

    def test_best_weights_of_another_form_are_refused(self) -> None:
        model, callback = network(), keras.callbacks.EarlyStopping()
        callback.best_weights = [np.zeros([2, 2]), np.zeros([3])]
        self.write([callback], model)
        found = remembered.read(self.path, model)
        with self.assertRaisesRegex(ValueError, r"best.0.0. must be .*\(2, 3\)"):
            remembered.restore(self.path, found, [callback], model)

    def test_another_optimizer_is_refused_though_it_has_as_many_slots(self) -> None:
        before, after = network(), network()
        before.compile("rmsprop")
        after.compile("adagrad")
        self.write([], before)
        self.assertEqual(remembered.read(self.path, before).kinds, ["RMSprop"])
        message = r"of another optimizer: \['RMSprop'\] in it, and \['Adagrad'\] here"
        with self.assertRaisesRegex(ValueError, message):
            remembered.read(self.path, after)

    def test_the_text_is_json(self) -> None:
        self.write([], network())
        with np.load(self.path) as arrays:
            told = json.loads(arrays[remembered.TEXT].tobytes())
        nothing = {"callbacks": [], "optimizers": [], "epochs": [], "logs": {}}
        rest = {"steps": None, "stopped": False, "sizes": [], "kinds": []}
        self.assertEqual(told, nothing | rest)


class OptimizerTest(tf.test.TestCase):
    def test_optimizers_are_found_wherever_a_model_has_them(self) -> None:
        sgd = [keras.optimizers.SGD(name=f"sgd{i}") for i in range(6)]
        scaled = keras.optimizers.LossScaleOptimizer(sgd[0])
        inner, model = network(), network()
        model.compile(scaled)
        model.attribute = sgd[1]
        model.listed = [{"deep": (sgd[2],)}, sgd[1]]
        inner.compile(sgd[3])
        model.inner = inner
        if hasattr(keras.optimizers, "MultiOptimizer"):
            of_two = keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(sgd[4])
            )
            model.several = of_two
            expected = [scaled, of_two, *sgd[:5]]
        else:
            expected = [scaled, *sgd[:4]]
        found = _host.keras.optimizers_of(model)
        self.assertCountEqual(map(id, found), map(id, expected))
        self.assertIs(found[0], scaled)


if __name__ == "__main__":
    tf.test.main()
