"""Figures of the rows, made of the numbers that the same rows assert."""
