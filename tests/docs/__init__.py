"""Tests of README.md, SECURITY.md and the pages in docs/."""
