"""One short file an algorithm. They see protocols and row types, never engines, stores or folders."""
