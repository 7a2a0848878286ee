"""The daemon: composes plane, policies, loops and the control socket."""
