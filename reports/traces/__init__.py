"""Kineto traces of ranks into columns, and columns into small tables that add up exactly."""
