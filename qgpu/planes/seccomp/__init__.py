"""The seccomp plane: pods and plans through a guardian process, with no kernel module."""
