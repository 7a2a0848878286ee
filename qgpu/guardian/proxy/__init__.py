"""A pod's system calls: decoded, checked, carried out or refused, and answered."""
