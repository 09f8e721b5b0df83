"""Starts workers, here and on other hosts. Needs the standard library only."""
