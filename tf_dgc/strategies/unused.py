"""Warning at the end of a process in which a strategy had no part."""

import logging

from tf_dgc.strategies.extended import OneReplicaExtended
from tf_dgc.transports import ending
from tf_dgc.transports.mesh import Mesh

_logger = logging.getLogger("tf_dgc")


def warn(extended: OneReplicaExtended, mesh: Mesh) -> None:
    """Warn where nothing was made in the scope of a strategy, or no step was run.

    Args:
        extended: of the strategy, which may be gone by now.
        mesh: of the workers.
    """
    if not extended.used:
        _logger.warning(
            "No variable was made in the scope of this strategy, so nothing was "
            "synchronised: build and compile the model inside `with "
            "strategy.scope():`"
        )
    elif not extended.ran and mesh.everybody.rank == 0:
        if ending.failure() is not None:
            return
        _logger.warning(
            "The strategy has run no step, so nothing was exchanged: each worker "
            "has computed everything by itself. Train by `fit`, or call the step "
            "by `strategy.run` on data that `experimental_distribute_dataset` has "
            "shared out; or leave out `--strategy` of tf-dgc-run"
        )
