"""The rules for a pod's RM calls: tables of controls, classes and escapes, one row for each by RM's own name."""
