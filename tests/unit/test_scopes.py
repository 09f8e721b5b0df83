"""A strategy that was set stays set, whatever becomes of TensorFlow's default graph."""

import concurrent.futures
import contextlib
import gc
import multiprocessing.dummy
import threading
import unittest
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as draw
from test_scope import first_of_two

import tf_dgc
from tf_dgc import _host
from tf_dgc.strategies import fits, watched

X = np.ones((8, 8), "float32")
Y = X[:, :1]
RESETS = {
    "clear_session": keras.utils.clear_session,
    "backend.clear_session": keras.backend.clear_session,
    "tf.keras": tf.keras.backend.clear_session,
    "reset_default_graph": tf.compat.v1.reset_default_graph,
    "collect": gc.collect,
}


def in_thread(function: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def trained() -> Any:
    """Return the strategy under which a model is made and trained; None of none."""
    model = features.mlp()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    found = {_host.keras.strategy_of(part) for part in (model, model.weights[0].value)}
    found.add(_host.keras.strategy_of(model.optimizer))
    if found == {None, tf.distribute.get_strategy()}:
        return None  # TensorFlow's default, of the optimizer
    (strategy,) = found
    return strategy


class StaysTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.own = tf_dgc.DenseStrategy(transport="local")
        self.addCleanup(self.unset)

    def unset(self) -> None:
        tf.distribute.experimental_set_strategy(None)
        self.assertFalse(tf.distribute.has_strategy())
        variable = tf.Variable(1.0)
        self.assertIsNone(_host.keras.strategy_of(variable))

    @pytest.mark.long
    def test_what_was_set_stays(self) -> None:
        tf.distribute.experimental_set_strategy(self.own)
        keras.utils.clear_session()
        self.assertIs(trained(), self.own)
        self.assertIs(in_thread(trained), self.own)
        tf.distribute.experimental_set_strategy(None)
        self.assertFalse(in_thread(tf.distribute.has_strategy))

    @pytest.mark.long
    def test_a_scope_stays_until_its_end(self) -> None:
        with self.own.scope() as found:
            self.assertIs(found, self.own)
            keras.utils.clear_session()
            self.assertIs(trained(), self.own)
            tf.compat.v1.reset_default_graph()
        self.assertFalse(tf.distribute.has_strategy())
        self.assertIsNone(trained())

    def test_a_scope_ends_by_an_error(self) -> None:
        with contextlib.suppress(KeyError), self.own.scope():
            keras.utils.clear_session()
            raise KeyError
        self.assertFalse(tf.distribute.has_strategy())

    def test_other_creators_of_variables_stay_nested(self) -> None:
        made = []

        def creator(next_creator: Any, **kwargs: Any) -> Any:
            made.append(kwargs)
            return next_creator(**kwargs)

        with self.own.scope():
            with tf.variable_creator_scope(creator):
                keras.utils.clear_session()
            self.assertIs(tf.distribute.get_strategy(), self.own)
        self.assertFalse(tf.distribute.has_strategy())

    @pytest.mark.long
    def test_models_go_on_that_were_made_before(self) -> None:
        tf.distribute.experimental_set_strategy(self.own)
        model = features.mlp()
        keras.utils.clear_session()
        model.compile("adam", "mse")
        model.fit(X, Y, verbose=0)
        copy = in_thread(lambda: keras.models.clone_model(model))
        self.assertIs(_host.keras.strategy_of(copy), self.own)

    @pytest.mark.long
    def test_a_callback_may_clear(self) -> None:
        tf.distribute.experimental_set_strategy(self.own)
        clear = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: keras.utils.clear_session()
        )
        model = features.mlp()
        model.compile("sgd", "mse")
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[clear])
        self.assertIs(tf.distribute.get_strategy(), self.own)

    @given(draw.lists(draw.sampled_from(["enter", "exit", "set", "none", *RESETS])))
    @settings(max_examples=40, deadline=None)
    def test_drawn_sequences(self, steps: list[str]) -> None:
        scopes: list[contextlib.ExitStack] = []
        was_set = False
        for step in steps:
            if step in RESETS:
                RESETS[step]()
            elif step == "enter":
                scopes.append(contextlib.ExitStack())
                scopes[-1].enter_context(self.own.scope())
            elif step == "exit" and scopes:
                scopes.pop().close()
            elif step in ("set", "none") and not scopes:
                was_set = step == "set"
                strategy = self.own if was_set else None
                tf.distribute.experimental_set_strategy(strategy)
            expected = self.own if scopes or was_set else None
            variable = tf.Variable(1.0)
            self.assertIs(_host.keras.strategy_of(variable), expected)
            self.assertEqual(tf.distribute.has_strategy(), expected is not None)
        while scopes:
            scopes.pop().close()
        self.unset()


class ThreadsTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.object(watched, "of_several", weakref.WeakSet()))
        self.addCleanup(tf.distribute.experimental_set_strategy, None)

    def test_threads_that_read_data_make_variables_of_their_own(self) -> None:
        own = tf_dgc.DenseStrategy(transport="local")
        tf.distribute.experimental_set_strategy(own)
        with multiprocessing.dummy.Pool(1) as pool:
            self.assertEqual(pool.map(lambda _: tf.distribute.has_strategy(), [0]), [0])
        seen = []

        def begin(*_: Any) -> None:
            seen.append(in_thread(tf.distribute.has_strategy))

        watch = keras.callbacks.LambdaCallback(on_train_begin=begin)
        model = features.mlp()
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0, callbacks=[watch])
        self.assertEqual(seen, [False])
        self.assertTrue(in_thread(tf.distribute.has_strategy))

    def test_a_thread_that_left_a_scope_behind_is_refused(self) -> None:
        own = first_of_two()
        own.extended.used = True
        words = "made outside the scope .* `with strategy.scope.*`, in the same thread"
        with own.scope(), self.assertRaisesRegex(ValueError, words):
            in_thread(trained)

    def test_where_one_was_set_a_model_of_none_is_refused(self) -> None:
        own = first_of_two()
        model = features.mlp()
        model.compile("sgd", "mse")
        own.extended.used = True
        tf.distribute.experimental_set_strategy(own)
        with self.assertRaisesRegex(ValueError, "made outside the scope"):
            model.fit(X, Y, verbose=0)

    def test_two_threads_at_a_time_are_refused(self) -> None:
        own = tf_dgc.DenseStrategy(transport="local")
        own._core.share = mock.Mock()  # as of several workers
        with own.scope():
            one, two = features.mlp(), features.mlp()
        begun, ended = threading.Event(), threading.Event()

        def first() -> None:
            with fits._noted("fit", one):
                begun.set()
                ended.wait(60)

        thread = threading.Thread(target=first, name="one")
        thread.start()
        begun.wait(60)
        words = "one model at a time.* while thread 'one' is in `fit` .*max_workers=1"
        try:
            with self.assertRaisesRegex(RuntimeError, words):
                two.fit(X, Y)
        finally:
            ended.set()
            thread.join()
        with fits._noted("fit", two), fits._noted("evaluate", two):
            pass

    def test_predictions_for_the_data_of_a_fit_are_told_what_to_call(self) -> None:
        own = tf_dgc.DenseStrategy(transport="local")
        own._core.share = mock.Mock()  # as of several workers
        with own.scope():
            model = features.mlp()
        errors: list[str] = []

        def read() -> None:
            try:
                model.predict(X)
            except RuntimeError as error:
                errors.append(str(error))

        # As Python names a thread of TensorFlow, which calls a generator.
        thread = threading.Thread(target=read, name="Dummy-9")
        with fits._noted("fit", model):
            thread.start()
            thread.join()
        words = r"`model\(x\)`, or call `predict` before `fit`$"
        self.assertRegex(errors[0], words)


if __name__ == "__main__":
    unittest.main()
