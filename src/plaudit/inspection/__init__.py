"""Looking at a run: health checks and times while it goes on, one answer token by token, what is new in its folder."""
