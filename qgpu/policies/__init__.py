"""Policies: pure functions from snapshot to plan. ``registry`` names them all; beside them lies what they share."""
