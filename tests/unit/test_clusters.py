"""Tests of the files to copy for clusters: their workers find each other."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import unittest
from typing import Any
from unittest import mock

import pytest

from tf_dgc.transports import rendezvous, schedulers

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "clusters"


def documents(name: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML file."""
    yaml = pytest.importorskip("yaml", reason="the extra `test` brings it")
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", [])}


class KubeflowTest(unittest.TestCase):
    def test_a_tfjob_has_what_the_operator_and_the_strategies_look_for(self) -> None:
        (job,) = documents("tfjob.yaml")
        self.assertEqual(job["kind"], "TFJob")
        ((kind, replicas),) = job["spec"]["tfReplicaSpecs"].items()
        self.assertEqual(kind, "Worker")
        (container,) = replicas["template"]["spec"]["containers"]
        self.assertEqual(container["name"], "tensorflow")
        (port,) = container["ports"]
        self.assertEqual(port["name"], "tfjob-port")
        # As the operator writes it, whose services are called by job, type and index.
        address = "train-worker-{}.default.svc:" + str(port["containerPort"])
        cluster = [address.format(i) for i in range(replicas["replicas"])]
        text = str({"cluster": {"worker": cluster}, "environment": "cloud"})
        text = text.replace(
            "}, 'env", "}, 'task': {'type': 'worker', 'index': 3}, 'env"
        )
        found = rendezvous.read_tf_config(text.replace("'", '"'))
        self.assertEqual(found, (cluster, 3))

    def test_pods_of_a_trainjob_find_each_other(self) -> None:
        runtime, job = documents("trainjob.yaml")
        reference = job["spec"]["runtimeRef"]
        self.assertEqual(reference["kind"], runtime["kind"])
        self.assertEqual(reference["name"], runtime["metadata"]["name"])
        (pods,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        pod = pods["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        nodes = job["spec"]["trainer"]["numNodes"]
        self.assertEqual(runtime["spec"]["mlPolicy"]["numNodes"], nodes)
        name = job["metadata"]["name"]
        found = []
        for rank in range(nodes):
            # As a JobSet names them: by set, job, number of the job and index.
            told = {
                "HOSTNAME": f"{name}-{pods['name']}-0-{rank}",
                "JOB_COMPLETION_INDEX": str(rank),
            } | environment_of(container)
            with mock.patch.dict(os.environ, told, clear=True):
                place = schedulers.find()
            self.assertEqual(place.rank, rank)
            found.append([each.partition(":")[0] for each in place.addresses])
        expected = [f"{name}-node-0-{rank}.{name}" for rank in range(nodes)]
        self.assertEqual(found, [expected] * nodes)


class SlurmTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = FOLDER / "slurm.sh"
        self.text = self.path.read_text()

    def test_the_script_is_one_of_bash(self) -> None:
        bash = shutil.which("bash")
        self.assertIsNotNone(bash)
        subprocess.run([bash, "-n", self.path], check=True, timeout=20)

    def test_its_tasks_find_each_other(self) -> None:
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", self.text, re.M))
        nodes, each = int(options["nodes"]), int(options["ntasks-per-node"])
        self.assertRegex(self.text, r"(?m)^srun .*--distribution=block ")
        places = []
        for rank in range(nodes * each):
            told = {
                "SLURM_STEP_NUM_TASKS": str(nodes * each),
                "SLURM_STEP_NODELIST": f"node[1-{nodes}]",
                "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
                "SLURM_PROCID": str(rank),
                "SLURM_NODEID": str(rank // each),
                "SLURM_LOCALID": str(rank % each),
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
            }
            with mock.patch.dict(os.environ, told, clear=True):
                places.append(schedulers.find())
        self.assertEqual([place.rank for place in places], list(range(nodes * each)))
        addresses = {tuple(place.addresses) for place in places}
        self.assertEqual(len(addresses), 1)
        self.assertEqual(len(set(addresses.pop())), nodes * each)

    def test_variables_are_those_of_the_package(self) -> None:
        pages = (FOLDER.parents[1] / "docs/how-to/launch.md").read_text()
        for path in FOLDER.iterdir():
            for name in re.findall(r"TF_DGC_[A-Z_]+", path.read_text()):
                self.assertIn(f"`{name}`", pages, path.name)


class EnginesTest(unittest.TestCase):
    def test_strategies_are_made_in_the_function_that_workers_run(self) -> None:
        for name in ("ray_train.py", "spark.py"):
            tree = ast.parse((FOLDER / name).read_text())
            made = {
                function.name
                for function in tree.body
                if isinstance(function, ast.FunctionDef)
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and node.attr == "DGCStrategy"
            }
            self.assertEqual(made, {"train"}, name)


if __name__ == "__main__":
    unittest.main()
