"""One GPU in the guardian: its plan, its gates and timeslices, and queries to RM about its objects."""
