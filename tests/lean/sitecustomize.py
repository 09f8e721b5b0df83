"""Python runs this when a worker starts: see `forks`."""

import forks

forks.hand_over()
