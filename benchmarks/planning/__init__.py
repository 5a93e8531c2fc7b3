"""Planners against the published results of G10's evaluation, their own bound, and each other."""
