"""Questions about made pictures, for a small policy that takes images."""
