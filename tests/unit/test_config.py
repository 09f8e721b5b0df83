"""Tests of the settings."""

import dataclasses
import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_dgc.config import AveragingConfig, DGCConfig, DownpourConfig

steady = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

NAN, INF = float("nan"), float("inf")

fractions = st.floats(0, 1, exclude_max=True)
configs = st.builds(
    DGCConfig,
    sparsity=fractions,
    warmup_steps=st.integers(0, 10**6),
    warmup_stages=st.lists(fractions, min_size=1, unique=True).map(sorted),
    clip_norm=st.none() | st.floats(0, 1e9, exclude_min=True),
    momentum_correction=st.booleans(),
    momentum_masking=st.booleans(),
    min_elements=st.integers(0, 10**6),
    sample_fraction=st.floats(0, 1, exclude_min=True),
    value_dtype=st.sampled_from(["float32", "float16", "bfloat16", "sign", "log4"]),
    nonfinite=st.sampled_from(["raise", "skip"]),
    exchange=st.sampled_from(["auto", "allgather", "owners"]),
    growth=st.floats(0, exclude_min=True, allow_infinity=True),
    hierarchical=st.sampled_from([False, True, "auto"]),
) | st.builds(
    DGCConfig,
    ratio=st.floats(1, 1e9),
    total_steps=st.none() | st.integers(1, 10**9),
)


