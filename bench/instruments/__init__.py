"""Instruments: each is started and stopped around a step and adds its own part to the record."""
