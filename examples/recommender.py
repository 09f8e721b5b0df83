"""Recommend items: a factorization whose tables live on parameter servers only.

    tf-dgc-run -n 2 --ps 2 examples/recommender.py --items 10000

The ratings are made up: users and items have a few hidden tastes. With `--items
8000000 --width 64` the table has 2 GB, of which no worker holds more than the rows of a
batch.
"""

import argparse

import keras
import numpy as np

import tf_dgc


def ratings(
    users: int, items: int, count: int, seed: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draw who rates what, and how: popular items more often."""
    drawn = np.random.default_rng(seed)
    who = drawn.integers(0, users, count)
    what = (items * drawn.random(count) ** 4).astype("int64")
    # Tastes are a function of the number, so that no table of them is needed.
    likes = np.sin(who[:, None] * [1.0, 2.0]) * np.sin(what[:, None] * [3.0, 5.0])
    score = likes.sum(1) + drawn.normal(scale=0.1, size=count)
    return {"user": who, "item": what}, score.astype("float32")


def make_model(users: int, items: int, width: int) -> keras.Model:
    """Return the product of a user's row and an item's."""
    user = keras.Input([], dtype="int64", name="user")
    item = keras.Input([], dtype="int64", name="item")
    rows = [
        keras.layers.Embedding(users, width)(user),
        keras.layers.Embedding(items, width, embeddings_initializer="random_normal")(
            item
        ),
    ]
    return keras.Model({"user": user, "item": item}, keras.layers.Dot(axes=1)(rows))


def main() -> None:
    """Train, and say how well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--ratings", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    strategy = tf_dgc.DownpourStrategy(tf_dgc.DownpourConfig(table_bytes=2**19))
    with strategy.scope():
        model = make_model(options.users, options.items, options.width)
        model.compile(keras.optimizers.Adagrad(1.0), "mse", jit_compile=False)
    x, y = ratings(options.users, options.items, options.ratings, seed=1)
    verbose = 2 if strategy.is_chief else 0
    model.fit(x, y, batch_size=256, epochs=options.epochs, verbose=verbose)
    strategy.barrier()
    if strategy.is_chief:
        x, y = ratings(options.users, options.items, 10_000, seed=2)
        loss = model.evaluate(x, y, batch_size=256, verbose=0)
        print(f"variance of the ratings {y.var():.3f}, error of the model {loss:.3f}")


if __name__ == "__main__":
    main()
