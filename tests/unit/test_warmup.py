"""Tests of the warm-up."""

import itertools

import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_dgc.compression import warmup as schedules
from tf_dgc.compression.warmup import Stage
from tf_dgc.config import DGCConfig

steady = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

fractions = st.floats(0, 1, exclude_max=True)
configs = st.builds(
    DGCConfig,
    sparsity=fractions,
    warmup_steps=st.integers(0, 5000),
    warmup_stages=st.lists(fractions, min_size=1, max_size=8, unique=True).map(sorted),
)


class StagesTest(tf.test.TestCase):
    def test_without_warm_up_one_sparsity_stays(self) -> None:
        listed = schedules.stages(DGCConfig(sparsity=0.99))
        self.assertEqual(listed, (Stage(0, 0.99),))

    def test_the_paper_climbs_in_four_stages(self) -> None:
        listed = schedules.stages(DGCConfig(sparsity=0.999, warmup_steps=400))
        self.assertEqual(
            listed,
            (
                Stage(0, 0.75),
                Stage(100, 0.9375),
                Stage(200, 0.984375),
                Stage(300, 0.996),
                Stage(400, 0.999),
            ),
        )

    def test_stages_at_or_above_the_sparsity_are_left_out(self) -> None:
        for sparsity in (0.9, 0.93, 0.9375):
            config = DGCConfig(sparsity=sparsity, warmup_steps=10)
            self.assertEqual(
                schedules.stages(config), (Stage(0, 0.75), Stage(10, sparsity))
            )

    def test_without_a_lower_stage_there_is_no_warm_up(self) -> None:
        for sparsity in (0.0, 0.5, 0.75):
            config = DGCConfig(sparsity=sparsity, warmup_steps=10)
            self.assertEqual(schedules.stages(config), (Stage(0, sparsity),))

    def test_fewer_steps_than_stages_skip_stages(self) -> None:
        config = DGCConfig(sparsity=0.999, warmup_steps=2)
        self.assertEqual(
            schedules.stages(config),
            (Stage(0, 0.9375), Stage(1, 0.996), Stage(2, 0.999)),
        )

    @steady
    @given(configs)
    def test_steps_and_sparsities_climb_to_the_last(self, config: DGCConfig) -> None:
        listed = schedules.stages(config)
        steps = [stage.first_step for stage in listed]
        sparsities = [stage.sparsity for stage in listed]
        self.assertEqual(steps[0], 0)
        self.assertEqual(sparsities[-1], config.sparsity)
        self.assertEqual(steps, sorted(set(steps)))
        self.assertEqual(sparsities, sorted(set(sparsities)))
        if len(listed) > 1:
            self.assertEqual(steps[-1], config.warmup_steps)

    @steady
    @given(configs)
    def test_stages_last_equally_long(self, config: DGCConfig) -> None:
        steps = [stage.first_step for stage in schedules.stages(config)]
        lengths = [b - a for a, b in itertools.pairwise(steps)]
        if lengths:
            self.assertLessEqual(max(lengths) - min(lengths), 1)


class StageIndexTest(tf.test.TestCase):
    def test_the_step_lies_in_the_last_stage_that_has_begun(self) -> None:
        listed = (Stage(0, 0.1), Stage(3, 0.2), Stage(4, 0.3), Stage(9, 0.4))
        for step in (*range(12), 2**31, 2**40):
            index = schedules.stage_index(tf.constant(step, tf.int64), listed)
            self.assertEqual(index.dtype, tf.int32)
            self.assertEqual(index.shape, [])
            expected = sum(step >= stage.first_step for stage in listed) - 1
            self.assertEqual(int(index), expected)

    def test_one_stage_is_stage_zero(self) -> None:
        for step in (0, 10**6):
            index = schedules.stage_index(tf.constant(step, tf.int64), (Stage(0, 0.5),))
            self.assertEqual(int(index), 0)

    def test_the_index_follows_the_step_in_a_graph(self) -> None:
        listed = (Stage(0, 0.1), Stage(2, 0.2))

        @tf.function
        def indices() -> tf.Tensor:
            return tf.map_fn(
                lambda step: schedules.stage_index(step, listed),
                tf.range(4, dtype=tf.int64),
                fn_output_signature=tf.int32,
            )

        self.assertAllEqual(indices(), [0, 0, 1, 1])


if __name__ == "__main__":
    tf.test.main()
