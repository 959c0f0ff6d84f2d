"""Checks that are run by hand, on a machine with a GPU above all."""
