"""Pages: labelling, two models side by side, a run as it goes, one answer token by token.

The only user of FastAPI; pages are made on the server, or from what it sends, and need no other network.
"""
