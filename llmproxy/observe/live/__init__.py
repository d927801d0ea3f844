"""History for the page and `top`: one row of numbers a second for a day, the last requests, the last events."""
