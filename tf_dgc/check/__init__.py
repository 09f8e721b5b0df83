"""Looks at workers and their network before a training; see `command`.

Needs the standard library only, where TF_CONFIG names the workers.
"""
