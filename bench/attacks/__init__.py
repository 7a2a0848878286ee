"""Attackers of bench/isolation.py, how they are built, and how what they did is judged."""
