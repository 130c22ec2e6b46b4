"""Kernels: exactness, accuracy, bounds."""
