"""One GPU in the guardian: its plan, its gates and timeslices, and what RM is asked about objects on it."""
