"""Drawn recipes on synchronous parameter servers, one after another; see `serving`."""

import pathlib
from typing import Any

import serving
import test_drawn_recipes

import tf_dgc


def serve() -> None:
    tf_dgc.DownpourStrategy()


def train(recipes: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """Run recipes on this worker; tell what each gives."""
    strategy = tf_dgc.DownpourStrategy(tf_dgc.DownpourConfig(synchronous=True))
    found = []
    for recipe in recipes:
        own = pathlib.Path(folder, str(recipe["seed"]))
        for rank in range(strategy.workers):
            (own / str(rank)).mkdir(parents=True, exist_ok=True)
        found.append(test_drawn_recipes.run(recipe, str(own), strategy=strategy))
        strategy.barrier()
    return {"found": found}


if __name__ == "__main__":
    serving.main({"serve": serve, "train": train})
