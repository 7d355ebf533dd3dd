"""Questions that are answered by searching documents, in one search or several."""
