"""Pages and routes for operators."""
