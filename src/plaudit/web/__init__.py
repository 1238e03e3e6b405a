"""Pages: labelling. The only user of FastAPI and uvicorn; pages are made on the server and need no other network."""
