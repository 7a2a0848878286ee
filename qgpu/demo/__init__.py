"""The demo: pods come and go and policies change, shown live and as a picture at the end."""
