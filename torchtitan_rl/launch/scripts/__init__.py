"""Scripts and manifests that start a run on several hosts: text, made of a `Job`."""
