"""Search for hyperparameters: one process decides what is tried, all workers train it.

Tuners of KerasTuner are shared by the workers of a strategy as they are; under
`tf-dgc-run --trials G` each of G groups of workers trains another trial. A study of
Optuna is made by `create_study`.
"""

from tf_dgc.search.studies import create_study

__all__ = ["create_study"]
