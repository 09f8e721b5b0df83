"""Tests of what schedulers tell: environments, and what is missing or wrong in them."""

import os
import unittest
from unittest import mock

from absl.testing import parameterized

from tf_dgc.transports import schedulers

SRUN = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[08-09],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "3",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
PMI = {"PMI_SIZE": "3", "PMI_RANK": "1", "MPI_LOCALNRANKS": "3"}
JOB = {
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "my-train-2",
    "TF_DGC_WORKERS": "3",
    "TF_DGC_SERVICE": "peers",
}


def found(environment: dict[str, str]) -> schedulers.ProcessPlace | None:
    with mock.patch.dict(os.environ, environment, clear=True):
        return schedulers.find()


class FindTest(parameterized.TestCase, unittest.TestCase):
    def test_nothing_tells_of_others(self) -> None:
        for environment in (
            {},
            {"SLURM_STEP_NUM_TASKS": "1"},
            {"OMPI_COMM_WORLD_SIZE": "1"},
            {"JOB_COMPLETION_INDEX": "0", "TF_DGC_WORKERS": "1"},
            {"TF_DGC_WORKERS": "3", "TF_DGC_SERVICE": "peers", "HOSTNAME": "a-1"},
        ):
            self.assertIsNone(found(environment))

    def test_srun_numbers_tasks_by_nodes(self) -> None:
        places = [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1"), ("2", "0")]
        told = []
        for rank, (node, local) in enumerate(places):
            own = {"SLURM_NODEID": node, "SLURM_LOCALID": local}
            place = found(SRUN | own | {"SLURM_PROCID": str(rank)})
            self.assertEqual(place.rank, rank)
            told.append(place.addresses)
        self.assertEqual(told, [told[0]] * 5)
        hosts = [address.partition(":")[0] for address in told[0]]
        self.assertEqual(hosts, ["gpu08", "gpu08", "gpu09", "gpu09", "login"])
        self.assertLen(set(told[0]), 5)

    def assertLen(self, container: set[str], length: int) -> None:
        self.assertEqual(len(container), length)

    def test_steps_of_a_job_have_ports_of_their_own(self) -> None:
        own = {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
        one, two = (found(SRUN | own | {"SLURM_STEP_ID": step}) for step in "34")
        self.assertFalse(set(one.addresses) & set(two.addresses))
        for place in one, two:
            for address in place.addresses:
                self.assertTrue(12_000 <= int(address.partition(":")[2]) < 32_000)

    def test_ports_are_what_one_says(self) -> None:
        place = found(OMPI | {"TF_DGC_PORT": "4000"})
        expected = ["127.0.0.1:4000", "127.0.0.1:4001", "127.0.0.1:4002"]
        self.assertEqual(place, ("mpirun", expected, 1))

    def test_ranks_that_do_not_follow_the_nodes_are_refused(self) -> None:
        own = {"SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_PROCID": "1"}
        with self.assertRaisesRegex(RuntimeError, "srun --distribution=block"):
            found(SRUN | own)

    def test_variables_of_slurm_that_do_not_agree_are_refused(self) -> None:
        own = {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
        for other in (
            {"SLURM_STEP_NODELIST": "a,b"},
            {"SLURM_STEP_NUM_TASKS": "4"},
            {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        ):
            with self.assertRaisesRegex(ValueError, "Slurm's variables must agree"):
                found(SRUN | own | other)

    def test_mpirun_on_one_host(self) -> None:
        for environment in (OMPI, PMI):
            place = found(environment)
            expected = [f"127.0.0.1:{12_000 + i}" for i in range(3)]
            self.assertEqual(place, ("mpirun", expected, 1))

    def test_mpirun_on_several_hosts_must_be_told_them(self) -> None:
        several = OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        for environment in (several, {"PMI_SIZE": "3", "PMI_RANK": "1"}):
            with self.assertRaisesRegex(
                RuntimeError, "no TF_DGC_HOSTS. Set TF_DGC_HOSTS=a:2,b:2 for all"
            ):
                found(environment)
            place = found(environment | {"TF_DGC_HOSTS": "a,b:2"})
            self.assertEqual(place.addresses, ["a:12000", "b:12000", "b:12001"])
            for hosts in ("a:2", "a:2,b:2", "", "a:x,b"):
                with self.assertRaisesRegex(ValueError, "as many workers as mpirun"):
                    found(environment | {"TF_DGC_HOSTS": hosts})

    def test_an_indexed_job(self) -> None:
        expected = [f"my-train-{i}.peers:12000" for i in range(3)]
        self.assertEqual(found(JOB), ("Kubernetes", expected, 2))

    def test_an_index_that_is_not_of_the_host_is_refused(self) -> None:
        for other in ({"HOSTNAME": "my-train-1"}, {"TF_DGC_WORKERS": "2"}):
            with self.assertRaisesRegex(ValueError, "HOSTNAME must end in"):
                found(JOB | other)

    @parameterized.parameters(
        (SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, "SLURM_LOCALID"),
        (SRUN, "SLURM_PROCID, no SLURM_NODEID, no SLURM_LOCALID"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
        ({"PMI_SIZE": "2"}, "PMI_RANK"),
        ({"JOB_COMPLETION_INDEX": "0"}, "TF_DGC_WORKERS, no TF_DGC_SERVICE"),
        (
            {"JOB_COMPLETION_INDEX": "0", "TF_DGC_WORKERS": "2", "HOSTNAME": "a-0"},
            "TF_DGC_SERVICE",
        ),
    )
    def test_half_an_environment_names_what_is_missing(
        self, environment: dict[str, str], missing: str
    ) -> None:
        with self.assertRaisesRegex(RuntimeError, f"Received:.* no {missing}"):
            found(environment)

    @parameterized.parameters(
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, "SLURM_PROCID=1, SLURM_NTASKS=4"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID=2, no size"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "PMIX_RANK=1, no size"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK=1, no size"),
        ({"PMI_RANK": "3"}, "PMI_RANK=3, no size"),
        ({"HOROVOD_RANK": "1"}, "HOROVOD_RANK=1, no size"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0, WORLD_SIZE=2"),
    )
    def test_one_of_several_does_not_train_alone(
        self, environment: dict[str, str], told: str
    ) -> None:
        with self.assertRaisesRegex(RuntimeError, f"one of several.*: {told}"):
            found(environment)

    @parameterized.parameters(
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"PMIX_RANK": "0"},
        {"PMI_RANK": "0"},
    )
    def test_who_may_be_the_first_is_warned(self, **environment: str) -> None:
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            self.assertIsNone(found(environment))
        self.assertIn("This process trains alone", logs.output[0])

    @parameterized.parameters(
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},
        {"RANK": "third"},
    )
    def test_who_is_alone_is_not_warned(self, **environment: str) -> None:
        with self.assertNoLogs("tf_dgc"):
            self.assertIsNone(found(environment))

    def test_what_is_no_number_is_named(self) -> None:
        for name, environment in (
            ("SLURM_STEP_NUM_TASKS", SRUN),
            ("OMPI_COMM_WORLD_RANK", OMPI),
            ("TF_DGC_WORKERS", JOB),
            ("TF_DGC_PORT", OMPI),
        ):
            for value in ("x", "-1", "1.5", "9" * 30):
                with self.assertRaisesRegex(ValueError, f"{name} must be a number"):
                    found(environment | {name: value})


class ListsTest(parameterized.TestCase, unittest.TestCase):
    @parameterized.parameters(
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,3],x", ["n08", "n09", "n10", "n3", "x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2]-ib.x.org", ["n1-ib.x.org", "n2-ib.x.org"]),
    )
    def test_nodes(self, text: str, expected: list[str]) -> None:
        self.assertEqual(schedulers.expand_nodes(text), expected)

    @parameterized.parameters("", "a[1", "a]", "a,,b", ",a", "a,", "a[x]", "a[1-]")
    def test_what_is_no_list_of_nodes(self, text: str) -> None:
        with self.assertRaisesRegex(ValueError, "No list of Slurm's nodes"):
            schedulers.expand_nodes(text)

    @parameterized.parameters("n[1-999999999]", "a[1-999]b[1-999]c[1-999]")
    def test_lists_do_not_fill_the_memory(self, text: str) -> None:
        with self.assertRaisesRegex(ValueError, "Too many nodes"):
            schedulers.expand_nodes(text)

    def test_tasks(self) -> None:
        self.assertEqual(schedulers.expand_tasks("2(x3),1"), [2, 2, 2, 1])
        self.assertEqual(schedulers.expand_tasks("4"), [4])
        for text in ("", "a", "2(x", "1(x999999999)", "2,,1"):
            with self.assertRaisesRegex(ValueError, "No list of Slurm's tasks"):
                schedulers.expand_tasks(text)


if __name__ == "__main__":
    unittest.main()
