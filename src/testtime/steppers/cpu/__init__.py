"""Steppers on the CPU: compiled loops."""
