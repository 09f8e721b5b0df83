"""Train a ResNet-20 on CIFAR-10, on several workers.

    horovodrun -np 4 python examples/cifar10.py
    python examples/cifar10.py --strategy single --npz cifar10.npz

The images come from `keras.datasets.cifar10`, which downloads them, or from a file
with the arrays x_train, y_train, x_test and y_test.

References:
    He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition,
    https://arxiv.org/abs/1512.03385, section 4.2.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from digits import make_strategy

Split = tuple[np.ndarray, np.ndarray]


def load(file: str | None, limit: int | None) -> tuple[Split, Split]:
    """Returns training and test images, as they are, with labels; `limit` of each."""
    if file is None:
        train, test = keras.datasets.cifar10.load_data()
    else:
        with np.load(file) as arrays:
            train = arrays["x_train"], arrays["y_train"]
            test = arrays["x_test"], arrays["y_test"]
    cut = slice(limit)
    return (train[0][cut], train[1][cut]), (test[0][cut], test[1][cut])


def augment(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Shifts an image, shape [32, 32, 3], by up to 4 pixels, mirrors some."""
    image = tf.image.random_crop(tf.pad(image, [[4, 4], [4, 4], [0, 0]]), [32, 32, 3])
    return tf.image.random_flip_left_right(image), label


def convolution(filters: int, stride: int = 1, size: int = 3) -> keras.Sequential:
    """Returns a convolution and its batch normalization."""
    convolve = keras.layers.Conv2D(
        filters, size, stride, "same", use_bias=False, kernel_initializer="he_normal"
    )
    return keras.Sequential([convolve, keras.layers.BatchNormalization()])


def build(blocks: int = 3, size: int = 32) -> keras.Model:
    """Returns a ResNet of 6 * `blocks` + 2 layers, for images of `size` pixels."""
    inputs = keras.Input((size, size, 3))
    x = keras.layers.Rescaling(1 / 64, offset=-2)(inputs)
    x = keras.layers.ReLU()(convolution(16)(x))
    for filters in (16, 32, 64):
        for block in range(blocks):
            stride = 2 if filters > 16 and block == 0 else 1
            shortcut = convolution(filters, 2, size=1)(x) if stride == 2 else x
            x = keras.layers.ReLU()(convolution(filters, stride)(x))
            x = keras.layers.Add()([convolution(filters)(x), shortcut])
            x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--strategy", choices=("dgc", "dense", "single"), default="dgc")
    parser.add_argument("--sparsity", type=float, default=0.999)
    parser.add_argument("--epochs", type=int, default=164)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers")
    parser.add_argument("--npz", metavar="FILE", help="take the images from FILE")
    parser.add_argument("--limit", type=int, help="use so many images only")
    parser.add_argument("--verbose", type=int, default=2, help="as in Model.fit")
    return parser.parse_args()


def main() -> None:
    """Trains and reports."""
    args = arguments()
    train, test = load(args.npz, args.limit)
    steps = len(train[0]) // args.batch_size
    # Before any TensorFlow operation runs: the workers connect here.
    strategy = make_strategy(args.strategy, args.sparsity, 4 * steps)
    keras.utils.set_random_seed(1)  # the same on every worker

    with strategy.scope():
        model = build()
        rate = keras.optimizers.schedules.PiecewiseConstantDecay(
            [args.epochs * steps // 2, args.epochs * steps * 3 // 4], [0.1, 0.01, 0.001]
        )
        # Decoupled decay, so that it is not compressed. It acts without momentum:
        # 1e-3 is the usual 1e-4 over 1 - momentum.
        sgd = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=1e-3)
        model.compile(sgd, "sparse_categorical_crossentropy", metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=1)
    data = data.map(augment, tf.data.AUTOTUNE).batch(args.batch_size, True)
    unseen = tf.data.Dataset.from_tensor_slices(test).batch(args.batch_size)
    verbose = args.verbose if strategy.is_chief else 0
    settings = {"epochs": args.epochs, "shuffle": False, "verbose": verbose}
    model.fit(data, validation_data=unseen, **settings)
    _, accuracy = model.evaluate(unseen, verbose=0)

    total = strategy.stats(total=True)
    if strategy.is_chief:
        print(f"test accuracy      {accuracy:.2%} of {len(test[0])} images")
        print(f"sent per worker    {int(total.sent_bytes):,} bytes")
        print(f"dense would send   {int(total.dense_bytes):,} bytes")


if __name__ == "__main__":
    main()
