"""Questions that are answered by searching a corpus through a retriever, as Search-R1 does."""
