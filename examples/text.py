"""Train a small language model of characters with Adam, on several workers.

    tf-dgc-run -n 2 examples/text.py
    tf-dgc-run -n 2 examples/text.py --ratio 100
    tf-dgc-run -n 2 examples/text.py --strategy dense

The model predicts a character from the sixteen before it. The text is composed of a
few words, so that nothing is downloaded. At the end worker 0 prints the loss on text
not trained on, what each worker sent, and whether all workers hold bit-identical
weights; where they do not, the exit status is 1.

References:
    Bengio, Ducharme, Vincent, Jauvin: A Neural Probabilistic Language Model,
    JMLR 3, 2003.
"""

import argparse
import sys

import keras
import numpy as np
from digits import weights_agree

import tf_dgc

Split = tuple[np.ndarray, np.ndarray]

LENGTH = 16  # characters that the model sees
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz"
SENTENCE = (
    ("the", "one", "every", "no"),
    ("old", "small", "quiet", "clever"),
    ("farmer", "teacher", "painter", "sailor"),
    ("follows", "likes", "remembers", "watches"),
    ("my", "your", "this", "another"),
    ("river", "garden", "kitchen", "window"),
)


def compose(sentences: int, seed: int) -> str:
    """Returns sentences of randomly drawn words, one a line."""
    random = np.random.default_rng(seed)
    drawn = ([random.choice(words) for words in SENTENCE] for _ in range(sentences))
    return "\n".join(" ".join(words) for words in drawn)


def windows(text: str) -> Split:
    """Returns each LENGTH characters of a text as numbers, and the one after them."""
    codes = np.array([CHARACTERS.index(character) for character in text], "int32")
    both = np.lib.stride_tricks.sliding_window_view(codes, LENGTH + 1)
    return both[:, :-1], both[:, -1]


def build() -> keras.Model:
    """Returns the network: an embedding and three dense layers, 205,212 weights."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(len(CHARACTERS), 32),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(len(CHARACTERS), activation="softmax"),
        ]
    )


def make_strategy(
    name: str, ratio: float, total_steps: int
) -> tf_dgc.DGCStrategy | tf_dgc.DenseStrategy:
    """Returns the strategy called `name`: dgc, dense or single."""
    if name == "dgc":
        config = tf_dgc.DGCConfig(ratio=ratio, total_steps=total_steps)
        return tf_dgc.DGCStrategy(config)
    return tf_dgc.DenseStrategy(transport="local" if name == "single" else "auto")


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--strategy", choices=("dgc", "dense", "single"), default="dgc")
    parser.add_argument("--ratio", type=float, default=50, help="dense bytes over sent")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--verbose", type=int, default=2, help="as in Model.fit")
    return parser.parse_args()


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    train, test = windows(compose(600, seed=1)), windows(compose(100, seed=2))
    steps = -(-len(train[0]) // args.batch_size)
    # Before any TensorFlow operation runs: the workers connect here.
    strategy = make_strategy(args.strategy, args.ratio, args.epochs * steps)
    keras.utils.set_random_seed(1)  # the same on every worker
    with strategy.scope():
        model = build()
        adam = keras.optimizers.Adam(args.learning_rate)
        model.compile(adam, "sparse_categorical_crossentropy")
    how = {"batch_size": args.batch_size, "verbose": args.verbose}
    model.fit(*train, epochs=args.epochs, **how)
    loss = model.evaluate(*test, batch_size=args.batch_size, verbose=0)

    agree = weights_agree(model, strategy)
    total = strategy.stats(total=True)
    if strategy.is_chief:
        verdict = "bit-identical" if agree else "NOT identical"
        print(f"loss               {loss:.4f} nats a character, of unseen text")
        print(f"sent per worker    {int(total.sent_bytes):,} bytes")
        print(f"dense would send   {int(total.dense_bytes):,} bytes")
        print(f"weights            {verdict} on all workers")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
