"""Launchers: how the ranks of a run are started, watched and ended."""
