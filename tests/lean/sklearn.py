"""Stands before the real one: see `launch.worker_environment`."""

raise ImportError("workers of tests start without it")
