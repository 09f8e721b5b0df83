"""Tests of what is planned for servers, and of a worker's share: in this process."""

import contextlib
import itertools
import json
import math
import os
import socket
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_dgc
from tf_dgc.servers import chief_records, shards
from tf_dgc.servers.cluster import Cluster, connect, resolve
from tf_dgc.servers.shards import Shard
from tf_dgc.strategies.served_data import own_share

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=8)


class ShardsTest(tf.test.TestCase):
    @settings(deadline=None, derandomize=True)
    @given(shapes, st.integers(1, 5), st.data())
    def test_each_row_is_on_one_server_and_loads_are_even(
        self, shapes: list[list[int]], servers: int, data: st.DataObject
    ) -> None:
        whole = [data.draw(st.booleans()) for _ in shapes]
        plan = shards.plan(shapes, whole, servers)
        load, largest = [0] * servers, 0
        for shape, uncut, own in zip(shapes, whole, plan, strict=True):
            rows = shape[0] if shape else 1
            edges = [own[0].start] + [shard.stop for shard in own]
            self.assertEqual(edges, sorted(edges))
            self.assertEqual((edges[0], edges[-1]), (0, rows))
            for before, after in itertools.pairwise(own):
                self.assertEqual(before.stop, after.start)
            if uncut:
                self.assertLen(own, 1)
            for server, start, stop in own:
                size = math.prod(shape) // max(rows, 1) * (stop - start)
                load[server] += size
                largest = max(largest, size)
        # Greedy: the last to come went to the lightest.
        self.assertLessEqual(max(load), sum(load) / servers + largest)

    def test_a_tensor_larger_than_a_fair_share_is_cut(self) -> None:
        plan = shards.plan([[100, 8], [10, 2]], [False, False], 2)
        self.assertEqual([len(own) for own in plan], [2, 1])
        self.assertEqual(shards.plan([[9]], [True], 3), [[Shard(0, 0, 9)]])

    def test_what_comes_later_goes_to_the_lightest(self) -> None:
        self.assertEqual(shards.plan([[4]], [True], 3, [5, 1, 3]), [[Shard(1, 0, 4)]])


class ShareTest(tf.test.TestCase):
    @pytest.mark.long
    def test_workers_share_all_rows_and_get_no_empty_batch(self) -> None:
        for rows, batch in ((13, 5), (7, 3), (2, 4)):
            found: list[int] = []
            for rank in range(4):
                dataset = tf.data.Dataset.range(rows).batch(batch)
                for part in own_share(dataset, rank, 4):
                    self.assertGreater(len(part), 0)
                    found += part.numpy().tolist()
            self.assertEqual(sorted(found), list(range(rows)))

    def test_one_worker_reads_what_there_is(self) -> None:
        dataset = tf.data.Dataset.range(3).batch(2)
        self.assertIs(own_share(dataset, 0, 1), dataset)


class CompareTest(tf.test.TestCase):
    def test_fields_that_differ_are_named(self) -> None:
        chief_records.compare("settings", {"a": [1]}, {"a": (1,)}, 2)  # as JSON has it
        with self.assertRaisesRegex(
            ValueError, "All workers must have the same settings.*`b` differs: 1 on "
        ) as caught:
            chief_records.compare("settings", {"a": 1, "b": 1}, {"a": 1, "b": np.pi}, 2)
        self.assertNotIn("`a`", str(caught.exception))


class ClusterTest(tf.test.TestCase):
    def resolve(self, cluster: Any, kind: Any, index: Any) -> Cluster:
        task = {"type": kind, "index": index}
        text = json.dumps({"cluster": cluster, "task": task})
        with mock.patch.dict(os.environ, {"TF_CONFIG": text}):
            os.environ.pop("HOROVOD_SIZE", None)
            return resolve()

    def test_a_task_finds_its_place(self) -> None:
        jobs = {"ps": ["a:1", "b:1"], "worker": ["c:1", "d:2"]}
        ps = ("a:1", "b:1")
        self.assertEqual(self.resolve(jobs, "ps", 1), Cluster(ps, 2, "ps", 1, "b:1"))
        expected = Cluster(ps, 2, "worker", 1, "d:2")
        self.assertEqual(self.resolve(jobs, "worker", 1), expected)
        jobs = {"ps": ps, "chief": ["c:1"], "worker": ["d:2"]}
        self.assertEqual(self.resolve(jobs, "worker", 0), expected)
        self.assertEqual(self.resolve(jobs, "chief", 0).index, 0)

    def test_kubeflow_may_name_an_evaluator(self) -> None:
        jobs = {"ps": ["a:1"], "chief": ["c:1"], "evaluator": ["e:1"]}
        expected = Cluster(("a:1",), 1, "worker", 0, "c:1")
        self.assertEqual(self.resolve(jobs, "chief", 0), expected)
        with self.assertRaisesRegex(ValueError, "An evaluator has no place in Down"):
            self.resolve(jobs, "evaluator", 0)

    def test_what_is_no_cluster_with_servers_is_refused(self) -> None:
        both = {"ps": ["a:1"], "worker": ["c:1"]}
        for cluster, kind, index, text in (
            ({}, "worker", 0, "needs servers and workers.*`ps` and `worker`"),
            ({"worker": ["c:1"]}, "worker", 0, "needs servers and workers"),
            ({"ps": ["c:1"]}, "ps", 0, "needs servers and workers"),
            (both, "worker", 1, "`task` in TF_CONFIG must have the `type` and `index`"),
            (both, "master", 0, "must have the `type` and `index`"),
            (both, "ps", -1, "must have the `type` and `index`"),
            (both, "ps", None, "must have the `type` and `index`"),
            (both, "ps", [0], "must have the `type` and `index`"),
            ({"ps": ["a"], "worker": ["c:1"]}, "ps", 0, 'must be "host:port"'),
            (
                {"ps": ["a:1"], "worker": ["a:1"]},
                "ps",
                0,
                "TF_CONFIG names an address twice. Received: .'a:1', 'a:1'.",
            ),
            ([1], "ps", 0, "TF_CONFIG must be a JSON object"),
        ):
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                self.resolve(cluster, kind, index)

    def test_a_server_that_does_not_come_is_named(self) -> None:
        with contextlib.ExitStack() as stack:
            there = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            gone = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ps = [f"127.0.0.1:{each.getsockname()[1]}" for each in (there, gone)]
            gone.close()
            own = Cluster(tuple(ps), 1, "worker", 0, "127.0.0.1:1")
            stack.enter_context(mock.patch.dict(os.environ, {"TF_DGC_TIMEOUT": "0.2"}))
            with self.assertRaisesRegex(
                TimeoutError, rf"Parameter server 1 \({ps[1]}\) did not come within 0.2"
            ):
                connect(own)

    def test_strategies_without_servers_refuse_a_job_with_some(self) -> None:
        jobs = {"ps": ["a:1"], "worker": ["c:1"]}
        config = {"cluster": jobs, "task": {"type": "ps", "index": 0}}
        with (
            mock.patch.dict(os.environ, {"TF_CONFIG": json.dumps(config)}),
            self.assertRaisesRegex(ValueError, "for tf_dgc.DownpourStrategy only"),
        ):
            tf_dgc.DenseStrategy()

    def test_horovodrun_is_refused(self) -> None:
        with (
            mock.patch.dict(os.environ, {"HOROVOD_SIZE": "2"}),
            self.assertRaisesRegex(ValueError, "must not run under horovodrun, which"),
        ):
            resolve()


if __name__ == "__main__":
    tf.test.main()
