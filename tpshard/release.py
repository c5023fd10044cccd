"""The version of this release, where reading it costs nothing; pyproject.toml bears the same."""

VERSION = "0.1.0"
