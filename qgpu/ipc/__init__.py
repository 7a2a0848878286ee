"""How processes on this host communicate: messages, sockets, HTTP, systemd."""
