"""How a guardian is replaced: its journal, the standby guardian, and opening all gates without a guardian."""