class DGCConfigTest(tf.test.TestCase):
    def assert_refused(
        self, error: type[Exception], name: str, value: Any, rule: str, **others: Any
    ) -> None:
        with self.subTest(name=name, value=value):
            with self.assertRaises(error) as caught:
                DGCConfig(**{name: value}, **others)
            message = str(caught.exception)
            self.assertStartsWith(message, f"`{name}` must be {rule}")
            self.assertIn(f"Received: {name}=", message)

    def test_hosts_are_asked_for_by_three_words(self) -> None:
        for value in (None, 1, 0, "yes", "True"):
            rule = "one of (False, True, 'auto')"
            self.assert_refused(ValueError, "hierarchical", value, rule)
        for kind in (AveragingConfig, DownpourConfig):
            for wanted in (True, "auto"):
                with self.assertRaisesRegex(ValueError, "of hierarchical=False"):
                    kind(compression=DGCConfig(hierarchical=wanted))

    def test_fractions_not_sent_lie_below_one(self) -> None:
        for value in (-0.1, 1.0, 1, 99.9, NAN, INF):
            rule = "in [0, 1): the fraction that is not sent."
            self.assert_refused(ValueError, "sparsity", value, rule)
            with self.assertRaisesRegex(ValueError, "`warmup_stages` must be in "):
                DGCConfig(warmup_stages=(0.5, value))

    def test_numbers_are_no_strings_or_bools(self) -> None:
        for value in ("0.9", True, None, [0.9]):
            self.assert_refused(TypeError, "sample_fraction", value, "a number.")
            if value is not None:
                self.assert_refused(TypeError, "sparsity", value, "a number.")
                self.assert_refused(TypeError, "clip_norm", value, "a number.")
                self.assert_refused(TypeError, "ratio", value, "a number.")
        with self.assertRaisesRegex(TypeError, "`warmup_stages` must be a number"):
            DGCConfig(warmup_stages=("0.75",))

    def test_counts_are_integers_from_zero(self) -> None:
        for name in ("warmup_steps", "min_elements"):
            for value in (1.0, "1", True, None):
                self.assert_refused(TypeError, name, value, "an integer.")
            self.assert_refused(ValueError, name, -1, "0 or more.")

    def test_warm_up_stages_are_an_ascending_sequence(self) -> None:
        name = "warmup_stages"
        self.assert_refused(TypeError, name, 0.5, "a sequence of numbers.")
        for value in ((0.9, 0.5), (0.5, 0.5)):
            self.assert_refused(ValueError, name, value, "strictly ascending.")

    def test_warm_up_needs_stages(self) -> None:
        rule = "non-empty where `warmup_steps` > 0."
        self.assert_refused(ValueError, "warmup_stages", (), rule, warmup_steps=1)
        self.assertEqual(DGCConfig(warmup_stages=()).warmup_stages, ())

    def test_clip_norm_is_positive(self) -> None:
        for value in (0, -1.0, NAN, INF):
            self.assert_refused(ValueError, "clip_norm", value, "None or positive.")

    def test_switches_are_bools(self) -> None:
        for name in (
            "momentum_correction",
            "momentum_masking",
            "rate_correction",
        ):
            for value in (0, 1, "yes"):
                self.assert_refused(TypeError, name, value, "True or False.")

    def test_sample_fraction_is_positive_and_at_most_all(self) -> None:
        for value in (0, -0.1, 1.1, NAN):
            self.assert_refused(ValueError, "sample_fraction", value, "in (0, 1].")
        self.assertEqual(DGCConfig(sample_fraction=1).sample_fraction, 1)

    def test_names_are_of_the_listed_ones(self) -> None:
        for value in ("float64", "int8", 16, ["sign"]):
            rule = "one of ('float32', 'float16', 'bfloat16', 'sign', 'log4')."
            self.assert_refused(ValueError, "value_dtype", value, rule)
        for value in ("ignore", None, True):
            rule = "one of ('raise', 'skip')."
            self.assert_refused(ValueError, "nonfinite", value, rule)
            rule = "one of ('auto', 'allgather', 'owners')."
            self.assert_refused(ValueError, "exchange", value, rule)

    def test_growth_is_positive(self) -> None:
        for value in (0, -1.0, NAN):
            self.assert_refused(ValueError, "growth", value, "positive.")
        self.assertEqual(DGCConfig(growth=INF).growth, INF)

    def test_is_frozen(self) -> None:
        config = DGCConfig()
        for field in dataclasses.fields(config):
            with self.assertRaises(dataclasses.FrozenInstanceError):
                setattr(config, field.name, getattr(config, field.name))

    def test_settings_are_given_by_name(self) -> None:
        with self.assertRaisesRegex(TypeError, "positional"):
            DGCConfig(0.9)  # type: ignore[misc]
        with self.assertRaisesRegex(TypeError, "sparsty"):
            DGCConfig(sparsty=0.9)  # type: ignore[call-arg]

    def test_the_stages_that_were_given_may_change_later(self) -> None:
        given_stages = [0.5, 0.75]
        config = DGCConfig(warmup_stages=given_stages)  # type: ignore[arg-type]
        given_stages.append(0.1)
        self.assertEqual(config.warmup_stages, (0.5, 0.75))

    def test_what_is_not_given_is_chosen_and_beside_a_sparsity_as_in_the_paper(
        self,
    ) -> None:
        def found(config: DGCConfig) -> tuple[Any, ...]:
            return config.sparsity, config.value_dtype, config.momentum_masking

        for config, expected in (
            (DGCConfig(), (0.996, "sign", False)),
            (DGCConfig(value_dtype="log4"), (0.997, "log4", False)),
            (DGCConfig(value_dtype="float16"), (0.999, "float16", False)),
            (DGCConfig(momentum_masking=True), (0.996, "sign", True)),
            (DGCConfig(sparsity=0.99), (0.99, "float32", True)),
            (DGCConfig(sparsity=0.99, value_dtype="sign"), (0.99, "sign", True)),
            (DGCConfig.paper(), (0.999, "float32", True)),
            (DGCConfig.paper(momentum_masking=False), (0.999, "float32", False)),
            (DGCConfig(ratio=100), (None, "sign", False)),
            (DGCConfig(bytes_per_step=9, value_dtype="log4"), (None, "log4", False)),
        ):
            self.assertEqual(found(config), expected)
        self.assertEqual(DGCConfig.paper(7).warmup_steps, 7)

    def test_a_budget_stands_in_the_place_of_a_sparsity(self) -> None:
        self.assert_refused(ValueError, "ratio", 0.5, "1 or more")
        self.assert_refused(ValueError, "ratio", INF, "1 or more")
        self.assert_refused(ValueError, "bytes_per_step", 0, "1 or more")
        self.assert_refused(TypeError, "bytes_per_step", 1.5, "an integer")
        self.assert_refused(ValueError, "total_steps", 9, "None without `bytes_per_")
        for budget in ({"ratio": 9}, {"bytes_per_step": 9}):
            rule = "None with a budget"
            self.assert_refused(ValueError, "sparsity", 0.9, rule, **budget)
            rule = "0 with a budget, which `total_steps` shares out"
            self.assert_refused(ValueError, "warmup_steps", 3, rule, **budget)
        rule = "None with `bytes_per_step`"
        self.assert_refused(ValueError, "ratio", 9.0, rule, bytes_per_step=9)

    @steady
    @given(configs)
    def test_get_config_round_trips_through_json(self, config: DGCConfig) -> None:
        text = json.dumps(config.get_config())
        again = DGCConfig.from_config(json.loads(text))
        self.assertEqual(again, config)
        self.assertEqual(hash(again), hash(config))

    def test_get_config_has_every_setting(self) -> None:
        names = [field.name for field in dataclasses.fields(DGCConfig)]
        self.assertEqual(list(DGCConfig().get_config()), names)

    def test_from_config_fills_in_what_is_missing(self) -> None:
        self.assertEqual(DGCConfig.from_config({}), DGCConfig())

    def test_from_config_refuses_unknown_keys(self) -> None:
        with self.assertRaisesRegex(
            ValueError,
            r"`config` must only have the settings of DGCConfig: \['bytes_per_step', .*"
            r"Received: unknown keys \['alpha', 'sparsty'\]",
        ):
            DGCConfig.from_config({"sparsty": 0.9, "alpha": 1, "sparsity": 0.9})

    def test_what_is_taken_is_fit_for_json(self) -> None:
        for name, value in (
            ("sparsity", np.float32(0.5)),
            ("sparsity", np.float64(0.5)),
            ("min_elements", np.int64(5)),
            ("warmup_steps", np.int32(5)),
            ("clip_norm", np.float32(0.5)),
            ("sample_fraction", np.float16(0.5)),
            ("warmup_stages", np.array([0.25, 0.5], np.float32)),
            ("value_dtype", tf.float16),
            ("value_dtype", np.dtype("float16")),
        ):
            with self.subTest(name=name, value=value):
                try:
                    config = DGCConfig(**{name: value})
                except (TypeError, ValueError):
                    continue
                again = DGCConfig.from_config(
                    json.loads(json.dumps(config.get_config()))
                )
                self.assertEqual(again, config)


