"""Files of state: what was written comes back, and nothing else does."""

import json
import pathlib
import pickle
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc.exchanges import state_files

ACCOUNTS = [
    {"variables": ["float32 (3, 2)"], "arrays": {"residual": [128]}, "step": 7},
    {"variables": [], "arrays": {}, "step": 0},
    {
        "variables": ["float16 (9, 9)", "float32 (1,)"],
        "arrays": {"residual": [2, 128], "velocity": [2, 128]},
        "step": 2**40,
    },
]


def arrays_of(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        f"{i}.{name}": random.normal(size=shape).astype(np.float32)
        for i, account in enumerate(ACCOUNTS)
        for name, shape in account["arrays"].items()
    }


class StateFilesTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = (
            pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
            / "deep"
            / "state"
        )
        self.manifest = state_files.manifest_of(0x1A2B, 2, ACCOUNTS)
        for rank in (0, 1):
            state_files.prepare(self.folder, rank, self.manifest, arrays_of(rank))
            state_files.commit(self.folder, rank, self.manifest)
        self.file = self.folder / "rank-00001.00001a2b.npz"

    def read(self) -> dict[str, np.ndarray]:
        manifest = state_files.read_manifest(self.folder)
        return state_files.read(self.folder, 1, manifest)

    def test_what_was_written_comes_back(self) -> None:
        manifest = state_files.read_manifest(self.folder)
        self.assertEqual(manifest, self.manifest)
        for rank in (0, 1):
            found = state_files.read(self.folder, rank, manifest)
            self.assertEqual(found.keys(), arrays_of(rank).keys())
            for name, array in arrays_of(rank).items():
                self.assertAllEqual(found[name], array)
                self.assertEqual(found[name].dtype, np.float32)

    def test_nothing_else_stays_in_the_folder(self) -> None:
        names = sorted(path.name for path in self.folder.iterdir())
        self.assertEqual(
            names, ["manifest.json", *(f"rank-0000{i}.00001a2b.npz" for i in (0, 1))]
        )

    def test_until_it_is_committed_the_old_one_stands(self) -> None:
        later = state_files.manifest_of(7, 2, ACCOUNTS)
        state_files.prepare(self.folder, 1, later, arrays_of(5))
        self.assertAllEqual(self.read()["0.residual"], arrays_of(1)["0.residual"])
        state_files.commit(self.folder, 1, later)
        self.assertAllEqual(self.read()["0.residual"], arrays_of(5)["0.residual"])
        (self.folder / "rank-00001.other.npz").touch()
        state_files.clean(self.folder, 1, later)
        found = {path.name[5:-4] for path in self.folder.glob("rank-*")}
        self.assertEqual(found, {"00000.00001a2b", "00001.00000007", "00001.other"})

    def test_a_truncated_file_is_refused_wherever_it_ends(self) -> None:
        whole = self.file.read_bytes()
        for end in [*range(0, len(whole), 97), len(whole) - 1]:
            self.file.write_bytes(whole[:end])
            with self.assertRaisesRegex(ValueError, r"rank-00001\.00001a2b\.npz: "):
                self.read()

    def test_a_damaged_file_is_refused_or_reads_as_before(self) -> None:
        whole, random = self.file.read_bytes(), np.random.default_rng(0)
        expected = self.read()
        refused = 0
        for _ in range(300):
            damaged = bytearray(whole)
            damaged[random.integers(len(whole))] ^= 1 << random.integers(8)
            self.file.write_bytes(damaged)
            try:
                found = self.read()
            except ValueError as error:
                self.assertIn("rank-00001.00001a2b.npz: ", str(error))
                refused += 1
            else:  # a bit that means nothing, as in a time
                for name, array in expected.items():
                    self.assertAllEqual(found[name], array)
        self.assertGreater(refused, 200)

    def test_a_truncated_manifest_is_refused_wherever_it_ends(self) -> None:
        path = self.folder / "manifest.json"
        whole = path.read_bytes()
        for end in range(len(whole)):
            path.write_bytes(whole[:end])
            with self.assertRaisesRegex(ValueError, r"manifest\.json: not a manifest"):
                self.read()

    @parameterized.parameters(b"[]", b"null", b'"x"', b"7", b"\xff\xfe", b"{} {}")
    def test_a_foreign_manifest_is_refused(self, text: bytes) -> None:
        (self.folder / "manifest.json").write_bytes(text)
        with self.assertRaisesRegex(ValueError, r"manifest\.json: "):
            self.read()

    @parameterized.parameters(
        ("format", "other", "field 'format' must be"),
        ("world_size", 0, "field 'world_size' must be"),
        ("world_size", "2", "field 'world_size' must be"),
        ("save", -1, "field 'save' must be"),
        ("save", True, "field 'save' must be"),
        ("save", 2**31, "field 'save' must be an integer of at least 0, below 2"),
        ("world_size", 2**31, "field 'world_size' must be"),
        ("accounts", 3, "not a manifest of tf_dgc"),
        ("accounts", [{}], "field 'variables' is missing"),
        ("accounts", [{"variables": [], "arrays": {}}], "field 'step' is missing"),
        (
            "accounts",
            [{"variables": [], "arrays": {"u": ["x"]}, "step": 0}],
            "not a manifest of tf_dgc",
        ),
        *(
            (
                "accounts",
                [ACCOUNTS[0] | {field: wrong}],
                "not a manifest of tf_dgc, or damaged: no account of an optimizer",
            )
            for field, wrong in (
                ("variables", "float32 (3, 2)"),
                ("variables", [1]),
                ("arrays", {"residual": [-1]}),
                ("arrays", {"residual": [True]}),
                ("arrays", {"residual": "12"}),
                ("step", 2**63),
                ("step", float("inf")),
            )
        ),
    )
    def test_the_field_that_is_wrong_is_named(
        self, field: str, value: Any, message: str
    ) -> None:
        wrong = json.dumps(self.manifest | {field: value})
        (self.folder / "manifest.json").write_text(wrong)
        with self.assertRaisesRegex(ValueError, rf"manifest\.json: {message}"):
            self.read()

    def test_a_field_that_is_missing_is_named(self) -> None:
        for field in self.manifest:
            rest = {k: v for k, v in self.manifest.items() if k != field}
            (self.folder / "manifest.json").write_text(json.dumps(rest))
            with self.assertRaisesRegex(ValueError, f"field '{field}' is missing"):
                self.read()

    def test_an_array_alone_is_refused(self) -> None:
        with self.file.open("wb") as file:
            np.save(file, np.zeros(128))
        with self.assertRaisesRegex(ValueError, "not a file of state, or damaged"):
            self.read()

    def test_missing_files_are_named(self) -> None:
        self.file.unlink()
        with self.assertRaisesRegex(
            FileNotFoundError, r"rank-00001\.00001a2b\.npz is missing: .* by 2 workers"
        ):
            self.read()
        (self.folder / "manifest.json").unlink()
        with self.assertRaisesRegex(FileNotFoundError, "has no manifest.json"):
            self.read()

    def test_files_of_different_saves_are_not_mixed(self) -> None:
        later = [ACCOUNTS[0] | {"step": 8}, *ACCOUNTS[1:]]
        manifest = state_files.manifest_of(0x1A2B, 2, later)
        state_files.commit(self.folder, 0, manifest)
        with self.assertRaisesRegex(ValueError, "npz: field 'accounts' is not that of"):
            self.read()

    def test_arrays_must_be_what_the_manifest_says(self) -> None:
        own = arrays_of(1)
        for wrong, message in (
            ({"0.residual": own["0.residual"][:-1]}, r"of shape \(128,\). Received: f"),
            ({"0.residual": np.array(["a"] * 128)}, "must be numbers of shape"),
            ({"2.velocity": np.zeros([2, 128], bool)}, "must be numbers of shape"),
        ):
            state_files.prepare(self.folder, 1, self.manifest, own | wrong)
            with self.assertRaisesRegex(ValueError, f"npz: field .*{message}"):
                self.read()
        del own["2.velocity"]
        state_files.prepare(self.folder, 1, self.manifest, own)
        with self.assertRaisesRegex(ValueError, "field '2.velocity' is missing"):
            self.read()

    def test_nothing_is_unpickled(self) -> None:
        touched = self.folder / "touched"

        class Hostile:
            def __reduce__(self) -> Any:
                return pathlib.Path.touch, (touched,)

        hostile = np.array([Hostile()] * 128, object)
        text = np.frombuffer(json.dumps(self.manifest).encode(), np.uint8)
        arrays = arrays_of(1) | {"0.residual": hostile, "manifest": text}
        for write, message in (
            (lambda: np.savez(self.file, **arrays), "must be numbers of shape"),
            (
                lambda: self.file.write_bytes(pickle.dumps(Hostile())),
                "not a file of state, or damaged",
            ),
        ):
            write()
            with self.assertRaisesRegex(ValueError, message):
                self.read()
        self.assertFalse(touched.exists())


if __name__ == "__main__":
    tf.test.main()
