"""A worker's device need not be that of its host: all of a step is where it belongs."""

import launch
import pytest
import tensorflow as tf

JOB = str(launch.ROOT / "tests/jobs/other_device.py")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
class OtherDeviceTest(tf.test.TestCase):
    def test_training_there_gives_the_same_bits(self) -> None:
        (found,) = launch.results(launch.run(JOB, workers=1, timeout=220))
        self.assertEqual(found.keys(), {"dense", "dgc", "averaging"})
        for name, (host, other) in found.items():
            with self.subTest(name):
                self.assertGreater(host["large"], 3)
                self.assertEqual(host["crc"], other["crc"])
                self.assertEqual(host["devices"], ["device:CPU:0"])
                self.assertEqual(other["devices"], ["device:CPU:1"])


if __name__ == "__main__":
    tf.test.main()
