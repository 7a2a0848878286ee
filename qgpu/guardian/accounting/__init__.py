"""What pods made and hold: RM objects, memory on each card, and what of it counts against a limit."""
