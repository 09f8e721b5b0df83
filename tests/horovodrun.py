"""Horovod's launcher: a script of tests, so that it starts in a fork.

horovodrun starts two processes that import TensorFlow, only to ask what Horovod was
built with. In a fork both have it already. See `forks`.
"""

import sys

from horovod.runner import launch

if __name__ == "__main__":
    sys.argv[0] = "horovodrun"
    sys.exit(launch.run_commandline())
