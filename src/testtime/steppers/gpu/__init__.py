"""Steppers on a GPU."""