averagings = st.builds(
    AveragingConfig,
    period=st.integers(1, 10**6) | st.just("adaptive"),
    min_period=st.integers(1, 10),
    max_period=st.integers(10, 1000),
    synchronous_steps=st.integers(0, 10**6),
    outer_optimizer=st.none()
    | st.just({"class_name": "SGD", "config": {"learning_rate": 0.7}}),
    compression=st.none()
    | configs.filter(lambda c: c.nonfinite == "raise" and not c.hierarchical),
    average_slots=st.booleans(),
    non_trainable=st.lists(st.text()).map(tuple),
)


class AveragingConfigTest(tf.test.TestCase):
    def assert_refused(
        self, error: type[Exception], name: str, value: Any, rule: str
    ) -> None:
        with self.subTest(name=name, value=value):
            with self.assertRaises(error) as caught:
                AveragingConfig(**{name: value})
            message = str(caught.exception)
            self.assertStartsWith(message, f"`{name}` must be {rule}")
            self.assertIn(f"Received: {name}=", message)

    def test_counts_are_integers_of_at_least_their_least(self) -> None:
        for name in ("period", "min_period", "max_period"):
            self.assert_refused(ValueError, name, 0, "1 or more")
        self.assert_refused(ValueError, "synchronous_steps", -1, "0 or more")
        for name in ("period", "min_period", "max_period", "synchronous_steps"):
            for value in (1.5, True, None):
                self.assert_refused(TypeError, name, value, "an integer")
        self.assert_refused(
            ValueError, "period", "often", "an integer of at least 1, or 'adaptive'"
        )
        self.assertEqual(type(AveragingConfig(period=np.int64(3)).period), int)

    def test_the_floor_is_not_above_the_ceiling(self) -> None:
        self.assert_refused(ValueError, "min_period", 65, "at most max_period=64")
        AveragingConfig(min_period=64)

    def test_types_are_checked(self) -> None:
        rule = "a Keras optimizer, or a function that makes one"
        for value in ("sgd", 0.7, {"class_name": "SGD"}):
            self.assert_refused(TypeError, "outer_optimizer", value, rule)
        for value in (0.99, "dgc"):
            self.assert_refused(TypeError, "compression", value, "a DGCConfig or None")
        self.assert_refused(TypeError, "average_slots", 1, "True or False")
        for value in ("*", 3, (1,)):
            rule = "a sequence of patterns"
            self.assert_refused(TypeError, "non_trainable", value, rule)
        skipping = DGCConfig(nonfinite="skip")
        rule = "of nonfinite='raise'"
        self.assert_refused(ValueError, "compression", skipping, rule)
        with self.assertRaisesRegex(ValueError, "unknown keys"):
            AveragingConfig(compression={"sparsity": 0.9, "density": 0.1})

    def test_optimizers_and_functions_that_make_them_give_the_same_settings(
        self,
    ) -> None:
        def make() -> keras.optimizers.Optimizer:
            return keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True)

        made = AveragingConfig(outer_optimizer=make())
        found = made.get_config()["outer_optimizer"]
        self.assertEqual(found["class_name"], "SGD")
        self.assertEqual(found["config"]["momentum"], 0.75)
        self.assertEqual(
            AveragingConfig(outer_optimizer=make).get_config(), made.get_config()
        )
        again = AveragingConfig.from_config(made.get_config())
        self.assertEqual(again.get_config(), made.get_config())

    @steady
    @given(averagings)
    @pytest.mark.long
    def test_get_config_and_from_config_are_inverse(
        self, config: AveragingConfig
    ) -> None:
        text = json.dumps(config.get_config())
        self.assertEqual(AveragingConfig.from_config(json.loads(text)), config)


