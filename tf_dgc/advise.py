"""Predicts whether a strategy helps: see `tf_dgc.lab.advise`.

python -m tf_dgc.advise --model module:function --workers 4 16 --bandwidth 1gbit
"""

import sys

from tf_dgc.lab.advise import main
from tf_dgc.prediction.costs import Network, Prediction, choose, predict

__all__ = ["Network", "Prediction", "choose", "main", "predict"]

if __name__ == "__main__":
    sys.exit(main())
