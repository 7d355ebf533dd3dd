"""Grade-school word problems: GSM8K itself, or problems of its format that are made here."""
