#!/usr/bin/env python
"""Count the images that each worker decodes in an epoch, and what that costs.

    scripts/bench_input.py
    scripts/bench_input.py --images 2048 --workers 1 2 4 8 --json input.json

The workers are taken one after another in this process, each alone on the machine, as
they would be on machines of their own; nothing is trained. For each kind of input and
number of workers it prints what the worker that has most to do decodes, how many times
its part that is, and the seconds of all processors together that an epoch takes it,
which other load on the machine hardly changes.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras.src.trainers.data_adapters import py_dataset_adapter  # noqa: E402

from tf_dgc.strategies import data  # noqa: E402

FILES, CLASSES = 8, 4
LARGE, SIDE = 640, 224  # of images as they are stored, and as they are used
AUTOTUNE = tf.data.AUTOTUNE
decoded = [0]
counting = [False]


def note(image: Any) -> Any:
    """Count an image."""
    decoded[0] += 1
    return image


def decode(image: tf.Tensor) -> tf.Tensor:
    """Decode and resize an image, and count it where images are counted."""
    if counting[0]:
        image = tf.numpy_function(note, [image], tf.string, stateful=False)
        image = tf.ensure_shape(image, [])
    pixels = tf.io.decode_jpeg(image, channels=3)
    return tf.image.resize(pixels, [SIDE, SIDE])


def write_images(folder: pathlib.Path, images: int) -> None:
    """Write the same images as files by class, and as records."""
    random = np.random.default_rng(0)
    writers = [
        tf.io.TFRecordWriter(str(folder / f"{i}.tfrecord")) for i in range(FILES)
    ]
    for i in range(images):
        coarse = random.integers(0, 255, (1, LARGE // 8, LARGE // 8, 3))
        pixels = tf.cast(tf.image.resize(coarse, [LARGE, LARGE])[0], tf.uint8)
        octets = tf.io.encode_jpeg(pixels).numpy()
        path = folder / "classes" / str(i % CLASSES) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(octets)
        feature = {
            "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[octets])),
            "label": tf.train.Feature(
                int64_list=tf.train.Int64List(value=[i % CLASSES])
            ),
        }
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        writers[i % FILES].write(example.SerializeToString())
    for writer in writers:
        writer.close()


def parse(record: tf.Tensor) -> Any:
    """Return the image and label of a record."""
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    found = tf.io.parse_single_example(record, features)
    return decode(found["image"]), found["label"]


def flip(image: tf.Tensor, label: tf.Tensor) -> Any:
    """Augment an image, without a seed."""
    return tf.image.random_flip_left_right(image), label


class Images(keras.utils.PyDataset):
    """Decodes batch by batch, in Python."""

    def __init__(self, paths: Sequence[pathlib.Path], batch: int) -> None:
        super().__init__()
        self._paths, self._batch = paths, batch

    def __len__(self) -> int:
        return -(-len(self._paths) // self._batch)

    def __getitem__(self, index: int) -> Any:
        paths = self._paths[index * self._batch : (index + 1) * self._batch]
        images = [decode(tf.constant(path.read_bytes())) for path in paths]
        return np.stack(images), np.zeros(len(paths))


def inputs(
    folder: pathlib.Path, batch: int
) -> dict[str, Callable[[int, int], tf.data.Dataset]]:
    """Return what makes a worker's own batches, of its rank and of N."""
    records = sorted(map(str, folder.glob("*.tfrecord")))
    paths = sorted((folder / "classes").rglob("*.jpg"))

    def directory() -> tf.data.Dataset:
        return keras.utils.image_dataset_from_directory(
            folder / "classes",
            batch_size=batch,
            image_size=(SIDE, SIDE),
            verbose=False,
        )

    def tfrecords() -> tf.data.Dataset:
        files = tf.data.TFRecordDataset(records)
        return files.map(parse, AUTOTUNE).shuffle(64)

    def py_dataset() -> tf.data.Dataset:
        adapter = py_dataset_adapter.PyDatasetAdapter(Images(paths, batch))
        return adapter.get_tf_dataset()

    def by_file() -> tf.data.Dataset:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE
        )
        return tfrecords().batch(batch).with_options(options)

    def own(rank: int, size: int) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(records).shard(size, rank)
        own = files.interleave(tf.data.TFRecordDataset).map(parse, AUTOTUNE)
        return own.shuffle(64).batch(batch // size)

    def shared(make: Callable[[], tf.data.Dataset]) -> Any:
        return lambda rank, size: data.share_of(make(), rank, size)

    def scale(images: tf.Tensor, labels: tf.Tensor) -> Any:
        return images / 255, labels

    def centred(images: tf.Tensor, labels: tf.Tensor) -> Any:
        return images - tf.reduce_mean(images), labels

    return {
        "image_dataset_from_directory": shared(directory),
        "the same, divided by 255 after it": shared(lambda: directory().map(scale)),
        "the same, the mean of the batch after it": shared(
            lambda: directory().map(centred)
        ),
        "TFRecords": shared(lambda: tfrecords().batch(batch)),
        "TFRecords, flipped at random": shared(
            lambda: tfrecords().map(flip, AUTOTUNE).batch(batch)
        ),
        "TFRecords, AutoShardPolicy.FILE": shared(by_file),
        "distribute_datasets_from_function": own,
        "PyDataset": shared(py_dataset),
    }


def counted_decode_image(image: tf.Tensor, **_: Any) -> tf.Tensor:
    """Stand in for tf.image.decode_image, which Keras calls."""
    return decode(image)


def epochs(
    make: Callable[[int, int], tf.data.Dataset], size: int
) -> Iterator[tuple[int, float]]:
    """Yield what each worker decodes, and the processor seconds of an epoch."""
    for rank in range(size):
        figures = []
        for counting[0] in (True, False):
            dataset = make(rank, size)
            decoded[0], begin = 0, time.process_time()
            for _ in dataset:
                pass
            figures.append((decoded[0], time.process_time() - begin))
        yield figures[0][0], figures[1][1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="rows, of all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    figures = []
    tf.image.decode_image = counted_decode_image
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_images(folder, options.images)
        print("| input | workers | decoded by one | times its part | seconds |")
        print("|---|---|---|---|---|")
        for kind, make in inputs(folder, options.batch).items():
            for size in options.workers:
                count, seconds = map(max, zip(*epochs(make, size), strict=True))
                # Python code decodes the first batch once more, for its shapes.
                times = round(count * size / options.images, 1)
                print(f"| {kind} | {size} | {count} | {times} | {seconds:.2f} |")
                figures.append(
                    {
                        "input": kind,
                        "workers": size,
                        "decoded": count,
                        "times": times,
                        "seconds": seconds,
                    }
                )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
