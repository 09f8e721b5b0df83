"""The strategy of Deep Gradient Compression."""

from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import EachStep, nodes
from tf_dgc.strategies.base import BaseStrategy, agree
from tf_dgc.transports import Transport, resolve
from tf_dgc.transports.mesh import Mesh


class DGCStrategy(BaseStrategy):
    """Deep Gradient Compression: each worker sends its largest gradient elements.

    Example:
        strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.999))
        with strategy.scope():
            model = ...
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(dataset_of_global_batches)

    References:
        Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018,
        https://arxiv.org/abs/1712.01887
    """

    def __init__(
        self, config: DGCConfig | None = None, *, transport: str | Transport = "auto"
    ) -> None:
        """Find the other workers; call this before any other TensorFlow operation.

        Args:
            config: the settings, the same on every worker; by default `DGCConfig()`.
            transport: see `tf_dgc.transports.resolve`.

        Raises:
            TypeError: `config` is not a DGCConfig.
            ValueError: `transport` is unknown, or the workers differ in version,
                strategy or settings; names the field and the ranks.
            TimeoutError: a worker did not come; names it.
            RuntimeError, ImportError: see `transports.resolve`.
        """
        config = DGCConfig() if config is None else config
        if not isinstance(config, DGCConfig):
            raise TypeError(
                f"`config` must be a DGCConfig. Received: config={config!r}"
            )
        among, wanted = Mesh.over(resolve(transport)).voices, config.hierarchical
        if wanted:  # before it is acted on, as it makes workers meet
            agree(type(self).__name__, among.everybody, config)
        mesh = Mesh.of(nodes.chosen(among, wanted, config))
        super().__init__(mesh, config, EachStep(config))
