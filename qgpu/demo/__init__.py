"""The demo: pods come and go and policies change, watched live and drawn at the end."""
