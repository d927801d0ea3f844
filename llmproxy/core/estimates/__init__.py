"""What a request will cost and when it will answer, learned from earlier requests."""
