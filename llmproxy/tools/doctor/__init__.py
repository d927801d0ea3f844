"""Looks at replicas before the proxy serves them (`llmproxy doctor`), and writes a configuration (`llmproxy init`)."""
