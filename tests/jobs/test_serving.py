"""Tests of tasks that serve, and of workers that look for them: real processes."""

import json
import os
import signal
import unittest

import pytest
import serving

from tf_dgc.launcher.workers import free_ports

# In a task of type "ps" it serves; in one of type "worker" it uses the servers.
SCRIPT = """
import logging
from tf_dgc.servers import cluster as clusters
logging.basicConfig(level=logging.INFO)
cluster = clusters.resolve()
if cluster.task_type == "ps":
    clusters.serve(cluster)
print("looks for servers", flush=True)
clusters.connect(cluster)
import tensorflow as tf
for task in range(len(cluster.ps)):
    with tf.device(f"/job:ps/replica:0/task:{task}/device:CPU:0"):
        print("answers", (tf.constant(3.0) + task).numpy(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
class ServingTest(unittest.TestCase):
    def start(self, kind: str, index: int) -> serving.Task:
        task = {"type": kind, "index": index}
        config = {"cluster": self.cluster, "task": task}
        environment = {"TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": ""}
        found = serving.Task(["-c", SCRIPT], os.environ | environment)
        self.addCleanup(found.close)
        return found

    def test_servers_may_come_late_and_end_by_sigterm(self) -> None:
        first, second, own = (f"127.0.0.1:{p}" for p in free_ports(3))
        self.cluster = {"ps": [first, second], "worker": [own]}
        worker = self.start("worker", 0)
        servers = [self.start("ps", 0)]
        worker.wait_for("looks for servers")
        servers[0].wait_for("Parameter server 0 at 127.0.0.1")
        servers.append(self.start("ps", 1))
        taken = self.start("ps", 0)
        self.assertEqual(worker.end(), 0, worker.text)
        self.assertIn("answers 3.0\nanswers 4.0", worker.text)
        self.assertNotEqual(taken.end(), 0)
        refusal = "A server's port must be free. Received: index=0, address="
        self.assertIn(refusal, taken.text)
        for server, (signum, status) in zip(
            servers, ((signal.SIGTERM, 0), (signal.SIGINT, 130)), strict=True
        ):
            server.send(signum)
            self.assertEqual(server.end(), status, server.text)


if __name__ == "__main__":
    unittest.main()
