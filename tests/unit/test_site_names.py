"""Sites of workers, by what a variable, a scheduler or their hosts tell."""

import os
from unittest import mock

import pytest
from absl.testing import parameterized
from loopback import Loopback, run_workers

from tf_dgc.transports import sites
from tf_dgc.transports.mesh import Mesh, Sites

HOSTS = ["one", "one", "two", "three"]


class SiteNamesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("a,a,b,b", "aabb"),
        ("a, b ,a,b", "abab"),
        ("one;two,three", ["one", "one", "two,three", "two,three"]),
        ("0-2;3", ["0-2", "0-2", "0-2", "3"]),
        ("0,three;1-2", ["0,three", "1-2", "1-2", "0,three"]),
    )
    def test_sites_are_read_by_rank_or_by_what_is_there(
        self, text: str, expected: str
    ) -> None:
        self.assertEqual(sites.read(text, HOSTS), list(expected))

    @parameterized.parameters(
        ("a,a,b", "name the site of each worker"),
        ("a,,b,b", "name the site of each worker"),
        ("one;two", r"has none for \[3\]"),
        ("one;0;two;three", "worker 0 on one site only"),
        ("one;two,four", "not 'four'"),
        ("0-4;", "not '0-4'"),
    )
    def test_what_does_not_name_each_worker_once_is_refused(
        self, text: str, why: str
    ) -> None:
        with self.assertRaisesRegex(ValueError, f"TF_DGC_SITES must .*{why}"):
            sites.read(text, HOSTS)

    @parameterized.parameters(
        (["s0.s1.n1", "s0.s1.n2", "s0.s2.n3"], ["s1", "s1", "s2"]),
        (["n1", "n2", "n2"], ["n1", "n2", "n2"]),
        (["s0.n1", "s0.n1"], ["s0.n1", "s0.n1"]),
    )
    def test_switches_that_not_all_have_are_sites(
        self, told: list[str], expected: list[str]
    ) -> None:
        self.assertEqual(sites.by_switches(told), expected)

    def test_workers_with_other_sites_are_told_so(self) -> None:
        def work(transport: Loopback) -> None:
            given = {"TF_DGC_SITES": "a,b" if transport.rank else "a,a"}
            with mock.patch.object(os, "environ", given):
                sites.among(transport)

        with self.assertRaisesRegex(ValueError, "same sites.*TF_DGC_SITES"):
            run_workers(2, work)

    @pytest.mark.long
    def test_a_mesh_knows_who_steps_together(self) -> None:
        def work(transport: Loopback) -> tuple[int, ...]:
            found = Mesh.of(Sites(transport, "aba"))
            return found.voices.size, found.together.size, found.replicas

        self.assertEqual(run_workers(3, work), [(2, 2, 3), (2, 1, 3), (2, 2, 3)])
