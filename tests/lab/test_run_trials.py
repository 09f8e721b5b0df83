"""Tests of `tf-dgc-run --trials`, with plain Python tasks."""

import json
import tempfile
import unittest

import pytest
import sshd
import test_run
from launch import finish
from test_run import all_end

PRELUDE = """
place = json.loads(os.environ["TF_DGC_TRIALS"])
group = place["group"]
attempt = int(os.environ.get("TF_DGC_ATTEMPT", 0))
here = os.path.dirname(__file__)
"""


class WithGroups(test_run.Launched):
    def script(self, code: str, name: str = "search.py") -> str:
        path = self.folder / name
        super().script(code, name)
        head, tail = path.read_text().split("rank =", 1)
        path.write_text(f"{head}{PRELUDE}rank ={tail}")
        return str(path)


@pytest.mark.processes
class TrialsTest(WithGroups):
    def test_groups_are_clusters_of_their_own_and_know_the_oracle(self) -> None:
        script = self.script("""
            own = {"place": place, "config": config}
            own["local"] = os.environ.get("TF_DGC_LOCAL")
            own["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
            print(json.dumps(own), flush=True)
            time.sleep(1.0 if group is None else 0)
            """)
        status, out, err = self.run_to_end("-n", "4", "--trials", "2", script)
        self.assertEqual((status, err), (0, ""))
        split = [line.split("] ", 1) for line in out]
        told = {name[1:]: json.loads(text) for name, text in split}
        self.assertCountEqual(told, ["0.0", "0.1", "1.0", "1.1", "oracle"])
        addresses = set()
        for task, name in enumerate(["0.0", "0.1", "1.0", "1.1"]):
            group, index = map(int, name.split("."))
            self.assertEqual(told[name]["place"]["group"], group)
            self.assertEqual(told[name]["config"]["task"]["index"], index)
            self.assertEqual(told[name]["local"], f"{task}/4")
            cluster = told[name]["config"]["cluster"]["worker"]
            self.assertEqual(cluster, told[f"{group}.0"]["config"]["cluster"]["worker"])
            self.assertEqual(len(cluster), 2)
            addresses |= {*cluster, told[name]["place"]["oracle"]}
        self.assertEqual(len(addresses), 5)
        self.assertIsNone(told["oracle"]["place"]["group"])
        self.assertEqual(told["oracle"]["gpus"], "-1")
        self.assertEqual(len(told["oracle"]["config"]["cluster"]["worker"]), 1)

    def test_a_group_that_fails_ends_as_a_whole_and_no_other(self) -> None:
        script = self.script("""
            gone, ready = (os.path.join(here, name) for name in ("gone", "ready"))
            if group == 1 and rank == 1:
                while not os.path.exists(ready):
                    time.sleep(0.05)
                sys.exit(3)
            if group == 1:
                signal.signal(signal.SIGTERM, lambda *_: (open(gone, "w"), sys.exit(0)))
                open(ready, "w").close()
                time.sleep(60)
            while not os.path.exists(gone):
                time.sleep(0.05)
            time.sleep(2.5 if group is None else 0)
            print("end", flush=True)
            """)
        status, out, err = self.run_to_end("-n", "4", "--trials", "2", script)
        self.assertEqual(status, 0, err)
        self.assertEqual(out, ["[0.0] end", "[0.1] end", "[oracle] end"])
        told = "tf-dgc-run: worker 3 of group 1 ended with status 3; the others go on"
        self.assertEqual(err.splitlines(), [told])

    def test_a_group_that_fails_is_started_again_as_a_whole(self) -> None:
        script = self.script("""
            done = [os.path.join(here, f"done{k}") for k in range(2)]
            if group is None:
                while not all(map(os.path.exists, done)):
                    time.sleep(0.05)
                sys.exit(0)
            if group == 0 and rank == 0 and attempt == 0:
                sys.exit(3)
            if group == 0 and attempt == 0:
                time.sleep(60)
            if group == 0:
                print("again", attempt, flush=True)
                open(done[rank], "w").close()
            """)
        again = "--restarts", "2", "--pause", "0"
        status, out, err = self.run_to_end("-n", "4", "--trials", "2", *again, script)
        self.assertEqual(status, 0, err)
        self.assertEqual(out, ["[0.0] again 1", "[0.1] again 1"])
        self.assertIn("starting it again, 1 of 2", err)

    def test_the_job_ends_as_the_process_of_the_oracle_does(self) -> None:
        script = self.script("""
            if group is None:
                time.sleep(0.5)
                sys.exit(5)
            tell("ready", os.getpid())
            time.sleep(60)
            """)
        process = self.start("-n", "2", "--trials", "2", script)
        status, out, err = finish(process)
        self.assertEqual(status, 5)
        self.assertIn("the process of the oracle ended with status 5", err)
        self.assertTrue(all_end([int(x.split()[-1]) for x in out.splitlines()]))

    def test_the_job_ends_where_all_groups_have_failed(self) -> None:
        script = self.script("""
            time.sleep(60 if group is None else 0)
            sys.exit(4)
            """)
        status, _, err = self.run_to_end("-n", "2", "--trials", "2", script)
        self.assertEqual(status, 4)
        self.assertIn("all groups have failed", err)

    def test_what_cannot_be_is_refused(self) -> None:
        script = self.script("")
        for options, expected in (
            (("-n", "3", "--trials", "2"), "groups of equal size.*--trials 2 for 3"),
            (("-n", "2", "--trials", "2", "--ps", "1"), "leave out `--ps`"),
            (("-n", "2", "--trials", "-1"), "must be 0 or more"),
        ):
            status, _, err = self.run_to_end(*options, script)
            self.assertEqual(status, 2)
            self.assertRegex(err, expected)


@pytest.mark.processes
class HostsTest(WithGroups):
    """Two names of this machine, each reached by a real sshd."""

    def test_groups_go_over_hosts_and_the_oracle_is_on_the_first(self) -> None:
        sshd.program()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        daemon = sshd.Sshd(folder)
        process = daemon.start()
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        script = self.script("""
            told = [config["cluster"]["worker"], place["oracle"]]
            print(json.dumps([*told, os.environ.get("TF_DGC_LOCAL")]), flush=True)
            time.sleep(1.5 if group is None else 0)
            """)
        hosts = "--hosts", "127.0.0.1:1,127.0.0.2:3", "--ssh", daemon.client
        status, out, err = self.run_to_end(*hosts, "--trials", "2", script)
        self.assertEqual((status, err), (0, ""))
        split = [line.split("] ", 1) for line in out]
        told = {name[1:]: json.loads(text) for name, text in split}
        places = {
            name: [address.partition(":")[0] for address in addresses]
            for name, (addresses, _, _) in told.items()
        }
        self.assertEqual(places["0.1"], ["127.0.0.1", "127.0.0.2"])
        self.assertEqual(places["1.0"], ["127.0.0.2", "127.0.0.2"])
        oracles = {oracle for _, oracle, _ in told.values()}
        self.assertEqual(len(oracles), 1)
        self.assertEqual(told["oracle"][0], list(oracles))
        self.assertEqual(places["oracle"], ["127.0.0.1"])
        names = ("0.0", "0.1", "1.0", "1.1")
        self.assertEqual([told[n][2] for n in names], ["0/1", "0/3", "1/3", "2/3"])


if __name__ == "__main__":
    unittest.main()
