"""Policies: pure functions from snapshot to plan. ``registry`` names them all; further files hold what they share."""
