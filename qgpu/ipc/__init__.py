"""How processes of this host talk: messages, sockets, HTTP, systemd."""
