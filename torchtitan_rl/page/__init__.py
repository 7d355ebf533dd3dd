"""The page of a run: an index of its files, what each view shows, and the server."""
