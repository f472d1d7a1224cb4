"""Data measured on GPUs that cutex ships: errors of cost models, and choices made by timing."""
