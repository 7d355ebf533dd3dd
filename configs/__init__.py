"""Ready-to-run configurations: each module defines one ``config``, a `RunConfig`."""
