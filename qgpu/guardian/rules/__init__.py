"""What a pod may ask of RM: its controls, classes and escapes, a table each, one row for each by RM's own name."""
