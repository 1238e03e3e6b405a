"""Looking at a run: health checks while it goes on."""