if __name__ == "__main__":
    tf.test.main()


class DownpourConfigTest(tf.test.TestCase):
    def assert_refused(
        self, error: type[Exception], name: str, values: Any, rule: str
    ) -> None:
        for value in values:
            with self.subTest(name=name, value=value):
                with self.assertRaises(error) as caught:
                    DownpourConfig(**{name: value})
                message = str(caught.exception)
                self.assertStartsWith(message, f"`{name}` must be {rule}")
                self.assertIn(f"Received: {name}=", message)

    def test_periods_and_bounds_are_whole_numbers(self) -> None:
        for name in ("fetch_period", "push_period"):
            self.assert_refused(ValueError, name, (0, -1), "1 or more")
            self.assert_refused(TypeError, name, (1.5, "2", None, True), "an integer")
        self.assert_refused(ValueError, "max_staleness", (-1,), "0 or more")
        self.assert_refused(TypeError, "max_staleness", (0.5, True), "an integer")

    def test_the_rest_is_of_its_kind_and_range(self) -> None:
        self.assert_refused(TypeError, "staleness_rate", (1, None), "True or False")
        self.assert_refused(TypeError, "liveness", ("1", None, True), "a number")
        rule = "a positive number of seconds"
        self.assert_refused(ValueError, "liveness", (0, -1.0, INF, NAN), rule)

    def test_synchronous_steps_stand_alone(self) -> None:
        self.assert_refused(TypeError, "synchronous", (1, None), "True or False")
        self.assert_refused(ValueError, "backup_workers", (-1,), "0 or more")
        rule = "0 without synchronous=True"
        self.assert_refused(ValueError, "backup_workers", (1,), rule)
        for name, value in (
            ("fetch_period", 2),
            ("push_period", 2),
            ("max_staleness", 0),
            ("table_bytes", 9),
            ("compression", DGCConfig()),
        ):
            with self.assertRaisesRegex(ValueError, f"`{name}` must be .* with synch"):
                DownpourConfig(synchronous=True, **{name: value})

    def test_compression_is_of_floating_values_that_are_finite(self) -> None:
        name = "compression"
        self.assert_refused(TypeError, name, (True, 0.999, "dgc"), "a DGCConfig or N")
        skips = DGCConfig(nonfinite="skip")
        self.assert_refused(ValueError, name, (skips,), "of nonfinite='raise', as no")
        coarse = [DGCConfig(value_dtype=kind) for kind in ("sign", "log4")]
        self.assert_refused(ValueError, name, coarse, "of a value_dtype among")
        budget = DGCConfig(ratio=9)
        self.assert_refused(ValueError, name, (budget,), "without a budget")
        chosen = DownpourConfig(compression=DGCConfig(warmup_steps=5))
        self.assertEqual(chosen.compression, DGCConfig.paper(5))
        coarse = DownpourConfig(compression=DGCConfig(value_dtype="bfloat16"))
        self.assertEqual(coarse.compression, DGCConfig.paper(value_dtype="bfloat16"))
        unmasked = DownpourConfig(compression=DGCConfig(momentum_masking=False))
        expected = DGCConfig.paper(momentum_masking=False)
        self.assertEqual(unmasked.compression, expected)
        config = DownpourConfig(compression=DGCConfig(sparsity=0.99))
        text = json.dumps(config.get_config())
        self.assertEqual(DownpourConfig.from_config(json.loads(text)), config)

    def test_settings_survive_json(self) -> None:
        config = DownpourConfig(
            fetch_period=np.int64(4), max_staleness=0, liveness=2, staleness_rate=False
        )
        text = json.dumps(config.get_config())
        self.assertEqual(DownpourConfig.from_config(json.loads(text)), config)
        with self.assertRaisesRegex(ValueError, r"unknown keys \['period'\]"):
            DownpourConfig.from_config({"period": 2})
